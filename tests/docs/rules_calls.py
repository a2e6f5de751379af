"""What the text must say of the calls that the host makes in a speculative round."""

from collections.abc import Iterator

from quoted import one, rule

SIDES = {"ours": "one graph", "three_graphs": "three graphs", "builtin": "built-in"}
LAUNCHES = ("cuLaunchKernelEx", "cudaLaunchKernel", "cudaLaunchKernelExC")
"""Which calls of CUDA start kernels outside graphs."""


def calls(row: dict, side: str) -> dict[str, float]:
    """Calls a round by name, of those that were made."""
    return row[side]["profile"]["calls_a_round"]


def on_the_gpu(row: dict, side: str) -> float:
    """Kernels and copies that the host starts for a round, beside graphs."""
    return sum(calls(row, side).get(name, 0) for name in (*LAUNCHES, "cudaMemcpyAsync"))


@rule("draft_calls_0_5_23")
def every_cell_of_calls(report: dict) -> Iterator[str]:
    for row in report["rows"]:
        where = f"{row['steps']} | {row['batch']} x {row['length']}"
        for side, words in SIDES.items():
            found, of_side = calls(row, side), row[side]
            least, most = of_side["round_ms_min_max"]
            records = found["cudaEventRecord"] + found["cudaEventRecordWithFlags"]
            counts = [found["cudaGraphLaunch"], *(found.get(name, 0) for name in LAUNCHES), found["cudaMemcpyAsync"]]
            counts += [found["cudaEventSynchronize"], records, found["cudaStreamWaitEvent"]]
            cells = [f"{of_side['round_ms']:.2f} ({least:.2f} to {most:.2f})", f"{of_side['tokens_per_s']:.0f}"]
            cells += [f"{of_side['accept']:.2f}", *(f"{count:.1f}" for count in counts)]
            yield f"| wide | {where} | {words} | {' | '.join(cells)} |"
    assert {row["checkpoint"] for row in report["rows"]} == {"wide"}
    reached = dict.fromkeys(cell.rsplit(", ", 1)[0] for cell in report["not_measured"])
    for where in reached:
        shapes = [cell.rsplit(", ", 1)[1] for cell in report["not_measured"] if cell.startswith(where)]
        yield f"{where}, {', '.join(shapes)}"


@rule("draft_calls_0_5_23")
def what_a_round_calls(report: dict) -> Iterator[str]:
    rows = report["rows"]
    for row in rows:
        ours = calls(row, "ours")
        wanted = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventSynchronize", "cudaStreamWaitEvent")
        assert [ours[name] for name in wanted] == [1, 1, 2, 1, 4]
        assert all(calls(row, side)["cudaEventSynchronize"] == 1 for side in SIDES)
    first = rows[0]
    yield f"So it is {on_the_gpu(first, 'ours'):.1f} here, three graphs {on_the_gpu(first, 'three_graphs'):.1f}"
    yield f"and the built-in {on_the_gpu(first, 'builtin'):.1f} (N = 3, one request)"
    pages = [calls(row, "ours")["cudaEventQuery"] for row in rows if row["steps"] == 3]
    assert len(set(pages)) == 1
    each = (calls(first, "ours")["cuLaunchKernelEx"] - 1) / pages[0]
    assert round(each) == 3
    yield f"three more launches in {pages[0]:.2f} of the rounds"
    inflated = sum(row[side]["outside_graphs_ms"] < 0 for row in rows for side in SIDES)
    yield f"below zero in {inflated} of {len(rows) * len(SIDES)} lines"


@rule("draft_calls_0_5_23", "serve_rounds_0_5_23")
def on_a_faster_host(report: dict, before: dict) -> Iterator[str]:
    """One graph takes what it took, and three graphs less: `round_graph` was the name of one graph, and `ours` of three."""

    wide = [row for row in before["rows"] if row["checkpoint"] == "wide" and row["length"] == 300]
    then = [one(wide, steps=row["steps"], batch=row["batch"]) for row in report["rows"]]
    form = " / ".join(["{:.2f}"] * len(then))
    for side, old, words in (
        ("ours", "round_graph", "one graph takes {} ms where it took {}"),
        ("three_graphs", "ours", "three graphs take {} ms where they took {}"),
    ):
        now, were = [row[side]["round_ms"] for row in report["rows"]], [row[old]["round_ms"]["median"] for row in then]
        yield words.format(form.format(*now), form.format(*were))
    rates = [row["ours"]["tokens_per_s"] / row["three_graphs"]["tokens_per_s"] for row in report["rows"]]
    yield "{:.2f}, {:.2f} and {:.2f} times the tokens per second of three graphs".format(*rates)
    theirs = [row["ours"]["tokens_per_s"] / row["builtin"]["tokens_per_s"] for row in report["rows"]]
    yield "{:.2f}, {:.2f} and {:.2f} times the built-in's".format(*theirs)
    once = [row["round_graph_over_ours"]["speedup"] for row in then]
    yield "{:.2f}, {:.2f} and {:.2f} there".format(*once)
    for row in report["rows"]:
        for other in ("three_graphs", "builtin"):
            assert row["ours"]["round_ms_min_max"][1] < row[other]["round_ms_min_max"][0]
