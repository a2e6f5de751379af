"""Run every case with ours and with SGLang's built-in backend on one GPU, several engines side by side, and judge.

    python tests/e2e/run_all.py OUT.json [--cases 'n3 fa3' ...] [--jobs 4] [--logs DIR [--resume]]

Exits with 1 where an accept length is below its floor, a case failed, or an output differs without a tie to explain it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from workloads import CASES, WORKLOADS

from nsa_backend.benchmarks import faithful_checkpoint
from nsa_backend.benchmarks.bench_common import environment
from nsa_backend.benchmarks.servers import BACKENDS
from nsa_backend.releases import generation_of, installed

TIE = 0.0626
"""Two steps of a bfloat16 logit between 4 and 8, where the best logits of this checkpoint lie: a forward with other batch
shapes may round either of the tokens within it to the top."""


def launch(checkpoint: Path, case, backend: str, logs: Path, port: int, resume: bool) -> tuple[dict | None, str]:
    """(what the case gave or None, its log), from `logs` where `resume` and an earlier run got so far."""
    out, log = logs / f"{case.name}-{backend}.json".replace(" ", "_"), logs / f"{case.name}-{backend}.log".replace(" ", "_")
    if resume and out.exists():
        return json.loads(out.read_text()), log.read_text(errors="replace")
    command = [sys.executable, str(HERE / "run_case.py"), str(checkpoint), case.name, str(out), "--port", str(port)]
    with log.open("w") as stream:
        code = subprocess.run(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"NSA_BACKEND_DISABLE": BACKENDS[backend]},
            timeout=540,
        ).returncode
    text = log.read_text(errors="replace")
    if code or not out.exists():
        return None, text
    return json.loads(out.read_text()), text


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def differences(case, ours: dict, builtin: dict) -> list[dict]:
    """Where outputs part, with the prompt that leads there."""
    found = []
    for workload in case.workloads:
        flat = [p for wave in WORKLOADS[workload]() for p in wave]
        pairs = zip(flat, ours[workload]["output_ids"], builtin[workload]["output_ids"], strict=True)
        for request, (prompt, mine, theirs) in enumerate(pairs):
            at = first_difference(mine, theirs)
            if at is not None:
                found.append(
                    {"case": case.name, "workload": workload, "request": request, "position": at,
                     "ours": mine[at], "builtin": theirs[at], "prompt": prompt + mine[:at]}
                )  # fmt: skip
    return found


def judge_ties(checkpoint: Path, case, found: list[dict], logs: Path, port: int) -> None:
    """Add to each parting point how far either token is from the best one, in one forward without speculation."""
    name = case.name.replace(" ", "_")
    questions, answers, log = logs / f"{name}-ask.json", logs / f"{name}-answer.json", logs / f"{name}-ties.log"
    questions.write_text(json.dumps([d["prompt"] for d in found]))
    command = [sys.executable, str(HERE / "next_token.py"), str(checkpoint), case.name, str(questions), str(answers)]
    with log.open("w") as stream:
        subprocess.run(
            [*command, "--port", str(port)], stdout=stream, stderr=subprocess.STDOUT,
            env=os.environ | {"NSA_BACKEND_DISABLE": "1"}, timeout=300, check=True,
        )  # fmt: skip
    for difference, best in zip(found, json.loads(answers.read_text()), strict=True):
        values = {token: value for value, token in best}
        gaps = [best[0][0] - values[t] if t in values else None for t in (difference["ours"], difference["builtin"])]
        difference["below_best"] = {"ours": gaps[0], "builtin": gaps[1]}
        difference["tie"] = all(gap is not None and gap < TIE for gap in gaps)


def verdicts(case, ours: dict) -> list[str]:
    """Sentences about accept lengths below their floors."""
    bad = []
    everyone = [accept for workload in case.workloads for accept in ours[workload]["accept"]]
    if fmean(everyone) < case.floor_of_all * (case.steps + 1):
        bad.append(f"{case.name}: mean of all requests {fmean(everyone):.3f} < {case.floor_of_all} of N + 1")
    for workload, floor in case.floors.items():
        if workload not in case.workloads:
            continue
        accept = ours[workload]["accept"]
        mean, worst = fmean(accept), min(accept)
        if mean < floor * (case.steps + 1):
            bad.append(f"{case.name}, {workload}: mean accept length {mean:.3f} < {floor * (case.steps + 1):.3f}")
        least = case.request_floors.get(workload, 0) * (case.steps + 1)
        if worst < least:
            bad.append(f"{case.name}, {workload}: worst request {worst:.3f} < {least:.3f}")
    return bad


def summary(case, results: dict[str, dict | None]) -> dict:
    row = {"case": case.name, "steps": case.steps, "decode": case.decode, "workloads": {}}
    for workload in case.workloads:
        cell = {}
        for backend, result in results.items():
            if result is not None:
                accept = result[workload]["accept"]
                cell[backend] = {
                    "mean": round(fmean(accept), 4),
                    "requests": accept,
                    "histograms": result[workload]["histograms"],
                    "cached_tokens": result[workload]["cached_tokens"],
                }
        row["workloads"][workload] = cell
    return row


def run_engines(checkpoint: Path, cases: list, backends: list[str], jobs: int, logs: Path, resume: bool) -> dict:
    """Every case with every backend; returns (result or None, log text) by (case name, backend)."""
    items = [(i, case, backend) for i, (case, backend) in enumerate((c, b) for c in cases for b in backends)]

    def job(item):
        number, case, backend = item
        if number:
            time.sleep(3 * (number % jobs))  # engines measure free memory when they start
        result, log = launch(checkpoint, case, backend, logs, 30000 + 50 * number, resume)
        means = {w: round(fmean(c["accept"]), 3) for w, c in (result or {}).items()}
        print(f"{case.name}, {backend}: {means or 'FAILED'}", flush=True)  # what a run that is cut short leaves behind
        return result, log

    # The first start compiles kernels that all others load, so it runs alone.
    done = [job(items[0])]
    with ThreadPoolExecutor(jobs) as pool:
        done += list(pool.map(job, items[1:]))
    return {(case.name, backend): result for (_, case, backend), result in zip(items, done, strict=True)}


def judge(checkpoint: Path, cases: list, results: dict, jobs: int, logs: Path) -> list[dict]:
    """Where outputs part from the built-in backend's, and whether a tie explains it."""
    parted = []
    for case in cases:
        ours, builtin = (results.get((case.name, b), (None, ""))[0] for b in BACKENDS)
        if ours is not None and builtin is not None:
            parted.append((case, differences(case, ours, builtin)))
    asked = [(case, found) for case, found in parted if found]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda i: judge_ties(checkpoint, *asked[i], logs, 40000 + 50 * i), range(len(asked))))
    return [difference for _, found in parted for difference in found]


def problems_of(cases: list, results: dict, found: list[dict]) -> list[str]:
    """One sentence for everything that must not be."""
    problems = []
    for case in cases:
        ours, log = results.get((case.name, "ours"), (None, ""))
        if ours is not None:
            problems += verdicts(case, ours)
            if "is active" not in log:
                problems.append(f"{case.name}: the log has no line that says the backend is active")
    for d in found:
        if not d["tie"]:
            problems.append(f"{d['case']}, {d['workload']}: request {d['request']} differs at {d['position']}, no tie")
    return problems


def show(report: dict) -> None:
    for row in report["rows"]:
        for workload, cell in row["workloads"].items():
            sides = " ".join(f"{b} {v['mean']} (worst {min(v['requests'])})" for b, v in cell.items())
            print(f"{row['case']} | {workload} | {sides}")
    ties = sum(d["tie"] for d in report["differences"])
    print(f"{len(report['differences'])} of the outputs differ from the built-in backend's, {ties} of them at ties")
    for failure in report["failures"]:
        print("FAILED", failure["case"], failure["backend"], failure["log"][-1500:])
    print("\n".join(report["problems"]) or "all floors met")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="*", help="all by default")
    parser.add_argument("--gpus", type=int, default=1, help="run the cases for this number of GPUs")
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "nsa-e2e")
    parser.add_argument("--resume", action="store_true", help="take what a run that was cut short left in --logs")
    args = parser.parse_args()
    has_v1 = generation_of(installed()).adapter == "nsa"
    on_these = [c for c in CASES if c.gpus == args.gpus and (has_v1 or not c.spec_v1)]
    if unknown := set(args.cases or ()) - {c.name for c in on_these}:
        parser.error(f"no case {sorted(unknown)} on {args.gpus} GPUs of this SGLang; there are {[c.name for c in on_these]}")
    cases = [c for c in on_these if not args.cases or c.name in args.cases]
    args.logs.mkdir(parents=True, exist_ok=True)
    checkpoint = faithful_checkpoint.write(args.logs / "checkpoint")
    started = time.time()
    results = run_engines(checkpoint, cases, args.backends, args.jobs, args.logs, args.resume)
    report = report_of(cases, results, args.backends, [], started)
    args.out.write_text(json.dumps(report, indent=1))  # judging ties starts engines anew; a run cut short keeps this
    found = judge(checkpoint, cases, results, args.jobs, args.logs)
    report = report_of(cases, results, args.backends, found, started)
    args.out.write_text(json.dumps(report, indent=1))
    show(report)
    return 1 if report["failures"] or report["problems"] else 0


def report_of(cases: list, results: dict, backends: list[str], found: list[dict], started: float) -> dict:
    """Everything that was seen; `found` are the judged differences."""
    return {
        "environment": environment(cases[0].gpus),
        "rows": [summary(c, {b: results[c.name, b][0] for b in backends}) for c in cases],
        "differences": [d | {"prompt": f"{len(d['prompt'])} tokens"} for d in found],
        "failures": [
            {"case": name, "backend": backend, "log": log[-3000:]}
            for (name, backend), (result, log) in results.items()
            if result is None
        ],
        "problems": problems_of(cases, results, found),
        "seconds": time.time() - started,
    }


if __name__ == "__main__":
    sys.exit(main())
