"""Where the outputs of two sides part, and whether rounding alone explains it."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

from case import workload_of
from engines import run_to_its_end
from next_token import question
from workloads import WORKLOADS, Case

from nsa_backend.benchmarks.servers.server import SIDE_BY_SIDE

HERE = Path(__file__).resolve().parent

TIE = 0.0626
"""Two steps of a bfloat16 logit between 4 and 8, where the best logits of this checkpoint lie: a forward with other batch
shapes may round either of the tokens within it to the top."""


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def differences(case: Case, ours: dict, builtin: dict | None) -> list[dict]:
    """Where outputs part, with the prompt that leads there; nobody has asked yet whether these are ties.

    Without the other side (`builtin` is None) those of two runs of ours that must be equal are compared still. A difference
    has the tokens of `ours` and of `builtin`; one between two runs of ours has `ours` and `other`, and says `against` which
    run.
    """
    found = []
    if builtin is not None:
        for name in case.measured():
            found += _parted(case, name, ours[name], builtin[name], "builtin")
    for name, other in case.equal_outputs():
        found += [d | {"against": other} for d in _parted(case, name, ours[name], ours[other], "other")]
    return found


def _parted(case: Case, name: str, mine: dict, theirs: dict, side: str) -> list[dict]:
    found = []
    flat = [p for wave in WORKLOADS[workload_of(name)]() for p in wave]
    for request, (prompt, a, b) in enumerate(zip(flat, mine["output_ids"], theirs["output_ids"], strict=True)):
        at = first_difference(a, b)
        if at is not None:
            found.append(
                {"case": case.name, "workload": name, "request": request, "position": at,
                 "ours": a[at], side: b[at], "prompt": prompt + a[:at], "tie": None}
            )  # fmt: skip
    return found


def asking_alike(cases: list[Case]) -> list[list[Case]]:
    """The cases by the engine that is asked about their ties: one a model, implementation and options of a prefill."""
    groups = defaultdict(list)
    for case in cases:
        asked = question(case)
        groups[json.dumps([asked.checkpoint, asked.decode, asked.engine], sort_keys=True)].append(case)
    return list(groups.values())


def judge(checkpoint: Path, case: Case, found: list[dict], logs: Path, port: int, seconds: float) -> None:
    """Add to each parting point how far either token is from the best one, in one forward without speculation.

    Where the engine gives no answer `tie` stays None, and the report says that nobody asked.
    """
    name = case.name.replace(" ", "_")
    questions, answers = logs / f"{name}-ask.json", logs / f"{name}-answer.json"
    questions.write_text(json.dumps([d["prompt"] for d in found]))
    answers.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "next_token.py"), str(checkpoint), case.name, str(questions), str(answers)]
    environment = os.environ | SIDE_BY_SIDE | {"NSA_BACKEND_DISABLE": "1"}
    code = run_to_its_end([*command, "--port", str(port)], logs / f"{name}-ties.log", environment, seconds)
    if code or not answers.exists():
        print(f"{case.name}: no answer about ties, see {logs / f'{name}-ties.log'}", flush=True)
        return
    for difference, best in zip(found, json.loads(answers.read_text()), strict=True):
        values = {token: value for value, token in best}
        sides = ("ours", "other" if "against" in difference else "builtin")
        gaps = {s: best[0][0] - values[difference[s]] if difference[s] in values else None for s in sides}
        difference |= {"below_best": gaps, "tie": all(gap is not None and gap < TIE for gap in gaps.values())}
