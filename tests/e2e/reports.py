"""Reports of end-to-end runs: made from what engines gave, and shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import replays
from case import workload_of
from logprobs import apart, far_apart

from nsa_backend.benchmarks.reports.report import environment
from nsa_backend.benchmarks.servers.server import BACKENDS

FIRST_ERROR = re.compile(r"Traceback \(most recent call last\)|^.*(?:Error|error): ", re.MULTILINE)


def verdicts(case, ours: dict) -> list[str]:
    """Sentences about accept lengths below their floors."""
    bad = []
    everyone = [accept for name in case.measured() for accept in ours[name]["accept"]]
    if fmean(everyone) < case.floor_of_all * (case.steps + 1):
        bad.append(f"{case.name}: mean of all requests {fmean(everyone):.3f} < {case.floor_of_all} of N + 1")
    for workload in case.measured():
        floor = case.floors.get(workload_of(workload), 0)
        accept = ours[workload]["accept"]
        mean, worst = fmean(accept), min(accept)
        if mean < floor * (case.steps + 1):
            bad.append(f"{case.name}, {workload}: mean accept length {mean:.3f} < {floor * (case.steps + 1):.3f}")
        least = case.request_floors.get(workload_of(workload), 0) * (case.steps + 1)
        if worst < least:
            bad.append(f"{case.name}, {workload}: worst request {worst:.3f} < {least:.3f}")
    if case.loaded_back and not any(ours[case.loaded_back][f"{case.tier}_tokens"]):
        bad.append(f"{case.name}, {case.loaded_back}: no prompt came back from {case.tier}, so nothing was tested")
    return bad


def row_of(case, results: dict[str, dict]) -> dict:
    """One row of a report, from what each side's engine gave; `ranks_per_gpu` where ranks share GPUs, and then no times."""
    row = {"case": case.name, "steps": case.steps, "decode": case.decode, "workloads": {}}
    shared = case.ranks_per_gpu > 1
    if shared:
        row["ranks_per_gpu"] = case.ranks_per_gpu
    for workload in case.measured():
        row["workloads"][workload] = {
            backend: {
                "mean": round(fmean(result[workload]["accept"]), 4),
                "requests": result[workload]["accept"],
                "histograms": result[workload]["histograms"],
                "cached_tokens": result[workload]["cached_tokens"],
                "host_tokens": result[workload]["host_tokens"],
                "storage_tokens": result[workload]["storage_tokens"],
            }
            | ({} if shared else {"seconds": result[workload]["seconds"]})  # ranks that take turns tell nothing of time
            for backend, result in results.items()
        }
    if case.logprobs and set(BACKENDS) <= set(results):
        row["logprobs"] = {name: apart(results["ours"][name], results["builtin"][name]) for name in case.measured()}
    return row


def problems_of(cases: list, results: dict, found: list[dict]) -> list[str]:
    """One sentence for everything that must not be."""
    problems = []
    for case in cases:
        ours, log = results.get((case.name, "ours"), (None, ""))
        if ours is not None:
            problems += verdicts(case, ours)
            if "is active" not in log:
                problems.append(f"{case.name}: the log has no line that says the backend is active")
            if (times := log.count(case.says)) < case.says_times:
                problems.append(f"{case.name}: the log says '{case.says}' {times} times, not {case.says_times}")
            if case.replays and (why := replays.problem(case.replays, log)):
                problems.append(f"{case.name}: {why}")
            if case.never_says and case.never_says in log:
                problems.append(f"{case.name}: the log says '{case.never_says}', which its options forbid")
    for d in found:
        if not d["tie"]:
            why = "nobody asked whether it is a tie" if d["tie"] is None else "no tie"
            problems.append(f"{d['case']}, {d['workload']}: request {d['request']} differs at {d['position']}, {why}")
    return problems


def excerpt(log: str, most: int = 3000) -> str:
    """What says why an engine ended: where its first error begins, and the end, which may be of processes that followed it."""
    cause = FIRST_ERROR.search(log)
    if cause is None or len(log) - cause.start() <= most:
        return log[-most:]
    begin = cause.start()
    return f"{log[begin : begin + most // 2]}\n[...]\n{log[-most // 2 :]}"


def report_of(
    cases: list, backends: list[str], results: dict, found: list[dict], command: str, seconds: float, endings: dict
) -> dict:
    """Everything that was seen.

    Args:
        results: (what the case gave or None, its log) by (case name, backend), as far as engines have come.
        found: differences of the outputs, judged or not.
        endings: what `endings.facts` keeps of each engine without a result, by (case name, backend).
    """
    sides = {c.name: {b: results[c.name, b][0] for b in backends if results.get((c.name, b), (None,))[0]} for c in cases}
    rows = [row_of(c, sides[c.name]) for c in cases if sides[c.name]]
    return {
        "environment": environment(cases[0].gpus),
        "command": command,
        "rows": rows,
        "differences": [d | {"prompt": f"{len(d['prompt'])} tokens"} for d in found],
        "failures": [
            {"case": c.name, "backend": b, **endings.get((c.name, b), {}), "log": excerpt(results[c.name, b][1])}
            for c in cases
            for b in backends
            if results.get((c.name, b), ({},))[0] is None
        ],
        "problems": problems_of(cases, results, found) + [problem for row in rows for problem in far_apart(row)],
        "not_measured": [f"{c.name}, {b}" for c in cases for b in backends if (c.name, b) not in results],
        "seconds": round(seconds, 1),
    }


def show(report: dict) -> None:
    for row in report["rows"]:
        for workload, cell in row["workloads"].items():
            sides = " ".join(f"{b} {v['mean']} (worst {min(v['requests'])})" for b, v in cell.items())
            print(f"{row['case']} | {workload} | {sides}")
    if shared := sum("ranks_per_gpu" in row for row in report["rows"]):
        print(f"in {shared} of these cases ranks share GPUs: nothing is measured there but accept lengths and outputs")
    if alone := sum(not any(len(cell) > 1 for cell in row["workloads"].values()) for row in report["rows"]):
        print(f"in {alone} of these cases one side ran: its outputs were compared with none of another side")
    ties = sum(d["tie"] is True for d in report["differences"])
    print(f"{len(report['differences'])} of the outputs differ from what they should equal, {ties} of them at ties")
    for failure in report["failures"]:
        print("FAILED", failure["case"], failure["backend"], failure["log"][-1500:])
        for what in filter(None, (failure.get("ended"), *failure.get("exits", ()))):
            print(" ", what)
    for name in report["not_measured"]:
        print("not measured:", name)
    whole = not (report["failures"] or report["not_measured"])
    print("\n".join(report["problems"]) or ("all floors met" if whole else "no floor missed where something was measured"))


def write(report: dict, out: Path) -> None:
    """In one step, so that a run that is cut short leaves a whole file."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1))
    part.replace(out)
