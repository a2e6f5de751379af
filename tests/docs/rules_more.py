"""What the text must say of the swapped order, GLM and auto served, and of engine runs that were judged again or cut short."""

from collections.abc import Iterator, Sequence

from quoted import medians, one, rule, spread

QUANTITIES = {"tokens_per_s": "{:.0f}", "ttft_ms": "{:.1f}", "tpot_ms": "{:.2f}", "round_ms": "{:.2f}"}
TABLES = {
    "serve_order_0_5_23": ("ours", "three_graphs", "builtin"),
    "serve_models_0_5_23": ("ours", "builtin"),
    "serve_auto_0_5_23": ("auto", "ours", "builtin"),
    "serve_sampled_0_5_23": ("ours", "three_graphs", "builtin"),
}
"""File to its sides: the first is what a user asks about, and its ratios to the others stand in the table, in this order."""
NAMES = {"glm-5.1": "GLM-5.1", "glm-5.2": "GLM-5.2"}


def over(row: dict, side: str, other: str, key: str = "tokens_per_s") -> float:
    return row[side][key]["median"] / row[other][key]["median"]


def told(row: dict, key: str) -> float:
    """Ours over built-in as the report has it."""
    return row["speedup"] if key == "tokens_per_s" else row["ratio"][key]


def gains(rows: list[dict], side: str, other: str, key: str = "tokens_per_s") -> str:
    """ "a, b and c": this quantity of `side` over that of `other` at batches of 1, 8 and 32."""
    found = [over(one(rows, batch=batch), side, other, key) for batch in (1, 8, 32)]
    return "{:.2f}, {:.2f} and {:.2f}".format(*found)


def cells_of(report: dict, checkpoint: str, steps: int) -> list[dict]:
    return [row for row in report["rows"] if (row["checkpoint"], row["steps"]) == (checkpoint, steps)]


def apart(row: dict, side: str, other: str, key: str = "tokens_per_s") -> bool:
    """Whether every sample of one side lies beyond every sample of the other."""
    (a, b), (c, d) = row[side][key]["min_max"], row[other][key]["min_max"]
    return b < c or d < a


def round_samples(rows: list[dict], side: str) -> list[list[float]]:
    """The least and the most of each cell."""
    return [row[side]["round_ms"]["min_max"] for row in rows]


def cells_of_row(row: dict, sides: Sequence[str]) -> list[str]:
    """Medians of each quantity on each side, each with the ratios of the first side to the others, and accept lengths."""
    cells = []
    for key, form in QUANTITIES.items():
        cells.append(medians(row, sides, key, form))
        cells.append(" / ".join(f"{over(row, sides[0], other, key):.3f}" for other in sides[1:]))
    return [*cells, " / ".join(f"{row[side]['accept']:.2f}" for side in sides)]


def table_of(name: str, sides: tuple[str, ...]) -> None:
    """The rule of a file of servers: a row a cell, the lost ones too, and the cells that were not reached."""

    @rule(name)
    def every_cell(report: dict) -> Iterator[str]:
        for row in report["rows"]:
            here = [side for side in sides if side in row]
            cells = cells_of_row(row, here)
            yield f"| {row['checkpoint']} | {row['steps']} | {row['batch']} x {row['length']} | {' | '.join(cells)} |"
        for run in report["runs"]:
            cells = [cell.replace(" tp1,", "").rsplit(", ", 1) for cell in run["not_measured"]]
            for where in dict.fromkeys(where for where, _ in cells):
                yield f"Not reached: {where}, {', '.join(shape for what, shape in cells if what == where)}"


for each, its_sides in TABLES.items():
    table_of(each, its_sides)


def behind(rows: list[dict], side: str, other: str, key: str) -> str:
    """Cells in which `side` has fewer tokens per second, or takes longer, than `other`, each with its ratio."""
    found = [(row, over(row, side, other, key)) for row in rows if other in row]
    lost = [(row, ratio) for row, ratio in found if (ratio < 1 if key == "tokens_per_s" else ratio > 1)]
    return ", ".join(f"{row['checkpoint']} {row['batch']} x {row['length']} ({ratio:.3f})" for row, ratio in lost)


@rule("serve_order_0_5_23")
def one_draft_in_one_graph(report: dict) -> Iterator[str]:
    for checkpoint in ("faithful", "wide"):
        rows = cells_of(report, checkpoint, 1)
        yield f"on `{checkpoint}` {gains(rows, 'ours', 'three_graphs')} times the tokens per second of three graphs"
        yield f"and {gains(rows, 'ours', 'builtin')} times the built-in's"
        yield f"three graphs have {gains(rows, 'three_graphs', 'builtin')} times the built-in's on `{checkpoint}`"
        assert all(row["ours"]["accept"] == row[side]["accept"] for row in rows for side in ("three_graphs", "builtin"))
    rows = [row for row in report["rows"] if row["steps"]]
    for key in ("tokens_per_s", "ttft_ms", "round_ms"):
        assert behind(rows, "ours", "builtin", key) == ""
    for key in ("tokens_per_s", "round_ms"):
        assert behind(rows, "ours", "three_graphs", key) == ""
    yield f"first token later than with three graphs: {behind(rows, 'ours', 'three_graphs', 'ttft_ms')}"
    without = cells_of(report, "wide", 0)
    yield f"first token later than the built-in's without drafts: {behind(without, 'ours', 'builtin', 'ttft_ms')}"


@rule("serve_order_0_5_23", "serve_rounds_0_5_23")
def one_cell_in_both_orders(swapped: dict, before: dict) -> Iterator[str]:
    wanted = {"checkpoint": "wide", "steps": 1, "batch": 1, "length": 300}
    first, last = one(before["rows"], **wanted), one(swapped["rows"], **wanted)
    whole = over(first, "round_graph", "builtin"), over(last, "ours", "builtin")
    three = over(first, "ours", "builtin"), over(last, "three_graphs", "builtin")
    words = (
        "one graph serves {:.2f} times the built-in's tokens per second where the built-in was started first, {:.2f} where last"
    )
    yield words.format(*whole)
    yield "three graphs {:.2f} and {:.2f}".format(*three)


@rule("serve_order_0_5_23", "serve_0_5_23")
def no_speculation_in_both_orders(swapped: dict, before: dict) -> Iterator[str]:
    """What `wide` without drafts gives when ours starts first, and when the built-in does."""
    rows = cells_of(swapped, "wide", 0)
    keys = ("tokens_per_s", "ttft_ms", "tpot_ms")
    both = {}
    for row in rows:
        shape = row["batch"], row["length"]
        other = one(cells_of(before, "wide", 0), batch=row["batch"], length=row["length"])
        both[shape] = {key: (told(other, key), told(row, key)) for key in keys}
        ratios = [f"{both[shape][key][run]:.2f}" for run in (0, 1) for key in keys]
        yield f"| {shape[0]} x {shape[1]} | {' | '.join(ratios)} |"
    assert not any(apart(row, "ours", "builtin") for row in rows)
    change = max(after / once - 1 for once, after in (ratios["tokens_per_s"] for ratios in both.values()))
    yield f"differs by up to {100 * change:.0f} % between two pairs of processes"
    lost = [f"{b} x {n}" for (b, n), ratios in both.items() if max(ratios["tokens_per_s"]) < 1]
    yield f"fewer tokens per second in both orders at {' and '.join(lost)}"
    longer = {shape: ratios["tpot_ms"] for shape, ratios in both.items() if min(ratios["tpot_ms"]) > 1}
    shapes = [f"{b} x {n}" for b, n in longer]
    extra = [100 * (ratio - 1) for pair in longer.values() for ratio in pair]
    yield f"longer for a token in both orders at {', '.join(shapes[:-1])} and {shapes[-1]}, by {spread(extra, '{:.1f}')} %"
    sure = [row for row in rows if apart(row, "ours", "builtin", "tpot_ms")]
    yield f"only at {' and '.join('{batch} x {length}'.format(**row) for row in sure)} do the samples of the two lie apart"


@rule("serve_models_0_5_23")
def other_models_served(report: dict) -> Iterator[str]:
    rows = report["rows"]
    assert all(apart(row, "ours", "builtin") for row in rows)
    assert all(behind(rows, "ours", "builtin", key) == "" for key in QUANTITIES)
    yield f"in all {len(rows)} cells"
    for model, steps in dict.fromkeys((row["checkpoint"], row["steps"]) for row in rows):
        found = cells_of(report, model, steps)
        rates, rounds, first = (
            spread([over(row, "ours", "builtin", key) for row in found]) for key in ("tokens_per_s", "round_ms", "ttft_ms")
        )
        accept = spread([row["ours"]["accept"] / row["builtin"]["accept"] for row in found])
        yield f"| {NAMES[model]} | {steps} | {len(found)} | {rates} | {first} | {rounds} | {accept} |"
    equal = [row["ours"]["accept"] / row["builtin"]["accept"] for row in cells_of(report, "glm-5.2", 5)]
    yield f"accept lengths are {spread(equal, '{:.3f}')} times the built-in's there"
    theirs, ours = (max(max(around) / min(around) for around in round_samples(rows, side)) for side in ("builtin", "ours"))
    yield f"samples of the built-in's rounds differ by up to {theirs:.1f} times within a cell, ours by up to {ours:.1f}"


@rule("serve_auto_0_5_23")
def what_auto_gains(report: dict) -> Iterator[str]:
    wide, few = cells_of(report, "wide", 3), cells_of(report, "wide-16-heads", 3)
    for batch, words in ((1, "{} times the tokens per second of fa3 at one request"), (8, "{} at 8"), (32, "{} at 32")):
        found = [over(one(rows, batch=batch), "auto", "ours") for rows in (wide, few)]
        yield words.format("{:.3f} and {:.3f}".format(*found))
    single = [one(rows, batch=1) for rows in (wide, few)]
    for key, words in (("tpot_ms", "A token takes {} of fa3's time there"), ("round_ms", "a round {}")):
        yield words.format("{:.3f} and {:.3f}".format(*(over(row, "auto", "ours", key) for row in single)))
        assert all(apart(row, "auto", "ours", key) for row in single)
    # Both accept more, at ties: this part of the gain is not the kernel's.
    accept = [row["auto"]["accept"] / row["ours"]["accept"] for row in single]
    yield "accept lengths are {:.3f} and {:.3f} times fa3's".format(*accept)
    eight = one(few, batch=8)
    assert f"{over(eight, 'auto', 'ours', 'round_ms'):.3f}" == "1.000"
    yield f"{eight['auto']['accept'] / eight['ours']['accept']:.3f} times the accept length"
    lost = {"tokens_per_s": "fewer tokens per second", "ttft_ms": "first token later", "round_ms": "longer rounds"}
    for key, words in lost.items():
        yield f"{words} than fa3: {behind(report['rows'], 'auto', 'ours', key)}"


@rule("e2e_sparse_decode_rerun_0_5_23", "e2e_sparse_decode_0_5_23")
def an_engine_run_that_was_judged(report: dict, first: dict) -> Iterator[str]:
    assert report["problems"] == report["failures"] == report["not_measured"] == []
    assert all(d["tie"] for d in report["differences"])
    yield f"{len(report['differences'])} outputs part from the built-in's, each at a tie"
    yield f"asked of its {len(first['differences'])} outputs that part"
    cells = one(report["rows"], case="weights updated")["workloads"]
    for side, words in (("ours", "ours {} before and {} after"), ("builtin", "the built-in's {} before and {} after")):
        before, after = (
            [cell[side]["mean"] for name, cell in cells.items() if ("updated" in name) is updated] for updated in (False, True)
        )
        yield words.format(*(" and ".join(f"{mean:.2f}" for mean in means) for means in (before, after)))


@rule("gpu_tests", "gpu_tests_0_5_17", "gpu_tests_0_5_23")
def who_ran_the_gpu_tests(first: dict, second: dict, newest: dict) -> Iterator[str]:
    """The last run of all GPU tests on each release, and of each of NVIDIA's checkers."""

    def last(report: dict, words: str) -> str:
        return next(run["outcome"] for run in reversed(report["runs"]) if words in run["command"])

    for report, release in ((newest, "0.5.23"), (second, "0.5.17"), (first, "0.5.12.post1")):
        assert "failed" not in last(report, "pytest -q -m gpu tests/kernels tests/gpu")
        yield f"on {release} {last(report, 'pytest -q -m gpu tests/kernels tests/gpu').split(' passed')[0]} passed"
    for checker, words in (
        ("memcheck", "memcheck found nothing in {} tests"),
        ("initcheck", "nothing in sparse_decode's {}"),
        ("racecheck", "racecheck nothing in the same {}"),
    ):
        assert "0 errors" in last(newest, checker)
        yield words.format(last(newest, checker).split(" passed")[0])


@rule("e2e_rounds_0_5_17")
def rounds_on_the_second_generation(report: dict) -> Iterator[str]:
    assert report["failures"] == report["not_measured"] == []
    found = report["differences"]
    assert all(d["tie"] is None for d in found)
    assert len(report["problems"]) == len(found)  # and none of a floor
    assert all("nobody asked whether it is a tie" in problem for problem in report["problems"])
    long = sum(d["workload"] == "8x3000" for d in found)
    yield f"{len(found)} outputs part from the built-in's, {long} of them on prompts of 3000 tokens"


@rule("e2e_four_gpus_0_5_23")
def four_gpus_on_the_newest(report: dict) -> Iterator[str]:
    """Which engines ended, and how the others did: the file has the last lines of their logs."""
    assert report["differences"] == []  # no case has both sides
    ended = [
        (row["decode"], side, found["mean"])
        for row in report["rows"]
        for cell in row["workloads"].values()
        for side, found in cell.items()
    ]
    engines = {(decode, side) for decode, side, _ in ended}
    assert engines == {("flashmla_sparse", "ours"), ("fa3", "builtin"), ("flashmla_sparse", "builtin")}
    ours = [mean for _, side, mean in ended if side == "ours"]
    yield f"ours with flashmla_sparse and tensor parallel, {spread(ours)} of 4"
    failures = report["failures"]
    yield f"{len(failures)} of {len(failures) + len(engines)} engines failed"
    ports = [f for f in failures if "address already in use" in f["log"]]
    start = [f for f in failures if "_create_gloo_process_group" in f["log"]]
    later = [f for f in failures if f not in ports and f not in start]
    yield f"{len(ports)} found a port taken, {len(start)} lost its own processes while it started, {len(later)} ended later"
    sides = [f["backend"] for f in later]
    yield f"{sides.count('ours')} of ours and {sides.count('builtin')} of the built-in"
    assert all(("DP attention" in f["case"]) is (f in later) for f in failures)
