"""What the text must say of accept lengths, of outputs that part, and of rejected drafts."""

from collections.abc import Iterator

from quoted import files, one, rule, spread

IMPLEMENTATIONS = {
    "fa3": "fa3",
    "flashmla_sparse": "flashmla_sparse",
    "flashmla_kv": "flashmla_kv on fp8 KV",
    "sparse_decode": "sparse_decode",
}
SET_APART = {
    "glm-5.1": ", GLM-5.1",
    "glm-5.2": ", GLM-5.2",
    "PD, glm-5.2": ", GLM-5.2",
    "adaptive": ", N chosen by SGLang",
    "fp8, sparse": " on fp8 KV",
}
"""By the beginning of a case's name: accept lengths of other models, or of an N that changes, are another row."""
END_TO_END = files("e2e*")


def runs_of(report: dict) -> list[list[dict]]:
    """Rows of the first run, and of a rerun."""
    return [report["rows"], *([report["rerun"]["rows"]] if "rerun" in report else [])]


def all_rows(report: dict) -> list[dict]:
    """Of all runs: what is worse stands, whichever run it was."""
    return [row for rows in runs_of(report) for row in rows]


def means(report: dict, side: str, steps: int, decode: str | None = None) -> list[float]:
    """Mean accept lengths of every workload of every row with these steps, and this implementation where it is given."""
    rows = [row for row in all_rows(report) if row["steps"] == steps and decode in (None, row["decode"])]
    return [cell[side]["mean"] for row in rows for cell in row["workloads"].values() if side in cell]


def kind(row: dict) -> tuple[int, str]:
    """(N, implementation and what sets the case apart), by which rows are comparable."""
    case = row["case"]
    apart = next((words for prefix, words in SET_APART.items() if case.startswith(prefix)), "")
    return row["steps"], IMPLEMENTATIONS[row["decode"]] + apart


def complete(name: str, report: dict) -> Iterator[str]:
    """A row of docs/numbers/accept_lengths.md for each N and implementation of an end-to-end file, over all of its rows."""
    file = f"`benchmarks/results/{name}_h200.json`"
    rows = [row for row in all_rows(report) if row["steps"]]
    for steps, words in sorted(set(map(kind, rows))):
        cells = [cell for row in rows if kind(row) == (steps, words) for cell in row["workloads"].values()]
        ours, theirs = ([cell[side]["mean"] for cell in cells if side in cell] for side in ("ours", "builtin"))
        means = [spread(side) if side else "-" for side in (ours, theirs)]  # a side whose engines all failed has none
        yield f"| {file} | {steps} | {words} | {len(ours or theirs)} | {means[0]} | {means[1]} |"


def parted(name: str, report: dict) -> Iterator[str]:
    """A row of docs/numbers/accept_lengths.md: outputs that part from the built-in backend's, and how far from the best."""
    found = report.get("differences")
    if found is None:
        return
    if not found and not any({"ours", "builtin"} <= c.keys() for row in all_rows(report) for c in row["workloads"].values()):
        yield f"| `benchmarks/results/{name}_h200.json` | none compared | - | - |"
        return
    asked = [d for d in found if d["tie"] is not None]  # a run that was cut short has not
    if found and not asked:
        yield f"| `benchmarks/results/{name}_h200.json` | {len(found)} | nobody asked | - |"
        return
    widest = max((gap for d in asked for gap in d["below_best"].values() if gap is not None), default=0)
    ties = sum(d["tie"] is True for d in asked)
    yield f"| `benchmarks/results/{name}_h200.json` | {len(found)} | {ties} | {widest:.3f} |"


def every_row_of(name: str) -> None:
    """The rule that each end-to-end file has, whatever else is said of it."""

    @rule(name)
    def says(report: dict) -> Iterator[str]:
        yield from complete(name, report)
        yield from parted(name, report)


for each in END_TO_END:
    every_row_of(each)


@rule("e2e")
def accept_lengths(report: dict) -> Iterator[str]:
    for label, case, workload in (
        ("fa3, N = 3, 8 requests of 300 to 559 tokens", "n3 fa3", "8x300"),
        ("fa3, N = 3, 4 requests of 3000 to 3111 tokens", "n3 fa3", "4x3000"),
        ("flashmla_sparse, N = 3, the same 8 requests", "n3 flashmla_sparse", "8x300"),
        ("flashmla_kv on fp8 KV, N = 3, the same 8 requests", "n3 fp8, flashmla_kv", "8x300"),
        ("fa3, N = 5, the same 8 requests", "n5 fa3", "8x300"),
    ):
        cell = one(report["rows"], case=case)["workloads"][workload]
        yield f"| {label} | {cell['ours']['mean']:.2f} | {cell['builtin']['mean']:.2f} |"
    accept = one(report["rows"], case="n3 fa3")["workloads"]["8x300"]
    ours, theirs = (f"{accept[side]['mean']:.2f}" for side in ("ours", "builtin"))
    yield f"rises from {theirs} to {ours} of 4"
    yield f"accept length {theirs} of 4 against {ours}"
    differences = report["differences"]
    widest = max(max(d["below_best"].values()) for d in differences)
    assert all(d["tie"] for d in differences)
    yield f"{len(differences)} requests part from the built-in backend's, each at a tie: both tokens within {widest:.3f} of"
    yield f"N = 5 gives {one(report['rows'], case='n5 fa3')['workloads']['8x300']['ours']['mean']:.2f} tokens a round"


@rule("e2e_grid")
def the_grid_of_batches_and_contexts(report: dict) -> Iterator[str]:
    for decode in sorted({row["decode"] for row in all_rows(report)}):
        yield f"{IMPLEMENTATIONS[decode]} {spread(means(report, 'ours', 3, decode))}"
    yield f"the built-in backend has {spread(means(report, 'builtin', 3))}"
    failed, again = (one(rows, case="grid flashmla_sparse")["workloads"]["8x3000"]["ours"] for rows in runs_of(report))
    yield f"flashmla_sparse on 8 requests of 3000 tokens had {failed['mean']:.3f} in the first run"
    yield f"With {len(again['requests'])} requests in the rerun, which stands in the same file, it has {again['mean']:.3f}"


@rule("e2e_two_gpus")
def two_gpus(report: dict) -> Iterator[str]:
    cells = {r["case"]: r["workloads"] for r in report["rows"]}
    tp, dp = (cells[f"two GPUs, {how}"]["8x300"]["ours"]["mean"] for how in ("tensor parallel", "DP attention"))
    yield f"tensor parallel {tp:.2f}, DP attention {dp:.2f}"
    idle = cells["two GPUs, DP attention"]["1x300"]["ours"]["mean"]
    yield f"accept length {idle:.2f} with one of two ranks idle"


@rule("e2e_four_gpus")
def four_gpus(report: dict) -> Iterator[str]:
    assert report["problems"] == report["failures"] == []
    assert all(d["tie"] for d in report["differences"])
    tp, dp, fp8 = (r["workloads"]["8x300"]["ours"]["mean"] for r in report["rows"])
    yield (
        f"tensor parallel {tp:.2f}, DP attention 2 of two GPUs each {dp:.2f}, DP attention 4 on fp8 KV {fp8:.2f}; "
        f"{len(report['differences'])} outputs part from the built-in backend's"
    )
    idle = one(report["rows"], case="four GPUs, DP attention 4, fp8")["workloads"]["1x300"]["ours"]["mean"]
    yield f"{idle:.2f} with three of four idle"


@rule("e2e_0_5_17")
def the_second_generation(report: dict) -> Iterator[str]:
    assert report["problems"] == report["failures"] == []
    assert all(d["tie"] for d in report["differences"])
    yield f"Of all outputs, {len(report['differences'])} part from the built-in backend's, each at a tie"
    rows = {r["case"]: r["workloads"] for r in report["rows"]}
    for label, workload in (
        ("1 request of 300 to 559 tokens", "1x300"),
        ("1 of 3000 to 3111", "1x3000"),
        ("4 of 300 to 411", "4x300"),
        ("4 of 3000 to 3111", "4x3000"),
        ("8 of 300 to 559", "8x300"),
        ("8 of 3000 to 3259", "8x3000"),
    ):
        cell = rows["batches fa3"][workload]
        yield f"| {label} | {cell['ours']['mean']:.2f} | {cell['builtin']['mean']:.2f} |"
    five = rows["n5 fa3"]["8x300"]
    yield f"N = 5, 8 requests: {five['ours']['mean']:.2f} against {five['builtin']['mean']:.2f} of 6"
    bfloat16 = [m for decode in ("fa3", "flashmla_sparse") for m in means(report, "ours", 3, decode)]
    yield f"stay between {min(bfloat16):.2f} and {max(bfloat16):.2f}"
    ours, theirs = (means(report, side, 3, "flashmla_kv") for side in ("ours", "builtin"))
    yield f"has {spread(ours)} against {spread(theirs)}"
    single = rows["n1 fp8, flashmla_kv"]
    (long, long_theirs), (short, short_theirs) = (
        [sum(h[0] for h in single[workload][side]["histograms"]) for side in ("ours", "builtin")]
        for workload in ("8x3000", "8x300")
    )
    requests = len(single["8x3000"]["ours"]["requests"])
    yield f"{requests} requests of 3000 tokens lose {long} drafts of ours and {long_theirs} of the built-in's"
    yield f"8 short ones {short} and {short_theirs} "
    ours, theirs = (f"{single['8x3000'][side]['mean']:.2f}" for side in ("ours", "builtin"))
    assert ours == theirs
    yield f"both have {ours} of 2 on {requests} requests of 3000 tokens"


@rule("e2e_two_gpus_0_5_17")
def two_gpus_on_the_second_generation(report: dict) -> Iterator[str]:
    assert report["differences"] == []
    tp, fp8, dp = (r["workloads"]["8x300"]["ours"]["mean"] for r in report["rows"])
    yield f"tensor parallel {tp:.2f} and DP attention {dp:.2f}, both with the built-in backend's outputs"
    yield f"DP attention on fp8 KV {fp8:.2f}, where the built-in server ends"


@rule("e2e_two_gpus_0_5_23")
def padded_rounds_on_two_gpus(report: dict) -> Iterator[str]:
    assert all(d["tie"] for d in report["differences"])
    assert [(f["backend"], "num_splits must have shape" in f["log"]) for f in report["failures"]] == [("builtin", True)]
    ours = [cell["ours"]["mean"] for row in report["rows"] for cell in row["workloads"].values()]
    yield f"without graphs and above the captured sizes, {spread(ours)} of 4, on bfloat16 and on fp8 KV"


@rule("e2e_more_0_5_23")
def debug_mode_fails_with_either_backend(report: dict) -> Iterator[str]:
    failures = [(f["case"], f["backend"], "get_page_table_64" in f["log"]) for f in report["failures"]]
    assert failures == [("n3 debug CUDA graphs", side, True) for side in ("ours", "builtin")]
    assert all(d["tie"] for d in report["differences"])
    yield "SGLang 0.5.23 fails in this mode with its own backend as with this one"


def judged(*reports: dict) -> tuple[list[dict], list[float]]:
    """(rows of these reports, gaps at every rejection in them); all of their requests were judged."""
    rows = [row for report in reports for row in report["rows"]]
    assert sum(r["requests_whose_stream_joined_rounds"] for r in rows) == 0
    return rows, [gap for r in rows for gap in r["gaps"]]


@rule("rejections", "e2e")
def rejected_drafts(report: dict, e2e: dict) -> Iterator[str]:
    rows, gaps = judged(report)
    assert max(gaps) < report["tie"]
    yield f"at each of {len(gaps)} that were looked at, the target's two best tokens are at most {max(gaps)} apart"
    close = sum(r["ties_among_positions"] for r in rows) / sum(r["positions"] for r in rows)
    yield f"at most {max(gaps)} apart at each of the {len(gaps)} rejections, where {100 * close:.0f} % of all"
    rates = []
    for steps in (2, 3, 5, 8):
        histograms = one(e2e["rows"], case=f"n{steps} fa3")["workloads"]["8x300"]["ours"]["histograms"]
        rejected = sum(sum(h[:steps]) for h in histograms)
        accepted = sum(drafts * count for h in histograms for drafts, count in enumerate(h))
        rates.append(f"{100 * rejected / (rejected + accepted):.1f}")
    yield "rejects {}, {}, {} and {} % of the drafts it comes to judge".format(*rates)
    eight = one(e2e["rows"], case="n8 fa3")["workloads"]
    everyone = [accept for cell in eight.values() for accept in cell["ours"]["requests"]]
    yield (
        f"alone reach {eight['8x300']['ours']['mean']:.2f} of 9, all {len(everyone)} requests "
        f"of that case {sum(everyone) / len(everyone):.2f}."
    )


@rule("rejections_fp8", "rejections_0_5_17", "rejections")
def rejected_drafts_on_fp8_and_long_contexts(fp8: dict, second: dict, first: dict) -> Iterator[str]:
    _, gaps = judged(fp8, second)
    assert max(gaps) < first["tie"]
    yield f"at each of {len(gaps)} more, at most {max(gaps)}"
    yield f"{len(gaps)} of them, on fp8 KV and on bfloat16, of 300 and of 3000 tokens"
    yield f"at most {max(gaps)} apart ("
