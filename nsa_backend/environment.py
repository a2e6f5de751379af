"""The environment variables that this package reads, in the one table that refusals, `doctor` and the docs read too."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable; its value is 0 or 1."""

    name: str
    default: str  # what an unset variable is like: 0, 1, or unset where that is neither
    effect: str
    when: str  # to change it


VARIABLES = (
    Variable(
        "NSA_BACKEND_DISABLE",
        "0",
        "1: SGLang's built-in backend serves, and the plugin keeps nothing but the old spellings of options",
        "to compare with the built-in backend, or to go back to it, with the same command",
    ),
    Variable(
        "NSA_BACKEND_REQUIRED",
        "0",
        "1: the server does not start unless this backend serves target and drafts",
        "in deployments: a plugin that does not load is otherwise one line in SGLang's log",
    ),
    Variable(
        "NSA_BACKEND_AUTO_DECODE",
        "unset",
        "unset: on an H200 with 0.5.23 the decode implementation is chosen per captured batch size from measurements, where "
        "options name none; 1: so whatever they name, or no start; 0: never",
        "0 to compare; 1 on an H200 with another release",
    ),
    Variable(
        "NSA_BACKEND_ROUND_GRAPH",
        "unset",
        "0: a speculative round is three CUDA graphs; 1: one, seen on a GPU or not, or no start; unset: one if options allow",
        "0 where memory is scarce or a round is suspected; 1 to be told why a server can have none",
    ),
    Variable(
        "NSA_BACKEND_SAMPLED_ROUNDS",
        "unset",
        "1: a sampled round is one CUDA graph; 0: three; unset: one on SGLang 0.5.23 without DP attention",
        "0 where memory is scarce; 1 on 0.5.17 and under DP attention",
    ),
    Variable(
        "NSA_BACKEND_LAYER_FRONT",
        "unset",
        "unset: two launches of ours in front of every layer that can have them, on 0.5.23 and Hopper; 1: so, or no start; "
        "0: SGLang's own",
        "0 to compare; the start says how many layers have it",
    ),
    Variable(
        "NSA_BACKEND_SHORT_GRAPHS",
        "unset",
        "unset: up to 64 requests have graphs without index scores and top-k while all are within index_topk tokens, for "
        "decode or for rounds in one graph, on 0.5.23 and Hopper; 1: any number, under DP attention too, or no start; 0: none",
        "0 for a shorter start where requests are long; 1 for many short ones",
    ),
    Variable(
        "NSA_BACKEND_SHORT_PREFILLS",
        "0",
        "1: prefills of up to 512 tokens are one graph while all requests are within index_topk, or no start; not run yet",
        "to try it",
    ),
    Variable(
        "NSA_BACKEND_PAIRED_LOGITS",
        "unset",
        "unset: on 0.5.23 and Hopper the indexer scores rows of target_verify two by two, from two requests and for an even "
        "number of draft tokens: index keys are read half as often; 1: of one request too, or no start; 0: one by one",
        "0 to compare; 1 for one request of a long context, or on 0.5.17",
    ),
    Variable(
        "NSA_BACKEND_CHECK",
        "0",
        "1: every batch's request slots, lengths and page entries are checked, which waits for the GPU each time",
        "after an illegal memory access, or outputs that make no sense",
    ),
)
SWITCHES = {variable.name: variable for variable in VARIABLES}


def asked(name: str) -> bool | None:
    """What `name`, a key of `SWITCHES`, says; None where it is unset.

    Raises:
        SystemExit: the value is neither 0 nor 1. SGLang's plugin loader would swallow an exception and go on.
    """
    value = os.environ.get(name)
    if value not in (None, "0", "1"):
        raise SystemExit(f"{name} must be 0 or 1, and it is {value!r}")
    return None if value is None else value == "1"


def switched_on(name: str) -> bool:
    """Whether `name`, a key of `SWITCHES`, is 1; SystemExit where it is neither 0 nor 1."""
    return asked(name) is True


def check_switches() -> None:
    """Stop the process where any switch has a bad value."""
    for name in SWITCHES:
        asked(name)


def in_force() -> dict[str, str]:
    """By name, the value of each variable, or its default."""
    return {variable.name: os.environ.get(variable.name, variable.default) for variable in VARIABLES}
