"""The environment variables that this package reads; every one is 0 or 1."""

from __future__ import annotations

import os

SWITCHES = {
    "NSA_BACKEND_DISABLE": "SGLang's built-in backend serves, and the plugin keeps nothing but the old spellings of options",
    "NSA_BACKEND_REQUIRED": "the server does not start unless this backend serves",
    "NSA_BACKEND_AUTO_DECODE": "the decode implementation is chosen per captured batch size from measurements",
    "NSA_BACKEND_ROUND_GRAPH": "0: a speculative round is three CUDA graphs; 1: one, seen on a GPU or not, or no start",
    "NSA_BACKEND_SAMPLED_ROUNDS": "1: a sampled round is one CUDA graph, the default on 0.5.23 without DP attention; 0: three",
    "NSA_BACKEND_CHECK": "every batch's request slots, lengths and page entries are checked, which waits for the GPU each time",
}


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
