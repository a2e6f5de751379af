"""What a soak run amounts to: accept length by the minute, growth of memory, the log, and every problem in a sentence."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING

from soak_answers import Record, group_differences
from soak_server import TOPOLOGIES, Topology

from nsa_backend.benchmarks.servers.generation import accept_length
from nsa_backend.benchmarks.servers.server import retracted
from nsa_backend.environment import asked
from nsa_backend.releases import installed

if TYPE_CHECKING:
    from soak_side import Soak

HELD_MIB = 32
"""What one allocator may hold after the load that it did not before it, once the server has emptied torch's cache: one of its
pages. A server has one; under DP attention the process of each rank has."""

DRIFT, ACCEPT_FLOOR = 0.02, 0.95 * 4
SUSPECT = re.compile(r"Traceback|\bERROR\b|Error: |CUDA error|\b[nN]a[nN]\b|leak detected|state was deleted|watchdog timeout")


def accept_of(records: list[Record]) -> float:
    return accept_length([sum(column) for column in zip_longest(*(r.histogram for r in records), fillvalue=0)])


def percentiles(values: list[float]) -> dict[str, float] | None:
    """Nearest-rank percentiles in seconds; None without any value."""
    ordered = sorted(values)
    ranks = {f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1] for percent in (50, 99) if ordered}
    return {name: round(value, 3) for name, value in ranks.items()} or None


def latency(records: list[Record]) -> dict:
    """Seconds to the first token, and to the last, over the requests that finished."""
    done = [r for r in records if r.kind == "finished"]
    first = [r.first for r in done if r.first is not None]
    return {"first_token_s": percentiles(first), "request_s": percentiles([r.end - r.start for r in done])}


def between(samples: list[dict], key: str, first: float, last: float) -> float | None:
    """Median of the samples in [first, last); None without any."""
    values = [s[key] for s in samples if first <= s["time"] < last and s[key] is not None]
    return median(values) if values else None


def per_minute(records: list[Record], samples: list[dict], began: float, ended: float) -> list[dict]:
    """What ended in each minute of the load, and what was sampled; the last row may be less than a minute."""
    rows = []
    for first in (began + 60 * i for i in range(math.ceil((ended - began) / 60))):
        last = min(first + 60, ended)
        done = [r for r in records if r.kind == "finished" and first <= r.end < last]
        row = {"seconds": round(last - first, 1), "requests": len(done), "tokens": sum(r.tokens for r in done)}
        row["accept_length"] = round(accept_of(done), 4)
        rows.append(row | {key: between(samples, key, first, last) for key in ("gpu_mib", "host_mib", "clients")})
    return rows


def growth(samples: list[dict], key: str, began: float, ended: float) -> float | None:
    """Median of the load's last quarter less that of its second, after a quarter of warm-up; None where it was not sampled.

    The warm-up takes in the end of the processes that compile kernels for the server.
    """
    quarter = (ended - began) / 4
    second, fourth = (between(samples, key, began + n * quarter, began + (n + 1) * quarter) for n in (1, 3))
    return None if second is None or fourth is None else round(fourth - second, 1)


def held(samples: list[dict], began: float, flushed: float | None) -> dict[str, float | None]:
    """GPU memory just before the load, and after the server has flushed its cache, which empties torch's; None unsampled."""
    known = [s for s in samples if s["gpu_mib"] is not None]
    before = [s["gpu_mib"] for s in known if s["time"] <= began]
    after = [s["gpu_mib"] for s in known if flushed is not None and s["time"] >= flushed]
    return {"before_mib": before[-1] if before else None, "after_mib": median(after) if after else None}


def of_one(samples: list[dict], which: str, name: str) -> list[dict]:
    """The memory of one of `by_server` or `by_process` alone, in each sample that has it."""
    return [{"time": s["time"]} | s[which][name] for s in samples if name in s[which]]


def memory(run: Soak, samples: list[dict]) -> dict:
    """Growth during the load, and what is held before it and after the flush, of whatever was sampled."""
    return {
        "growth": {key: growth(samples, key, *run.load) for key in TOPOLOGIES[run.topology].growth},
        "held": held(samples, run.load[0], run.flushed),
    }


def memory_of_each(run: Soak) -> dict[str, dict]:
    """The same of each server, and, where one has several ranks, of each process on a GPU since the load began."""
    topology = TOPOLOGIES[run.topology]
    later = dict.fromkeys(name for s in run.samples if s["time"] > run.load[0] for name in s["by_process"])
    named = {"by_server": topology.servers, "by_process": later if topology.ranks > 1 else ()}
    return {which: {name: memory(run, of_one(run.samples, which, name)) for name in names} for which, names in named.items()}


def held_too_much(report: dict) -> list[str]:
    """A sentence for every allocator that holds more than HELD_MIB after the load and the flush beyond what it held before."""
    several = len(report["by_server"]) > 1
    by_server = {f" by the {name} server" if several else "": of_one for name, of_one in report["by_server"].items()}
    by_process = {f" by {name}": of_one for name, of_one in report["by_process"].items()}
    problems = []
    for whose, each in (by_process or by_server).items():
        more = (each["held"]["after_mib"] or 0) - (each["held"]["before_mib"] or 0)
        if more > HELD_MIB:
            problems.append(f"{more} MiB of GPU memory are held{whose} after the load and the flush, more than {HELD_MIB}")
    return problems


def drift(rows: list[dict]) -> float | None:
    """Accept length of the last whole minute over that of the first, less one; None without two such minutes."""
    whole = [row["accept_length"] for row in rows if row["seconds"] == 60 and row["accept_length"]]
    return round(whole[-1] / whole[0] - 1, 5) if len(whole) > 1 else None


def whole_rounds(topology: Topology) -> bool:
    """Whether rounds of ours are to be one graph."""
    switch = asked("NSA_BACKEND_ROUND_GRAPH")
    return (topology.by_default if switch is None else switch) and installed() in topology.one_graph


def summary(run: Soak) -> dict:
    records, (began, ended) = list(run.traffic.records), run.load
    text = run.log.read_text(errors="replace") if run.log.exists() else ""
    kinds, lines = Counter(r.kind for r in records), text.splitlines()
    topology = TOPOLOGIES[run.topology]
    suspect = [line for line in lines if SUSPECT.search(line)]
    rows = per_minute(records, run.samples, began, ended)
    return {
        "templates": len(run.templates),
        "references": len(run.references),
        "load_minutes": round((ended - began) / 60, 2),
        "requests": {kind: kinds[kind] for kind in ("finished", "aborted", "closed", "failed")},
        "taken_back_too_late": sum(r.kind == "finished" and r.wanted != "finished" for r in records),
        "retracted": {"in_log": retracted(text), "finished": sum(r.retractions > 0 for r in records)},
        "messages": dict(Counter(r.message for r in records if r.message).most_common(10)),
        "rows": rows,
        "accept_length": round(accept_of(records), 4),
        "drift": drift(rows),
        "latency": latency(records),
        **memory(run, run.samples),
        **memory_of_each(run),
        "bounds": {"growth": topology.growth, "held_mib": HELD_MIB, "drift": DRIFT, "accept_length": ACCEPT_FLOOR},
        "differences": run.differences or group_differences(records, run.templates, run.references),
        "servers": len(topology.servers),
        "ranks": len(topology.servers) * topology.ranks,
        "active": [line for line in lines if "nsa_backend" in line and "is active" in line],
        "replayed": run.replayed,
        "must_replay": topology.counting * (run.side == "ours" and whole_rounds(topology)),
        "suspect_lines": {"count": len(suspect), "first": suspect[:20]},
    }


def problems_of(report: dict, ours: bool = True, faults: bool = False) -> list[str]:
    """One sentence for everything that must not be; the built-in backend owes no accept length and no line in the log.

    Where faults were injected the log tells of them.
    """
    requests, steady, accept = report["requests"], report["drift"], report["accept_length"]
    must = [
        (not requests["failed"], f"{requests['failed']} requests failed"),
        (requests["aborted"], "no request was aborted by its rid"),
        (requests["closed"], "no stream was closed"),
        (report["retracted"]["in_log"], "no request was retracted"),
        (accept >= ACCEPT_FLOOR or not ours, f"accept length {accept} < {ACCEPT_FLOOR}"),
        (steady is not None, "fewer than two whole minutes of load: whether accept length is steady was not judged"),
        (abs(steady or 0) <= DRIFT, f"accept length changed by {steady} from the first whole minute to the last"),
        (
            len(report["active"]) == ours * report["ranks"],
            f"{len(report['active'])} lines of the log say that this package's backend is active, not {ours * report['ranks']}",
        ),
        (
            (ranks := sum(any(counts.values()) for counts in report["replayed"])) >= report["must_replay"],
            f"rounds were one graph on {ranks} ranks, and must be on {report['must_replay']}",
        ),
        (faults or not report["suspect_lines"]["count"], f"{report['suspect_lines']['count']} lines of the log tell of errors"),
    ]
    for key, bound in report["bounds"]["growth"].items():
        grown = report["growth"][key]
        must.append((grown is not None, f"growth of {key} was not measured"))
        must.append((grown is None or grown <= bound, f"{key} grew by {grown} after warm-up, more than {bound}"))
    sampled = None not in report["held"].values()
    must.append((sampled, "GPU memory was not sampled before the load and after the flush"))
    must += [(False, problem) for problem in held_too_much(report) if sampled]
    for d in report["differences"]:
        why = "no tie" if d["tie"] is False else "nobody asked whether it is a tie"
        must.append((d["tie"], f"template {d['template']} differs at {d['position']} in {d['requests']} requests, {why}"))
    return [sentence for holds, sentence in must if not holds]
