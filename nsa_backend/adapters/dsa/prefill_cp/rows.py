"""The rows of a prefill that a rank computes, where ranks with whole copies of the KV divide them (--enable-prefill-cp).

What SGLang 0.5.23 leaves to an attention backend is small. Its runner divides tokens before the model and gathers hidden states
behind it; its model and its indexer gather KV and index keys of every layer, in the order of all tokens, before they reach the
backend. So a backend writes all KV and attends with the rows of its rank, which SGLang pads by a few. Decode, verify and
draft-extend are not divided: every rank runs them for all requests, with all heads.

With interleave, row i of rank r of n is row r + i·n of the batch, across the borders of requests. A request may have no row on
a rank; its keys are gathered all the same, so that windows are the same on every rank.

Sparse attention alone serves such a prefill: dense attention would need K and V of every prefix, decompressed, on every rank.
"""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.layers.cp import utils

from nsa_backend.adapters.sglang import ForwardBatch

RUNNER_DIVIDES = hasattr(utils, "is_cp_active") and not hasattr(envs, "SGLANG_ENABLE_CP_V2")
"""Whether the installed release has these rules and no others. SGLang 0.5.17 has two sets (SGLANG_ENABLE_CP_V2)."""


def rows_of_rank(batch: ForwardBatch) -> slice | None:
    """Of all rows of a prefill, those that this rank computes; None where SGLang does not divide `batch`.

    It divides no batch with fewer tokens than ranks: every rank then computes all of it.
    """
    if not RUNNER_DIVIDES or not utils.is_cp_active(batch):
        return None
    strategy = utils.get_cp_strategy()
    return slice(strategy.cp_rank, None, strategy.cp_size)
