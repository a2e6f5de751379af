"""Soak runs of four minutes of load that never were: what their requests came to, their logs and samples."""

from pathlib import Path

import soak_side
import soak_traffic
from soak_answers import Record
from soak_traffic import Traffic, make_templates

BEGAN, ENDED = 1000.0, 1240.0
ACTIVE = "[2026-11-20 11:15:06] nsa_backend 0.1.0 is active: decode=fa3"
REPLAYED = {"greedy requests": 900, "sampled requests": 0}
RETRACT = "[2026-11-20 11:16:06] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 192"


def finished(template: int = 0, end: float = BEGAN + 1, histogram: tuple[int, ...] = (0, 0, 1, 19), **fields) -> Record:
    return Record(template, end - 1, end, "finished", "finished", tokens=80, histogram=histogram, **fields)


def steady_load() -> list[Record]:
    return [finished(end=BEGAN + second) for second in range(240)]


def samples(gpu=lambda second: 20000, host=lambda second: 9000.0) -> list[dict]:
    """Of one server, before and after the load, too."""
    held = [(s, {"gpu_mib": gpu(s), "host_mib": host(s)}) for s in range(-30, 260, 2)]
    return [
        {"time": BEGAN + s, "clients": 8, **memory, "by_server": {"server": memory}, "by_process": {}} for s, memory in held
    ]


def run_of(tmp_path: Path, records: list[Record], log: str, sampled: list[dict], ranks: int = 1) -> soak_side.Soak:
    traffic = Traffic(soak_traffic.Client(1), seed=0)
    traffic.records += records
    run = soak_side.Soak(soak_traffic.Client(1), traffic, make_templates(0), 480.0, 900.0, log=tmp_path / "server.log")
    run.log.write_text(log)
    run.load, run.samples = (BEGAN, ENDED), sampled
    run.replayed = [REPLAYED] * ranks
    run.references, run.flushed = {0: [5, 6, 7]}, ENDED + 5
    return run


def taken_back() -> list[Record]:
    return [Record(1, BEGAN, BEGAN + 1, kind, kind) for kind in ("aborted", "closed")]


def held_later(mib: int):
    """Of a server that holds so many MiB more once it has flushed its cache."""
    return lambda second: 20000 if second < ENDED - BEGAN else 20000 + mib


def together(each: dict[str, list[dict]], which: str = "by_server") -> list[dict]:
    """Samples of servers, or of the processes of one server."""
    found = []
    for at_once in zip(*each.values(), strict=True):
        total = {key: sum(sample[key] for sample in at_once) for key in ("gpu_mib", "host_mib")}
        of_each = {name: sample["by_server"]["server"] for name, sample in zip(each, at_once, strict=True)}
        found.append(at_once[0] | total | {"by_server": {"server": total}} | {which: of_each})
    return found
