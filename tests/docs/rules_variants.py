"""What the text must say of kernels that were measured and are not served."""

from collections.abc import Iterator

from quoted import rule, spread

HEADS, ROWS = (8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64)
SERVED, OTHERS = "triton, served", ("fa3", "flashmla_sparse")
HEADS_A_BLOCK = {"h16": 16, "h32": 32, "wgmma": 64, "h64": 64}
TOKEN_BYTES, TOPK = 1152, 2048


def variants(row: dict) -> dict[str, float]:
    return {name: us for name, us in row["us"].items() if name not in (SERVED, "triton", *OTHERS)}


def best_other(row: dict) -> str:
    return min(OTHERS, key=row["us"].get)


def less(row: dict) -> float:
    """Percent of the served kernel's time that the best variant spares."""
    return 100 * (1 - row["us"][row["best"]] / row["us"][SERVED])


def clusters_over_others(row: dict) -> float:
    """The best variant with clusters over the best without."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for name, us in variants(row).items():
        times[name.split()[-1] in ("c2", "c4", "c8", "c16")].append(us)
    return min(times[True]) / min(times[False])


@rule("sparse_decode_cuda_0_5_23")
def sparse_decode_in_cuda(report: dict) -> Iterator[str]:
    rows = report["rows"]
    at = {(row["heads"], row["rows"]): row for row in rows}
    assert all(row["best"] == min(variants(row), key=variants(row).get) for row in rows)
    assert len(rows) + len(report["not_measured"]) == len(HEADS) * len(ROWS)
    for heads in HEADS:
        cells = []
        for n in ROWS:
            if any(text.startswith(f"{heads} heads, {n} rows:") for text in report["not_measured"]):
                cells.append("-")
                continue
            row = at[heads, n]
            assert best_other(row) == "fa3"
            times = (row["us"][SERVED], row["us"][row["best"]], row["us"]["fa3"])
            cells.append("{:.1f} / {:.1f} {} / {:.1f}".format(*times[:2], row["best"], times[2]))
        yield f"| {heads} | " + " | ".join(cells) + " |"
    assert not report["wrong"]
    worst = 100 * max(report["relative_error"].values())
    fitting = f"of {report['shapes']} shapes in each that they fit"
    yield f"{len(report['relative_error'])} variants are right, {fitting}, with relative errors of at most {worst:.1f} %"
    yield from what_it_gains(rows)
    yield from what_bounds_it(rows)


def what_it_gains(rows: list[dict]) -> Iterator[str]:
    many = [less(row) for row in rows if row["heads"] >= 32 and 4 <= row["rows"] <= 16]
    few = [less(row) for row in rows if row["heads"] <= 16 or row["rows"] <= 2]
    yield f"takes {spread(many, '{:.0f}')} % less than the served kernel with 32 to 128 heads at 4 to 16 rows"
    yield f"{spread(few, '{:.0f}')} % less with fewer heads or rows"
    most = [less(row) for row in rows if row["heads"] in (32, 64) and row["rows"] >= 32]
    yield f"{spread(most, '{:.0f}')} % less with 32 and 64 heads at 32 and 64 rows"
    served = max(row["us"][SERVED] - row["us"]["triton"] for row in rows)
    yield f"Triton's bare kernel takes at most {served:.1f} us less than served"
    own = max(row["us"][row["own"]] / row["us"][row["best"]] - 1 for row in rows)
    yield f"the tile that the launcher chooses takes up to {100 * own:.0f} % more"
    lost = {(row["heads"], row["rows"]): row["us"][row["best"]] / row["us"]["fa3"] for row in rows}
    lost = {key: ratio for key, ratio in sorted(lost.items()) if ratio > 1}
    cells = [f"{ratio:.2f} with {heads} heads at {n}" for (heads, n), ratio in lost.items()]
    yield "it loses to fa3, of whose time it takes " + ", ".join(cells[:-1]) + f" and {cells[-1]} rows"
    assert all(row["us"]["fa3"] < row["us"][SERVED] for row in rows if (row["heads"], row["rows"]) in lost)


def what_bounds_it(rows: list[dict]) -> Iterator[str]:
    fixed: dict[int, list[float]] = {16: [], 32: [], 64: []}
    for row in rows:
        fixed[HEADS_A_BLOCK[row["best"].split()[0]]].append(row["of_best"]["no tokens"])
    by_heads = [f"{spread(us, '{:.1f}')} us with {heads}" for heads, us in fixed.items()]
    yield "both launches on rows without a token take " + f"{by_heads[0]} heads a block, {by_heads[1]} and {by_heads[2]}"
    alone = {row["heads"]: row["of_best"]["attend alone"] for row in rows if row["rows"] == 64}
    speeds = [64 * TOPK * TOKEN_BYTES / alone[heads] / 1e6 for heads in (8, 16)]
    share = 100 * max(speeds) / 4.3
    yield f"random rows of 1152 bytes come at {max(speeds):.1f} TB/s at most (64 rows of 8 heads), {share:.0f} % of 4.3"
    over = {(row["heads"], row["rows"]): clusters_over_others(row) for row in rows}
    won = [key for key, ratio in over.items() if ratio < 1]
    assert sorted(won) == [(16, 64), (64, 64)]
    lost = [100 * (ratio - 1) for ratio in over.values() if ratio > 1]
    yield f"lose {spread(lost, '{:.0f}')} % to a second launch that depends on the first"
    gained = [100 * (1 - over[key]) for key in won]
    yield f"gain {spread(gained, '{:.0f}')} % only where pairs leave nothing to join (16 and 64 heads at 64 rows)"
