"""What the text must say of real servers: rounds, tokens per second, and the soak runs."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from quoted import files, one, result, rule

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import soak
import soak_judge
import soak_server
import soak_traffic


@rule("draft")
def rounds(report: dict) -> Iterator[str]:
    for row in report["rows"]:
        sides = (row["ours"], row["builtin"])
        cells = [f"{side['round_ms']:.2f}" for side in sides] + [f"{side['outside_graphs_ms']:.2f}" for side in sides]
        cells += [f"{side['profile']['launch_calls']:.0f}" for side in sides]
        yield f"| {row['batch']} | " + " | ".join(cells) + " |"
    one_request = one(report["rows"], batch=1)
    ours, theirs = (one_request[side] for side in ("ours", "builtin"))
    yield f"{ours['round_ms']:.1f} ms instead of {theirs['round_ms']:.1f}"
    kernels = [f"{side['profile']['kernel_us'] / 1e3:.2f}" for side in (ours, theirs)]
    yield f"takes {ours['round_ms']:.2f} ms, of which kernels take {kernels[0]}"
    launches = [f"{side['profile']['launch_calls']:.0f}" for side in (theirs, ours)]
    yield (
        f"takes {theirs['round_ms']:.2f} ms with {kernels[1]} ms of kernels: the difference is on the host, "
        f"{launches[0]} kernel launches a round outside graphs against {launches[1]}"
    )


@rule("serve")
def serving(report: dict) -> Iterator[str]:
    """Every checkpoint, N and batch was measured and stands in the text."""
    rows = report["rows"]
    assert report["not_measured"] == []
    for checkpoint, steps in dict.fromkeys((r["checkpoint"], r["steps"]) for r in rows):
        found = {r["batch"]: r for r in rows if (r["checkpoint"], r["steps"]) == (checkpoint, steps)}
        rates = [[found[batch][b]["tokens_per_s"]["median"] for b in ("ours", "builtin")] for batch in (1, 8, 32)]
        assert len(found) == len(rates)
        accept = [found[8][b]["accept"] for b in ("ours", "builtin")]
        cells = [f"{ours:.0f} / {builtin:.0f}" for ours, builtin in rates]
        yield f"| {checkpoint} | {steps} | " + " | ".join(cells) + f" | {accept[0]:.2f} / {accept[1]:.2f} |"
    for steps, checkpoint, words in (
        (0, "faithful", "{:.2f} to {:.2f} times the built-in backend's tokens per second without speculation"),
        (1, "faithful", "{:.2f} to {:.2f} times with one draft"),
        (3, "faithful", "{:.2f} to {:.2f} with N = 3"),
        (5, "faithful", "{:.2f} to {:.2f} with N = 5"),
        (0, "wide", "behind: {:.2f} to {:.2f} times without speculation"),
        (1, "wide", "without speculation, {:.2f} to {:.2f} with one draft"),
        (3, "wide", "serve {:.2f} to {:.2f} times the tokens per second (N = 3, batch 1 to 32)"),
        (3, "wide", "with one draft, {:.2f} to {:.2f} with N = 3"),
        (5, "wide", "with N = 3 and {:.2f} to {:.2f} with N = 5."),
    ):
        found = [r["speedup"] for r in rows if (r["steps"], r["checkpoint"]) == (steps, checkpoint)]
        yield words.format(min(found), max(found))


@rule("soak_large_chunks", "soak")
def soak_runs(large: dict, small: dict) -> Iterator[str]:
    """The runs of ours alone; docs/promises.md has a column for each."""
    runs = [large, small]
    assert all(r["differences"]["ways"] == r["differences"]["at_ties"] for r in runs)
    for label, cell in (
        ("load, minutes", lambda r: str(r["load_minutes"])),
        ("requests finished / aborted / closed / failed", lambda r: " / ".join(map(str, r["requests"].values()))),
        ("retracted", lambda r: str(r["retracted"]["in_log"])),
        ("accept length, all", lambda r: f"{r['accept_length']:.3f}"),
        ("accept length, last whole minute over the first, less one", lambda r: f"{100 * r['drift']:.1f} %"),
        ("lines in the log that tell of errors", lambda r: str(r["suspect_lines"]["count"])),
        ("ways in which an output left its calm reference, all at ties", lambda r: str(r["differences"]["at_ties"])),
        ("GPU memory during the load, growth after warm-up", lambda r: f"+{r['growth']['gpu_mib']} MiB"),
    ):
        yield f"| {label} | {cell(runs[0])} | {cell(runs[1])} |"
    before, after = small["held"]["before_mib"], small["held"]["after_mib"]
    assert after - before <= soak_judge.HELD_MIB
    assert small["growth"]["gpu_mib"] <= soak_judge.TOPOLOGIES["one"].growth["gpu_mib"]
    yield f"after it and a flush, MiB | not taken | {before} / {after} |"
    yield f"before the load the server has {before} MiB of the GPU, and {after} once it is idle"
    yield f"rose by {small['growth']['host_mib']:.0f} MiB after that"
    steps = re.findall(r"(\d+)(?:,| and|(?= MiB, each))", large["note"].split("segments of")[1])
    yield f"rose in steps of {min(map(int, steps))} to {max(map(int, steps))} MiB"
    scores = [chunk * soak_server.POOL_TOKENS * 4 // 2**20 for chunk in (2048, 512)]
    yield f"with chunks of 2048 up to {scores[0]} MiB each"
    yield f"with chunks of 512 at most {scores[1]} MiB, in pages of 20 MiB"
    yield f"started with a bound of {small['bounds']['growth']['gpu_mib']} MiB on that growth"
    yield f"on what is held since, {soak_judge.HELD_MIB} MiB, and {soak_judge.TOPOLOGIES['one'].growth['gpu_mib']} on the cache"
    taken_back = 100 * (1 - soak_traffic.SHARES["finished"])
    yield f"{taken_back:.0f} % of the requests are aborted or their connections closed"
    widest = max(r["differences"]["widest_below_best"] for r in runs)
    yield f"the widest seen was {widest:.3f}"
    first = small["rows"][-1]["host_mib"] / 1e3
    yield f"Host memory is {first:.1f} GB once the processes that compile kernels have ended"


NO_RETRACTION = "no request was retracted"
ACTIVE = re.compile(r"ours: (\d+) lines of the log say that this package's backend is active, not (\d+)")
ASKED = re.compile(r"the sides were not asked the same: of their templates (\d+) of ours, (\d+) of builtin had a reference .+")
HELD = re.compile(r"ours: (\d+) MiB of GPU memory are held(| by .+) after the load and the flush, more than (\d+)")


def soak_of_both(name: str) -> None:
    """The rule of a soak run of both backends: its table, as `soak.py --table` prints it."""

    @rule(name)
    def says(report: dict) -> Iterator[str]:
        yield from soak.table(report).splitlines()
        for problem in report["problems"]:
            if held := HELD.fullmatch(problem):
                yield "{} MiB are held{} after the load and a flush, more than the bound of {} MiB".format(*held.groups())
                continue
            if lines := ACTIVE.fullmatch(problem):
                yield "{} lines of its log say that the backend is active, where it expected {}".format(*lines.groups())
                continue
            if asked := ASKED.fullmatch(problem):
                yield "{} of its prompts had a calm reference, of the built-in's {}".format(*asked.groups())
                continue
            assert problem == NO_RETRACTION
            assert all(NO_RETRACTION in report["sides"][side]["problems"] for side in ("ours", "builtin"))
            yield f"`benchmarks/results/{name}_h200.json`: no request was retracted on either side"


for each in files("soak*"):
    if "sides" in result(each):  # older runs are of ours alone
        soak_of_both(each)


@rule("memory")
def replay_buffers(report: dict) -> Iterator[str]:
    ours, theirs = (f"{report['bytes'][side] / 2**20:.1f}" for side in ("ours", "builtin"))
    yield f"{ours} MiB, built-in {theirs} MiB"
    yield f"{theirs} MiB against {ours}"


@rule("http")
def over_http(report: dict) -> Iterator[str]:
    """The command of the README runs; no number of it is quoted."""
    assert report["mean"] > 3.9
    yield "benchmarks/results/http_h200.json"


def gpu_tests(name: str) -> None:
    """The rule of a file of test runs by hand: the text says so where the last one did not pass; no number of it is quoted."""

    @rule(name)
    def says(report: dict) -> Iterator[str]:
        failed = re.search(r"(?<!none )\b(failed|errors?)\b", report["runs"][-1]["outcome"])
        yield f"`benchmarks/results/{name}_h200.json`" + (", the last run failed" if failed else "")


for each in files("gpu_tests*"):
    gpu_tests(each)
