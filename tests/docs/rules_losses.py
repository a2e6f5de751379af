"""What docs/numbers.md, and the page of servers, must say of what ours loses, over all rows of the files named there."""

from collections.abc import Iterator

from quoted import rule
from rules_kernels import KV, every_shape, ratios
from rules_more import behind


@rule("serve_rounds_0_5_23")
def rounds_in_one_graph(report: dict) -> Iterator[str]:
    rows = report["rows"]
    yield f"fewer tokens per second than three graphs: {behind(rows, 'round_graph', 'ours', 'tokens_per_s')}."
    assert behind(rows, "round_graph", "builtin", "tokens_per_s") == ""
    yield f"A round longer than the built-in's: {behind(rows, 'round_graph', 'builtin', 'round_ms')}"


@rule("serve_0_5_23")
def rounds_in_three_graphs(report: dict) -> Iterator[str]:
    drafting = [row for row in report["rows"] if row["steps"]]
    yield f"longer than the built-in's: {behind(drafting, 'ours', 'builtin', 'round_ms')};"
    assert behind(drafting, "ours", "builtin", "tokens_per_s") == ""
    yield f"first token later with drafts: {behind(drafting, 'ours', 'builtin', 'ttft_ms')}"
    without = [row for row in report["rows"] if not row["steps"]]
    yield f"and without: {behind(without, 'ours', 'builtin', 'ttft_ms')}"


@rule("attention_decode_0_5_23", "attention_decode_again_0_5_23")
def many_heads_and_rows(first: dict, newest: dict) -> Iterator[str]:
    """The furthest that sparse_decode is behind, in the runs that the table has for each cache, and of which rows."""
    for kv, report in (("bf16", first), ("fp8", newest)):
        cells = [row for row in report["decode"] if row["kv"] == kv]
        behind_by = {}
        for row in cells:
            best = min(us for name, us in row["us"].items() if name != "sparse_decode")
            behind_by[row["heads"], row["rows"]] = row["us"]["sparse_decode"] / best
        (heads, rows), most = max(behind_by.items(), key=lambda item: item[1])
        yield f"{most:.2f} times the best other's time on {KV[kv]} ({heads} heads, {rows} rows)"


@rule("metadata_0_5_23")
def draft_decode_on_the_gpu(report: dict) -> Iterator[str]:
    rows = every_shape(report)
    slower = [row for row in rows if row["builtin"]["gpu_us"] < row["ours"]["gpu_us"]]
    assert {row["mode"] for row in slower} == {"draft_decode"}
    assert all(row["builtin"]["cpu_us"] > row["ours"]["cpu_us"] for row in rows)
    shapes = [row for row in rows if row["mode"] == "draft_decode"]
    worst = min(slower, key=lambda row: ratios([row], "gpu_us")[0])
    times = [worst[side]["gpu_us"] for side in ("ours", "builtin")]
    words = "longer in {} of {} shapes, at worst {:.1f} us where SGLang's own path takes {:.1f}"
    yield words.format(len(slower), len(shapes), *times)
