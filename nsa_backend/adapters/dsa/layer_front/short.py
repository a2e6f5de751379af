"""Decode graphs of short requests, captured beside the usual ones: index scores and top-k decide nothing there.

Where no request has more than index_topk tokens, every row attends to all of its own. SGLang 0.5.23 captures such graphs and
chooses between both by the longest request, on ROCm alone (`layers/attention/graph_variants.py`); here it does on CUDA too.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front.options import needed, server_problems
from nsa_backend.environment import asked

SWITCH = "NSA_BACKEND_SHORT_GRAPHS"


NEEDED = (
    needed("speculative_algorithm", "--speculative-algorithm", (None,)),
    needed("enable_dp_attention", "--enable-dp-attention", (False,)),
    needed("dcp_size", "--dcp-size", (None, 1)),
)
"""Beside what the front asks: decode without drafts on ranks that have the same requests and all of their KV."""


def short_problems(args: Any) -> list[str]:
    """One sentence for each reason why a server of these resolved arguments can have no such graphs."""
    found = server_problems(args)
    if asked("NSA_BACKEND_LAYER_FRONT") is False:
        found.append("NSA_BACKEND_LAYER_FRONT=0 leaves SGLang's front, and ours alone has them: unset one")
    return found + [f"{rule.option} has none: {rule.advice}" for rule in NEEDED if not rule.serves(args)]


def offer(index_topk: int) -> None:
    """Have SGLang's runner of decode graphs capture both kinds; before it is built."""
    from sglang.srt.layers.attention.graph_variants import DsaGraphVariants
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    decode_cuda_graph_runner.create_attention_graph_variants = lambda hf_config: DsaGraphVariants(index_topk)


def is_short() -> bool:
    """Whether what is captured now is a graph of short requests."""
    from sglang.srt.layers.attention.graph_variants import DSA_DENSE
    from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

    return get_capture_attention_variant() == DSA_DENSE


class EveryToken:
    """The selection of a forward whose requests are short: its first layer makes it for all.

    It is made anew in every forward, as SGLang warms a size up before it captures it: a graph holds what makes it.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._made: torch.Tensor | None = None

    def of(self, layer_id: int, metadata: Any, topk: int) -> torch.Tensor:
        """int32 [rows, topk] of a layer that selects; `metadata` is the indexer's."""
        if self._first is None or layer_id <= self._first:
            self._first, self._made = layer_id, metadata.every_token(topk)
        return self._made
