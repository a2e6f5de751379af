"""Which servers have prefills of few tokens in one graph, and of which sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from sglang.srt.environ import envs

from nsa_backend.adapters.dsa.layer_front.options import dependent_problems, needed
from nsa_backend.adapters.dsa.rounds import served
from nsa_backend.adapters.option_rules import nested
from nsa_backend.environment import asked, switched_on
from nsa_backend.releases import layer_front_problem

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_SHORT_PREFILLS"

MOST_ROWS = 1024
"""Tokens of the largest prefill that is captured whole; of more the GPU takes as long as the host does with the pieces."""

MOST_PADDING = 64
"""Rows of padding that a whole graph may have, or half of its rows, or an eighth: 16 graphs, where SGLang has 38."""

NEEDED = (
    *served.DP_ATTENTION,
    needed("pp_size", "--pp-size", (1,), "pass --pp-size 1"),
    # It changes the target's backend with the number of drafts, and one alone has captured them.
    needed("speculative_adaptive", "--speculative-adaptive", (False,)),
    # Their dispatch leaves the graph in every layer of experts.
    needed("moe_a2a_backend", "--moe-a2a-backend", ("none",)),
    # Ranks then tell one another their sizes before every prefill, which has run beside none.
    needed("moe_dense_tp_size", "--moe-dense-tp-size", (None,)),
    needed("enable_return_indexer_topk", "--enable-return-indexer-topk", (None, False)),
    needed(
        "cuda_graph_config.prefill.backend",
        "--cuda-graph-backend-prefill",
        ("breakable",),
        "pass --cuda-graph-backend-prefill breakable",
    ),
)
"""Beside what the front asks: prefills that SGLang captures in pieces, on ranks that need not keep in step."""

UNTRIED = (
    needed("hicache_storage_backend", "--hicache-storage-backend", (None,)),
    needed("enable_lmcache", "--enable-lmcache", (None, False)),
    needed("enable_flexkv", "--enable-flexkv", (None, False)),
    needed("enable_unified_cache_external_linker", "--enable-unified-cache-external-linker", (None, False)),
    needed("radix_cache_backend", "--radix-cache-backend", (None,)),
    needed("dsa_decode_backend", "--nsa-decode-backend", ("fa3", "flashmla_kv", "flashmla_sparse", "sparse_decode")),
)
"""Options under whose other values no GPU has run them: there a server has them where they are asked for."""


def prefill_problems(args: Any) -> list[str]:
    """One sentence for each reason why a server of these resolved arguments can have no whole graphs of prefills."""
    found = dependent_problems(args)
    if switched_on("NSA_BACKEND_CHECK"):
        found.append("NSA_BACKEND_CHECK=1 has run beside no whole graph of a prefill: unset one")
    if layer_front_problem() is not None:
        return found
    if not envs.SGLANG_DSA_FUSE_TOPK.get():
        found.append("SGLANG_DSA_FUSE_TOPK=0 has run beside no whole graph of a prefill: unset one")
    sizes = nested(args, "cuda_graph_config.prefill.bs")
    if sizes is not None and not whole_sizes(sizes):
        found.append(f"no prefill of up to {MOST_ROWS} tokens is captured: pass smaller --cuda-graph-bs-prefill")
    backends = {own or args.attention_backend for own in (args.prefill_attention_backend, args.decode_attention_backend)}
    if len(backends) > 1:
        found.append(f"prefill and decode have backends of two names, {' and '.join(sorted(backends))}: name one for both")
    return found + [f"{rule.option} has none: {rule.advice}" for rule in NEEDED if not rule.serves(args)]


def wanted(args: Any, prefill_named: bool) -> bool:
    """Whether a server of these resolved arguments is to have them; the log says why not where nobody said so.

    Where the user named an implementation for prefill, it serves all of them, unless whole graphs are asked for.
    """
    said = asked(SWITCH)
    if said is not None:
        return said
    if prefill_named:
        reason = "a backend is named for prefill"
    elif untried := [rule.option for rule in UNTRIED if not rule.serves(args)]:
        reason = f"one graph has run on no GPU beside this {untried[0]}"
    else:
        reason = next(iter(prefill_problems(args)), None)
    if reason is not None:
        logger.info("nsa_backend: short prefills are in pieces, because %s", reason)
    return reason is None


def whole_sizes(captured: Iterable[int]) -> list[int]:
    """Of SGLang's sizes, those of `captured` tokens, the ones that have a whole graph: in ascending order."""
    sizes: list[int] = []
    for size in sorted((size for size in captured if size <= MOST_ROWS), reverse=True):
        if not sizes or size <= max(sizes[-1] - max(MOST_PADDING, sizes[-1] // 8), sizes[-1] // 2):
            sizes.append(size)
    return sizes[::-1]
