"""Prefills whose rows ranks with whole copies of the KV divide (--enable-prefill-cp): the rows of a rank, and what is refused.

What SGLang 0.5.23 leaves to an attention backend is small. Its runner divides tokens before the model and gathers hidden states
behind it; its model and its indexer gather KV and index keys of every layer, in the order of all tokens, before they reach the
backend. So a backend writes all KV and attends with the rows of its rank, which SGLang pads by a few. Decode, verify and
draft-extend are not divided: every rank runs them for all requests, with all heads.

With interleave, row i of rank r of n is row r + i·n of the batch, across the borders of requests. A request may have no row on
a rank; its keys are gathered all the same, so that windows are the same on every rank.

Sparse attention alone serves such a prefill: dense attention would need K and V of every prefix, decompressed, on every rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.layers.cp import utils

from nsa_backend.adapters.option_rules import Rule, nested
from nsa_backend.adapters.sglang_types import ForwardBatch
from nsa_backend.adapters.shared import WAY_BACK
from nsa_backend.releases import installed

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


rule = partial(Rule, everywhere=False)

_OLDER = f"SGLang {installed()} divides a prefill by other rules too, and those of 0.5.23 alone are served here"
_NEWER = "install 0.5.23, or drop the option"

REFUSED = (
    (
        rule(
            "cp_strategy",
            "--cp-strategy",
            "a rank then has two blocks of every prompt, and SGLang gathers no index keys for that and hands back no KV",
            (None, "interleave"),
            "pass --cp-strategy interleave",
            builtin_serves=False,
        ),
    )
    if RUNNER_DIVIDES
    # Those releases resolve --enable-dsa-prefill-context-parallel to this option, and this option to that one.
    else (rule("enable_prefill_cp", "--enable-prefill-cp", _OLDER, advice=_NEWER),)
)
"""What is not served of it, whatever else a server does."""


def combination_problems(args: Any) -> list[str]:
    """One sentence for each of these resolved arguments that is not served beside --enable-prefill-cp."""
    if not nested(args, "enable_prefill_cp"):
        return []
    implementations = [nested(args, name) for name in ("dsa_decode_backend", "dsa_prefill_backend")]
    asked = (
        (
            nested(args, "enable_two_batch_overlap"),
            "--enable-two-batch-overlap",
            "its halves are cut from the tokens of all ranks, and a rank's model has some of them",
            "drop one of the two",
        ),
        (
            nested(args, "speculative_algorithm") == "EAGLE3",
            "--speculative-algorithm EAGLE3",
            "a dense draft model has to gather K and V, and SGLang's interleave does not",
            "choose EAGLE, which runs the model's MTP layer",
        ),
        (
            "trtllm" in implementations and nested(args, "kv_cache_dtype") == "fp8_e4m3",
            "trtllm on an FP8 KV cache",
            "SGLang then leaves RoPE and the gather of KV behind it to the backend, and nothing here gathers",
            f"pass --kv-cache-dtype bfloat16, or {WAY_BACK}",
        ),
    )
    return [
        f"nsa_backend does not serve {option} beside --enable-prefill-cp: {why}; {advice}"
        for holds, option, why, advice in asked
        if holds
    ]
