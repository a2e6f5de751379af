"""The rule by which a server may divide prefills among ranks, and what is not served beside that."""

from __future__ import annotations

from functools import partial
from typing import Any

from nsa_backend.adapters.dsa.prefill_cp.rows import RUNNER_DIVIDES
from nsa_backend.adapters.rule import Rule, nested
from nsa_backend.adapters.shared import WAY_BACK
from nsa_backend.releases import installed

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
