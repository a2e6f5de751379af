"""What the text must say of deployments on two GPUs of SGLang 0.5.23, and of the soak run of a prefill and a decode server."""

import sys
from collections.abc import Iterator
from pathlib import Path

from quoted import one, rule, spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import soak_judge
import soak_server


def means(row: dict, side: str) -> str:
    """Accept lengths of one side, least to most of the workloads."""
    return spread([cell[side]["mean"] for cell in row["workloads"].values()])


def failed(report: dict, *cases: str) -> dict[tuple[str, str], dict]:
    """Engines of these cases that gave no result, by case and side."""
    return {(f["case"], f["backend"]): f for f in report["failures"] if f["case"] in cases}


@rule("e2e_deployments_more_0_5_23")
def what_ran(report: dict) -> Iterator[str]:
    assert report["problems"] == []
    assert all(d["tie"] for d in report["differences"])
    rows = {row["case"]: row for row in report["rows"]}
    experts, both = (rows[f"two GPUs, {how}"] for how in ("expert parallel", "DP attention, expert parallel"))
    yield f"with expert parallel {means(experts, 'ours')} of 4 (built-in {means(experts, 'builtin')})"
    yield f"with DP attention beside it {means(both, 'ours')} (built-in {means(both, 'builtin')})"
    fa3, chunks = (rows[f"two GPUs, prefill context parallel, {how}"] for how in ("fa3 prefill", "chunked prefill"))
    yield f"fa3 prefill {means(fa3, 'ours')} (built-in {means(fa3, 'builtin')})"
    assert all(cell.keys() == {"ours"} for cell in chunks["workloads"].values())
    yield f"chunked prefill {means(chunks, 'ours')}, ours alone"
    plain = rows["two GPUs, pipeline parallel"]
    assert plain["steps"] == 0
    assert all(cell.keys() == {"ours", "builtin"} for cell in plain["workloads"].values())
    parted = [d for d in report["differences"] if d["case"] == plain["case"]]
    assert parted == []
    outputs = sum(len(cell["ours"]["requests"]) for cell in plain["workloads"].values())
    yield f"pipeline parallel without drafts gives the built-in's {outputs} outputs, token by token"


@rule("e2e_deployments_more_0_5_23")
def what_ended(report: dict) -> Iterator[str]:
    overlap = failed(report, "two GPUs, two-batch overlap")
    assert len(overlap) == 2
    assert all("DeepEP is not available" in f["traceback"] for f in overlap.values())
    ranks = failed(report, "two GPUs, DP attention", "two GPUs, DP attention, fp8")
    assert len(report["failures"]) == len(overlap) + len(ranks)
    ours = [f for (_, side), f in ranks.items() if side == "ours"]
    assert len(ours) == 2
    assert all("rounds/worker.py" in f["traceback"] and "_capture" in f["traceback"] for f in ours)
    (error,) = {f["traceback"].splitlines()[-1] for f in ours}
    yield error.removesuffix(" for tensor number 1 in the list.")
    (builtin,) = [f for (_, side), f in ranks.items() if side == "builtin"]
    assert "num_splits must have shape (b+1)" in builtin["ended"]
    assert "prefill_cuda_graph_runner.py" in builtin["traceback"]
    theirs = one(report["rows"], case="two GPUs, DP attention")
    yield f"the built-in's on bfloat16 ran, with {means(theirs, 'builtin')}"


@rule("e2e_dp_attention_0_5_23")
def ranks_after_the_mend(report: dict) -> Iterator[str]:
    assert report["problems"] == report["not_measured"] == []
    (failure,) = report["failures"]
    assert (failure["case"], failure["backend"]) == ("two GPUs, DP attention, fp8", "builtin")
    assert "num_splits must have shape (b+1)" in failure["ended"]
    plain, fp8, waiting = (
        one(report["rows"], case=f"two GPUs, DP attention{how}") for how in ("", ", fp8", ", overlap scheduling off")
    )
    yield f"on bfloat16 {means(plain, 'ours')} of 4 (built-in {means(plain, 'builtin')})"
    yield f"on FP8 KV {means(fp8, 'ours')}"
    off = f"{means(waiting, 'ours')} (built-in {means(waiting, 'builtin')})"
    yield f"with overlap scheduling off, unequal ranks among it, {off}"


@rule("soak_pd_0_5_23")
def a_pair_under_load(report: dict) -> Iterator[str]:
    """Beside its table: what was missed."""
    ours, builtin = (report["sides"][side] for side in ("ours", "builtin"))
    assert ours["servers"] == builtin["servers"] == 2
    assert max(side["load_minutes"] for side in (ours, builtin)) < 5
    yield f"load lasted {ours['load_minutes']:.2f} and {builtin['load_minutes']:.2f} minutes, where five were the aim"
    grown, bound = ours["growth"]["gpu_mib"], soak_server.TOPOLOGIES["pd"].growth["gpu_mib"]
    assert grown <= bound
    yield f"grew by {grown:.0f} MiB, within the bound of {bound} MiB"
    held = builtin["held"]["after_mib"] - builtin["held"]["before_mib"]
    yield f"the built-in's held {held} MiB more"
    assert soak_server.TOPOLOGIES["pd"].environment == {}  # no expandable segments


@rule("soak_pd_rounds_0_5_23")
def a_pair_in_one_graph(report: dict) -> Iterator[str]:
    assert report["problems"] == []
    ours = report["sides"]["ours"]
    held = {name: of["held"]["after_mib"] - of["held"]["before_mib"] for name, of in ours["by_server"].items()}
    assert held["decode"] == ours["by_server"]["decode"]["growth"]["gpu_mib"] == 0
    yield f"{held['prefill']:.0f} MiB are held by the prefill server and none by the decode server"
    yield f"where {soak_judge.HELD_MIB} each are the bound"
    assert ours["load_minutes"] < 5
    yield f"The load lasted {ours['load_minutes']:.2f} minutes, so five were missed"
    (line,) = ours["captured"]
    yield f"rounds of up to 64 requests took {line.rsplit(', ', 1)[1]} as they were captured"
    assert "16, 32, 64]" in line


@rule("soak_dp_0_5_23")
def two_ranks_under_load(report: dict) -> Iterator[str]:
    sides = [report["sides"][side] for side in ("ours", "builtin")]
    assert report["arguments"]["switches"] == {"NSA_BACKEND_ROUND_GRAPH": "1"}
    for side in sides:
        assert side["requests"]["failed"] == 0 < side["retracted"]["in_log"]
        assert side["differences"]["ways"] == side["differences"]["at_ties"]
    (held,) = {of["held"]["after_mib"] - of["held"]["before_mib"] for side in sides for of in side["by_process"].values()}
    yield f"each rank holds {held:.0f} MiB more, on either side"
    yield "The load lasted {:.2f} and {:.2f} minutes".format(*(side["load_minutes"] for side in sides))
    late = [side["latency"]["first_token_s"]["p99"] for side in sides]
    yield "had its first token after {:.1f} s and more, the built-in's after {:.1f} s".format(*late)
    rates = [side["requests"]["finished"] / side["load_minutes"] for side in sides]
    yield "ours finished {:.0f} requests a minute, the built-in {:.0f}".format(*rates)
    captured = [line.rsplit(", ", 1)[1].removesuffix(" MiB") for line in sides[0]["captured"]]
    yield "took {} and {} MiB on the two ranks".format(*captured)
