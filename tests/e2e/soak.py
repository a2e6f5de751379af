"""Serve for minutes under changing load, ours and SGLang's built-in backend asked by the same seeded clients, side by side.

    python tests/e2e/soak.py OUT.json [--gpus 0 1] [--minutes 8] [--port 9000] [--seed 0]
    python tests/e2e/soak.py OUT.json --sides ours three_graphs builtin --gpus 0 1 2
    python tests/e2e/soak.py OUT.json --topology pd --gpus 0,1 --minutes 5
    python tests/e2e/soak.py OUT.json --topology dp --gpus 0,1 --sides ours builtin
    python tests/e2e/soak.py OUT.json --topology pd-dp --gpus 0,1
    python tests/e2e/soak.py OUT.json --topology dcp --gpus 0,1 --sides ours
    python tests/e2e/soak.py OUT.json --faults --gpus 0 --minutes 20
    python tests/e2e/soak.py OUT.json --table

As many GPUs as sides serve them at once; one serves them in turns, each for so many minutes. With `--topology pd` a side is a
prefill and a decode server, on the two GPUs of one `--gpus` word. With `--topology dp` it is one server with two ranks of DP
attention, with `--topology pd-dp` a prefill and a decode server of two such ranks each, on the same GPUs, with `--topology dcp`
one server whose two ranks divide the KV (decode context parallel), which the built-in backend lacks. Growth of memory is judged
of all servers together, what is held after the load of each server, or each rank's process; both are reported of each.

With `--faults` malformed requests come under the load, and after it faults that end servers: see soak_faults.py.

Exits with 1 where anything is wrong with ours; what is wrong with the built-in backend is reported. --table prints the columns
of OUT.json for docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from soak_faults import add_faults, compared
from soak_server import BUILTIN, SIDES, TOPOLOGIES

HERE = Path(__file__).resolve().parent

GRACE_SECONDS = 30.0  # for a side to write its report, once its minutes are over
TITLES = {BUILTIN: "built-in", "three_graphs": "ours, a round in three graphs"}
"""Of a side's column, where its own name is not it."""


def joined(sides: dict[str, dict | None], arguments: dict, seconds: float) -> dict:
    """One report of all sides; a side that left none is None, and a problem where it is ours."""
    left = {side: report for side, report in sides.items() if report is not None}
    problems = []
    for side in sides:
        if side != BUILTIN:
            found = left[side]["problems"] if side in left else ["it left no report"]
            problems += [f"{side}: {problem}" for problem in found]
    problems += compared(left.get("ours"), left.get(BUILTIN))
    if len({report["references"] for report in left.values()}) > 1:
        asked = ", ".join(f"{report['references']} of {side}" for side, report in left.items())
        problems.append(f"the sides were not asked the same: of their templates {asked} had a reference when the load began")
    return {
        "environment": next((report["environment"] for report in left.values()), None),
        "arguments": arguments,
        "sides": {side: None if report is None else compact(report) for side, report in sides.items()},
        "problems": problems,
        "seconds": round(seconds, 1),
    }


def compact(report: dict) -> dict:
    """A side's report with its differences counted; those that are no tie are kept."""
    ways = report["differences"]
    widest = [max(d["below_best"].values()) for d in ways if d["tie"]]
    counted = {
        "ways": len(ways),
        "at_ties": len(widest),
        "widest_below_best": max(widest, default=None),
        "others": [d for d in ways if not d["tie"]],
    }
    left_out = ("environment", "bounds")
    return {key: value for key, value in report.items() if key not in left_out} | {"differences": counted}


def table(report: dict) -> str:
    """A column a side as Markdown."""
    sides = report["sides"].values()

    def times(latency: dict | None) -> str:
        return "-" if latency is None else f"{latency['p50']:.2f} / {latency['p99']:.2f}"

    def rate(side: dict) -> str:
        return f"{side['requests']['finished'] / side['load_minutes']:.0f}" if side["load_minutes"] else "-"

    rows = {
        "load, minutes": lambda s: f"{s['load_minutes']:.2f}",
        "requests finished / aborted / closed / failed": lambda s: " / ".join(str(n) for n in s["requests"].values()),
        "requests finished in a minute of the load": rate,
        "retracted": lambda s: str(s["retracted"]["in_log"]),
        "to the first token, s, p50 / p99": lambda s: times(s["latency"]["first_token_s"]),
        "whole request, s, p50 / p99": lambda s: times(s["latency"]["request_s"]),
        "accept length, all": lambda s: f"{s['accept_length']:.3f}",
        "accept length, last whole minute over the first, less one": lambda s: (
            "-" if s["drift"] is None else f"{100 * s['drift']:+.1f} %"
        ),
        "lines in the log that tell of errors": lambda s: str(s["suspect_lines"]["count"]),
        "ways in which an output left its calm reference / of them at ties": lambda s: (
            f"{s['differences']['ways']} / {s['differences']['at_ties']}"
        ),
        **memory_rows(lambda s: s),
    }
    servers = dict.fromkeys(name for side in sides if side is not None for name in side.get("by_server", ()))
    if len(servers) > 1:
        for name in servers:
            rows |= memory_rows(lambda s, name=name: s["by_server"][name], f"{name} server alone: ")
    for name in dict.fromkeys(name for side in sides if side is not None for name in side.get("by_process", ())):
        rows |= memory_rows(lambda s, name=name: s["by_process"].get(name), f"{name} alone: ")
    rows |= {"problems": lambda s: str(len(s["problems"]))}
    lines = ["| | " + " | ".join(TITLES.get(side, side) for side in report["sides"]) + " |", "|---" * (len(sides) + 1) + "|"]
    for label, cell in rows.items():
        lines.append(f"| {label} | " + " | ".join("-" if side is None else cell(side) for side in sides) + " |")
    return "\n".join(lines)


def memory_rows(of: Callable[[dict], dict | None], whose: str = "") -> dict[str, Callable[[dict], str]]:
    """Rows of the memory that `of` finds in a side's report, if any; `whose` begins their labels."""

    def whole(mib: float | None) -> str:
        return "-" if mib is None else f"{mib:.0f}"

    def grown(mib: float | None) -> str:
        return "-" if mib is None else f"{mib:+.0f} MiB"

    def cells(side: dict) -> tuple[str, str, str]:
        if (found := of(side)) is None:
            return "-", "-", "-"
        held = " / ".join(whole(found["held"][when]) for when in ("before_mib", "after_mib"))
        return grown(found["growth"]["gpu_mib"]), held, grown(found["growth"]["host_mib"])

    return {
        f"{whose}GPU memory during the load, growth after warm-up": lambda s: cells(s)[0],
        f"{whose}GPU memory held before the load / after it and a flush, MiB": lambda s: cells(s)[1],
        f"{whose}host memory, growth after warm-up": lambda s: cells(s)[2],
    }


def start(side: str, gpu: str, args: argparse.Namespace, port: int) -> tuple[subprocess.Popen, Path]:
    out = args.out.with_name(f"{args.out.stem}-{side}.json")
    out.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "soak_side.py"), str(out), "--side", side, "--gpu", gpu]
    command += ["--minutes", str(args.minutes), "--port", str(port), "--seed", str(args.seed), "--topology", args.topology]
    command += ["--faults", *args.faults] if args.faults is not None else []
    return subprocess.Popen(command), out


def run(args: argparse.Namespace) -> dict[str, dict | None]:
    """All sides, at once or in turns; a signal ends them, and they write what they have."""
    turns = [args.sides] if len(args.gpus) > 1 else [[side] for side in args.sides]
    reports: dict[str, dict | None] = dict.fromkeys(args.sides)
    stopped = False
    for turn in turns:
        started = {}
        for number, side in enumerate(turn):
            started[side] = start(side, args.gpus[number], args, args.port + 500 * number)
        over = time.monotonic() + 60 * args.minutes + GRACE_SECONDS
        try:
            for process, _ in started.values():
                process.wait(max(over - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            print("a side is late and is ended", flush=True)
        except KeyboardInterrupt:
            stopped = True
        finally:
            for process, _ in started.values():
                process.terminate()  # one that has ended does not mind
            for process, _ in started.values():
                process.wait()
        reports |= {side: json.loads(out.read_text()) if out.exists() else None for side, (_, out) in started.items()}
        if stopped:
            break
    return reports


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["ours", BUILTIN])
    parser.add_argument("--gpus", nargs="+", default=["0", "1"], help="one for all sides in turns, or one each")
    parser.add_argument("--minutes", type=float, default=8, help="of everything a side does, the start of its server included")
    for option, default in (("--port", 9000), ("--seed", 0)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="one", help="what serves a side: see soak_server.py")
    add_faults(parser)
    parser.add_argument("--table", action="store_true", help="print the table of OUT.json; run nothing")
    args = parser.parse_args()
    if len(args.gpus) not in (1, len(args.sides)):
        parser.error(f"--gpus takes one word for all sides in turns, or one for each of the {len(args.sides)}")
    wanted = TOPOLOGIES[args.topology].gpus
    if any(len(gpus.split(",")) != wanted for gpus in args.gpus):
        each = ",".join(map(str, range(wanted)))
        parser.error(f"--topology {args.topology} takes {wanted} GPUs for a side: --gpus {each}")
    if BUILTIN in args.sides and not TOPOLOGIES[args.topology].builtin:
        parser.error(f"--topology {args.topology} is what SGLang's own backend lacks: name the others, --sides ours")
    if args.faults is not None and args.topology != "one":
        parser.error("--faults takes one server a side: --topology one")
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return 0
    signal.signal(signal.SIGTERM, interrupt)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    asked = {"gpus": len(set(args.gpus)), "topology": args.topology, "minutes": args.minutes, "seed": args.seed}
    asked |= {
        "faults": args.faults is not None,
        "switches": {name: value for name, value in os.environ.items() if name.startswith("NSA_BACKEND_")},
    }
    report = joined(run(args), asked, time.monotonic() - began)
    args.out.write_text(json.dumps(report, indent=1))
    print(table(report))
    print("\n".join(report["problems"]) or "no problems", flush=True)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
