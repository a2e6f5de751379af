"""Graphs of short requests, captured beside the usual ones: index scores and top-k decide nothing there.

Where no request has more than index_topk tokens, every row attends to all of its own. SGLang 0.5.23 captures such graphs of
decode and chooses between both by the longest request, on ROCm alone (`layers/attention/graph_variants.py`); here it does on
CUDA too. With drafts it captures them of target_verify, and a round of short requests is a graph of its own that has one as a
child: which is chosen when the round is captured, and no verify outside of such a round takes them.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_backend.adapters.dsa.layer_front.options import dependent_problems, needed
from nsa_backend.adapters.dsa.rounds import served
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.environment import asked
from nsa_backend.releases import round_graph_problem

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_SHORT_GRAPHS"
CAPTURE_SIZE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape"

MOST_REQUESTS = 64
"""Of the sizes that have them unless they are asked for: a size takes most of a second of the start, and SGLang has some 60."""

UNTRIED = (needed("dcp_size", "--dcp-size", (None, 1)),)
"""Options under whose other values no GPU has run them: there a server has them where they are asked for."""

OF_RANKS = (needed("ep_size", "--ep-size", (1,)),)
"""The same of a server with DP attention."""


def short_problems(args: Any) -> list[str]:
    """One sentence for each reason why a server of these resolved arguments can have no such graphs."""
    found = dependent_problems(args)
    if args.speculative_algorithm is not None and round_graph_problem() is None:
        if asked(served.SWITCH) is False:
            found.append(f"{served.SWITCH}=0 leaves rounds of three graphs, and those of one alone have them: unset one")
        found += [f"of rounds, those of one graph alone have them: {change}" for change in served.changes_needed(args)]
    return found


def wanted(args: Any) -> bool:
    """Whether a server of these resolved arguments is to have them.

    Each rank of DP attention chooses for itself, as between rounds of one graph and of three, for no collective between ranks
    is in what a short graph leaves out.
    """
    said = asked(SWITCH)
    if said is None:
        ranks = not all(rule.serves(args) for rule in served.DP_ATTENTION)
        return all(rule.serves(args) for rule in (*UNTRIED, *OF_RANKS * ranks)) and not short_problems(args)
    return said


class ShortVariants:
    """What SGLang's runner of graphs asks for the labels of a captured size, in place of its `DsaGraphVariants`.

    Of sizes up to `most_requests`; `largest` is the largest one of which short graphs were captured.
    """

    def __init__(self, index_topk: int, most_requests: int):
        from sglang.srt.layers.attention.graph_variants import DsaGraphVariants

        self.index_topk, self.most_requests, self.largest = index_topk, most_requests, 0
        self._by_length = DsaGraphVariants(index_topk)
        self.capture_labels = self.short, self.usual = DsaGraphVariants.capture_labels

    def select(self, forward_batch: Any) -> str:
        """The label of the graph that a batch takes: decode without drafts is told by the longest request.

        Ranks of DP attention pad to the one with the most requests.
        """
        requests = max(forward_batch.original_global_num_tokens_cpu or (forward_batch.batch_size,))
        return self._by_length.select(forward_batch) if requests <= self.largest else self.usual


class RoundVariants(ShortVariants):
    """On a server with drafts: short graphs are for rounds that are captured as short.

    The host does not know a round's lengths before it launches it, so a batch does not tell.
    """

    def __init__(self, index_topk: int, most_requests: int):
        super().__init__(index_topk, most_requests)
        self._of_a_short_round = False

    def select(self, forward_batch: Any) -> str:
        """The label of the graph that a verify takes."""
        return self.short if self._of_a_short_round else self.usual

    @contextlib.contextmanager
    def of_a_short_round(self) -> Iterator[None]:
        """While a round of short requests runs or is captured."""
        self._of_a_short_round = True
        try:
            yield
        finally:
            self._of_a_short_round = False


def offer(index_topk: int, drafts: bool) -> None:
    """Have SGLang's runner of decode or target_verify graphs capture both kinds; before it is built."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    variants, most = RoundVariants if drafts else ShortVariants, MOST_REQUESTS if asked(SWITCH) is None else sys.maxsize
    decode_cuda_graph_runner.create_attention_graph_variants = lambda hf_config: variants(index_topk, most)
    hook(CAPTURE_SIZE, _capture_size, HookType.AROUND)


def _capture_size(
    original: Callable,
    runner: Any,
    size: int,
    forward: Callable,
    stream_idx: int | None = None,
    variant_label: str | None = None,
    attention_variant: str | None = None,
) -> Any:
    """Around what captures one graph of one size; short graphs of large sizes are left out."""
    variants = runner.attention_graph_variants
    if isinstance(variants, ShortVariants) and attention_variant == variants.short:
        if size > variants.most_requests:
            return None
        if not variants.largest:
            logger.info(
                "nsa_backend: graphs of requests within %d tokens are captured too, up to %d of them; %s=0 leaves these out",
                variants.index_topk,
                size,
                SWITCH,
            )
        variants.largest = max(variants.largest, size)
    return original(runner, size, forward, stream_idx, variant_label, attention_variant)


def variants_of(worker: Any) -> RoundVariants | None:
    """Those of the graphs of target_verify that SGLang's EAGLE worker has; None where there are no short ones."""
    runner = worker.target_worker.model_runner.decode_cuda_graph_runner
    variants = getattr(runner, "attention_graph_variants", None)  # 0.5.17 has no such thing
    return variants if isinstance(variants, RoundVariants) else None


def in_short_graphs(worker: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The worker's round `forward`, with the graph of short requests as its verify."""

    def round_of_short(*args: Any, **options: Any) -> Any:
        with variants_of(worker).of_a_short_round():
            return forward(*args, **options)

    return round_of_short


def are_short(requests: list[Any], index_topk: int) -> bool:
    """Whether no row of these requests' next round, which may begin before the last one has ended, has more tokens.

    That is as far as SGLang gives them slots for it (`eagle_prepare_for_decode`).
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    most = index_topk - get_alloc_reserve_per_decode()
    return all(request.kv.kv_committed_len <= most for request in requests)


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
