"""Ranks that divide the KV of every request (--dcp-size, decode context parallel), as SGLang 0.5.23 has them for sparse models.

SGLang's allocator hands out slots of all ranks together, in pages of 64 times the ranks; slot s lies on rank s modulo that
number. Its pool writes what is a rank's own. Index keys and the drafts' KV lie whole on every rank, so logits, top-k and page
tables are those of one rank. Its layer gathers the query heads of the ranks, in every mode, and joins what each attends to.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sglang.srt.runtime_context import get_parallel

from nsa_backend.adapters.option_rules import Rule, nested
from nsa_backend.adapters.startup import attention_tp_size_of, context_ranks_of
from nsa_backend.releases import CONTEXT_RANKS, installed

logger = logging.getLogger(__name__)

SERVED = installed() in CONTEXT_RANKS

REFUSED = (
    ()
    if SERVED
    else (
        Rule(
            "dcp_size",
            "--dcp-size",
            f"ranks that divide the KV of a request are served on SGLang {' and '.join(CONTEXT_RANKS)}, and {installed()} is "
            "installed",
            (None, 1),
            "pass --dcp-size 1",
            everywhere=False,
            builtin_serves=False,
        ),
    )
)


def rank_of_context() -> tuple[int, int]:
    """Ranks that divide the KV of the target in this process's group, and this one of them."""
    if not SERVED:
        return 1, 0
    parallel = get_parallel()
    ranks = parallel.attn_dcp_size
    return ranks, parallel.attn_dcp_rank if ranks > 1 else 0


def combination_problems(args: Any) -> list[str]:
    """One sentence for each of these resolved arguments that is not served beside --dcp-size."""
    ranks = context_ranks_of(args)
    if ranks == 1 or not SERVED:
        return []
    found, heads = [], attention_tp_size_of(args)
    if ranks & (ranks - 1) or heads % ranks:
        found.append(
            f"nsa_backend does not serve --dcp-size {ranks}: {heads} ranks share the heads of a request; "
            f"pass a power of two that divides {heads}"
        )
    if nested(args, "speculative_algorithm") == "EAGLE3":
        found.append(
            "nsa_backend does not serve --speculative-algorithm EAGLE3 beside --dcp-size: a dense draft model has no indexer, "
            "and SGLang takes its KV for divided; choose EAGLE, which runs the model's MTP layer"
        )
    return found


def advise_prefill_graphs(args: Any) -> None:
    """Say in the log what a server of these resolved arguments lacks for short first tokens.

    SGLang captures no prefill beside --dcp-size unless told: other models' layers read metadata that a captured one lacks.
    """
    if nested(args, "cuda_graph_config.prefill.backend") == "disabled" and not args.disable_cuda_graph:
        logger.warning(
            "nsa_backend: beside --dcp-size SGLang captures no prefill, and first tokens come later: pass "
            "--cuda-graph-backend-prefill breakable"
        )


def take_context_parts(model: Any) -> None:
    """Let a model's layers take the log-sum-exp of a rank's part out of prefills that SGLang pads or captures in pieces.

    SGLang's layer expects it beside the output, and tells its attention so in no mode, which then hands back the output alone.

    Args:
        model: SGLang's, loaded.
    """
    for module in model.modules():
        attention = getattr(module, "attn_mqa_for_dcp_decode", None)
        if attention is not None and not isinstance(attention.forward, partial):
            attention.forward = partial(attention.forward, return_lse=True)
