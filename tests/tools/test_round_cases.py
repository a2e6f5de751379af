"""The end-to-end case that tells a sampled graph from drawn ties is the case that it controls, but for who samples."""

import sys
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from round_cases import ROUND_CASES

WORD = "two GPUs, DP attention, sampled and greedy"


def test_the_control_of_sampled_rounds_differs_in_the_switch_alone():
    controlled, control = (next(c for c in ROUND_CASES if c.name == f"{WORD}, {how}") for how in (
        "one graph a round", "sampled rounds in three graphs",
    ))  # fmt: skip
    differing = {f.name for f in fields(control) if getattr(control, f.name) != getattr(controlled, f.name)}
    assert differing == {"name", "environment", "says", "says_times", "never_says", "replays"}
    assert control.environment == controlled.environment | {"NSA_BACKEND_SAMPLED_ROUNDS": "0"}
    assert control.never_says == controlled.says
