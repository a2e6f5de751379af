"""What the text must say of SGLang 0.5.23: serving over prompt lengths, the parts of a forward, memory, and one profile."""

from collections.abc import Iterator

from quoted import medians, one, rule, spread


def pair(row: dict, key: str, form: str) -> str:
    return medians(row, ("ours", "builtin"), key, form)


@rule("serve_0_5_23")
def every_cell(report: dict) -> Iterator[str]:
    """One row a cell, the lost ones too."""
    for row in report["rows"]:
        ratio = row["ratio"]
        yield (
            f"| {row['checkpoint']} | {row['steps']} | {row['batch']} x {row['length']} | "
            f"{pair(row, 'tokens_per_s', '{:.0f}')} | {row['speedup']:.2f} | {pair(row, 'ttft_ms', '{:.1f}')} | "
            f"{ratio['ttft_ms']:.2f} | {pair(row, 'tpot_ms', '{:.2f}')} | {ratio['tpot_ms']:.2f} | {ratio['round_ms']:.2f} | "
            f"{row['ours']['accept']:.2f} / {row['builtin']['accept']:.2f} |"
        )


@rule("serve_0_5_23")
def ranges_of_cells(report: dict) -> Iterator[str]:
    for checkpoint, steps in dict.fromkeys((r["checkpoint"], r["steps"]) for r in report["rows"]):
        rows = [r for r in report["rows"] if (r["checkpoint"], r["steps"]) == (checkpoint, steps)]
        times = [spread([r["ratio"][key] for r in rows]) for key in ("ttft_ms", "tpot_ms", "round_ms")]
        accept = [spread([r[side]["accept"] for r in rows]) for side in ("ours", "builtin")]
        cells = [str(len(rows)), spread([r["speedup"] for r in rows]), *times, *(accept if steps else ("-", "-"))]
        yield f"| {checkpoint} | {steps} | " + " | ".join(cells) + " |"
    short = [one(report["rows"], checkpoint="wide", steps=3, length=300, batch=batch) for batch in (1, 8, 32)]
    yield "serve {:.2f}, {:.2f} and {:.2f} times the tokens per second".format(*(r["speedup"] for r in short))
    alone = one(report["rows"], checkpoint="faithful", steps=3, length=300, batch=1)
    yield "accept length from {:.2f} to {:.2f} of 4".format(*(alone[side]["accept"] for side in ("builtin", "ours")))
    for cell in report["not_measured"]:
        yield f"Not measured: {cell}"


@rule("forward_parts_0_5_23")
def attention_scheduled_once(report: dict) -> Iterator[str]:
    pairs = [("us_12_layers", "us_12_layers_scheduled_once"), ("again", "again_scheduled_once")]
    less = [row[each] - row[once] for row in report["fa3"] for each, once in pairs]
    yield f"twelve calls take {spread(less, '{:.0f}')} us less"
    (one_row,) = [row for row in report["fa3"] if (row["heads"], row["rows"], row["longest"]) == (16, 1, 2048)]
    yield "{:.0f} instead of {:.0f} us for one row of 16 heads".format(
        one_row["us_12_layers_scheduled_once"], one_row["us_12_layers"]
    )


@rule("forward_parts_0_5_23")
def prefill_topk(report: dict) -> Iterator[str]:
    for row in report["prefill_topk"]:
        times = [f"{row[key]:.1f}" for key in ("fused_us", "v2_positions_us", "slots_us")]
        yield f"| {row['rows']} x {row['width']} | " + " | ".join(times) + " |"


@rule("memory_0_5_23")
def replay_buffers(report: dict) -> Iterator[str]:
    (row,) = report["rows"]
    ours, theirs = (f"{row['bytes'][side] / 2**20:.1f}" for side in ("ours", "builtin"))
    yield f"{ours} MiB, built-in {theirs} MiB"


def total(kernels: dict[str, list[float]]) -> float:
    """Microseconds of all kernels."""
    return sum(us for _, us in kernels.values())


@rule("profile_0_5_23", "profile_4096_0_5_23")
def one_decode(short: dict, long: dict) -> Iterator[str]:
    for report, tokens in ((short, 300), (long, 4096)):
        row = one(report["rows"], mode="decode", steps=0)
        sides = [row[side]["forward"] for side in ("ours", "builtin")]
        kernels = [total(side) / 1e3 for side in sides]
        spans = [row[side]["span_us"] / 1e3 for side in ("ours", "builtin")]
        ours, theirs = (f"{sum_of:.2f}{{}} in {span:.2f}" for sum_of, span in zip(kernels, spans, strict=True))
        yield f"{tokens} tokens {ours.format(' ms of kernels')} ms, built-in {theirs.format('')}"
        moe = [side["fused_moe_kernel"][1] for side in sides]
        assert moe[0] < moe[1]
        yield "{:.0f} and {:.0f} us".format(*moe)
    ours, theirs = (one(long["rows"], mode="prefill", steps=0)[side] for side in ("ours", "builtin"))
    prefill = [f"{us / 1e3:.1f}" for side in (ours, theirs) for us in (total(side["forward"]), side["span_us"])]
    yield "{} ms of kernels in {}, built-in {} in {}".format(*prefill)
    between = [total(one(long["rows"], mode="between", steps=0)[side]["kernels"]) for side in ("ours", "builtin")]
    yield "{:.1f} us of kernels outside the graph, built-in {:.1f}".format(*between)
    assert {row["mode"] for row in long["rows"]} == {"decode", "prefill", "between"}
    assert long["not_measured"] == ["wide, N = 0, 8 x 4096"]
    row = one(short["rows"], mode="decode", steps=0)
    sides = [row[side]["forward"] for side in ("ours", "builtin")]
    yield "{} launches against {}".format(*(sum(launches for launches, _ in side.values()) for side in sides))
    schedules = [side["prepare_varlen_num_blocks_kernel"] for side in sides]
    yield "{} of {:.1f} us where the built-in has {} of {:.1f} us".format(*schedules[0], *schedules[1])
