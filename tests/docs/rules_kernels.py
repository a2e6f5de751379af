"""What the text must say of metadata launches and of attention kernels."""

import statistics
from collections.abc import Iterator

from quoted import files, one, rule, spread

from nsa_backend.attention import auto

KV = {"bf16": "bfloat16 KV", "fp8": "fp8 KV"}
HEADS = (8, 16, 32, 64, 128)
OLDER = {"builtin": "fused copies", "builtin_precompute": "computed once", "builtin_per_step": "every step by itself"}


def every_shape(report: dict) -> list[dict]:
    """All rows that were measured: those of the tables, and those that only a figure shows."""
    return report["rows"] + report.get("growth", [])


def ratios(rows: list[dict], key: str, side: str = "builtin") -> list[float]:
    return [row[side][key] / row["ours"][key] for row in rows if side in row]


def every_launch_of(name: str) -> None:
    """The rule that each metadata file has: a row of docs/numbers/metadata.md for each mode, over all shapes of the file."""

    @rule(name)
    def says(report: dict) -> Iterator[str]:
        rows = every_shape(report)
        for mode in dict.fromkeys(row["mode"] for row in rows):
            found = [row for row in rows if row["mode"] == mode]
            gpu, cpu = ([row["ours"][key] for row in found] for key in ("gpu_us", "cpu_us"))
            copies = [row["ours"]["gpu_us"] / row["floor_us"] for row in found]
            less = [spread(ratios(found, key), "{:.1f}") for key in ("gpu_us", "cpu_us")]
            cells = [str(len(found)), spread(gpu, "{:.1f}"), spread(cpu, "{:.1f}"), spread(copies), *less]
            yield f"| `benchmarks/results/{name}_h200.json` | {mode} | " + " | ".join(cells) + " |"


for each in files("metadata*"):
    if each != "metadata_launch_0_5_23":  # the launch alone, by its tuning script
        every_launch_of(each)


@rule("metadata")
def metadata_times(report: dict) -> Iterator[str]:
    for label, wanted in (
        ("draft decode, 4 steps, 1 x 4K", {"mode": "draft_decode", "steps": 4, "bs": 1}),
        ("draft decode, 4 steps, 64 x 64K", {"mode": "draft_decode", "steps": 4, "bs": 64}),
        ("draft decode, 8 steps, 64 x 64K", {"mode": "draft_decode", "steps": 8, "bs": 64}),
        ("target_verify, D = 4, 64 x 64K", {"mode": "target_verify", "bs": 64}),
        ("draft_extend, D = 4, 64 x 64K", {"mode": "draft_extend", "bs": 64}),
    ):
        row = one(report["rows"], **wanted)
        ours = row["ours"]
        cells = [f"{ours['gpu_us']:.1f} / {ours['cpu_us']:.1f}", f"{row['floor_us']:.1f}"]
        for generation in OLDER:
            side = row.get(generation)
            cells.append(f"{side['gpu_us']:.1f} / {side['cpu_us']:.0f}" if side else "-")
        yield f"| {label} | " + " | ".join(cells) + " |"
    rows = every_shape(report)
    single = [row["ours"]["gpu_us"] for row in rows if row["bs"] == 1]
    over = [row["ours"]["gpu_us"] / row["floor_us"] for row in rows]
    yield f"takes {spread(single, '{:.1f}')} us for one request, and {spread(over)} times what a plain copy"
    yield f"twice the launch was {100 * (1 - min(over)):.0f} % faster"
    assert sum(ratio < 1 for ratio in over) == 2
    worst = max(rows, key=lambda row: row["ours"]["gpu_us"] / row["floor_us"])
    yield f"{max(over):.2f} is {worst['mode']} of {worst['bs']} requests of {worst['length'] // 1024}K tokens"


@rule("metadata_0_5_17")
def metadata_on_the_second_generation(report: dict) -> Iterator[str]:
    for row in report["rows"]:
        if (row["bs"], row["length"]) in ((1, 4096), (64, 65536)):
            ours, theirs = row["ours"], row["builtin"]
            cells = [f"{ours['gpu_us']:.1f} / {ours['cpu_us']:.1f}", f"{row['floor_us']:.1f}"]
            cells.append(f"{theirs['gpu_us']:.1f} / {theirs['cpu_us']:.0f}")
            yield f" | {' | '.join(cells)} |"
    cpu, gpu = (ratios(every_shape(report), key) for key in ("cpu_us", "gpu_us"))
    yield (
        f"takes {min(cpu):.0f} to {max(cpu):.0f} times less CPU time, "
        f"and {min(gpu):.2f} to {max(gpu):.1f} times less on the GPU"
    )


@rule("attention")
def attention_times(report: dict) -> Iterator[str]:
    for rows in (1, 8, 32, 128, 512):
        found = {r["kv"]: r for r in report["decode"] if r["heads"] == 128 and r["rows"] == rows}
        bf16, fp8 = found["bf16"], found["fp8"]
        cells = [bf16["us"]["fa3"], bf16["us"]["flashmla_sparse"], fp8["us"]["flashmla_kv"], bf16["floor_us"]]
        yield f"| {rows} | " + " | ".join(f"{c:.1f}" for c in cells) + " |"
    assert all(time > row["floor_us"] for row in report["decode"] for time in row["us"].values())  # it is a floor
    errors = {kv: max(e for r in report["decode"] if r["kv"] == kv for e in r.get("relative_error", {}).values()) for kv in KV}
    yield f"at most {100 * errors['bf16']:.2f} % on bfloat16 KV and {100 * errors['fp8']:.2f} % on fp8"
    for heads, rows, words in ((64, 68, "takes {:.2f} of FA3's time at 68 rows"), (128, 57, "with 128 heads {:.2f} at 57")):
        (found,) = [r for r in report["by_rows"] if r["heads"] == heads]
        fa3, flashmla = (sum(one[n][rows - 1] for one in found["passes"]) for n in ("fa3", "flashmla_sparse"))
        yield words.format(flashmla / fa3)


@rule("attention")
def what_our_calls_cost(report: dict) -> Iterator[str]:
    cost = {"fa3": [], "flashmla": []}
    builtin_over_ours = {16: [], 64: [], 128: []}
    for row in report["wrapper"]:
        us = row["us"]
        cost[row["implementation"].split("_")[0]].append((us["ours"] - us["bare"], us["ours"] / us["bare"] - 1))
        builtin_over_ours[row["heads"]].append(100 * (us["builtin"] / us["ours"] - 1))
    yield f"costs at most {max(c for c, _ in cost['fa3']):.1f} us"
    us, share = [c for c, _ in cost["flashmla"]], [100 * share for _, share in cost["flashmla"]]
    yield f"costs {spread(us, '{:.1f}')} us, {spread(share, '{:.0f}')} %"
    many = builtin_over_ours[64] + builtin_over_ours[128]
    yield f"takes {spread(many, '{:.0f}')} % more than ours with 64 and 128 heads"
    yield f"up to {max(builtin_over_ours[16]):.0f} % more with 16"


@rule("auto_0_5_23", "attention_decode_0_5_23")
def the_choice_by_rows(made: dict, other: dict) -> Iterator[str]:
    """What the table of NSA_BACKEND_AUTO_DECODE chooses, and what it loses to the fastest, here and on another GPU."""

    def loss(kv: str, heads: int, rows: int, times: dict[str, float]) -> float:
        return 100 * (times[auto.choose(auto.intervals("NVIDIA H200", kv, heads), rows)] / min(times.values()) - 1)

    losses = []
    for found in made["by_rows"]:
        for i, rows in enumerate(found["rows"]):
            times = {name: statistics.fmean(one[name][i] for one in found["passes"]) for name in auto.CANDIDATES[found["kv"]]}
            losses.append(loss(found["kv"], found["heads"], rows, times))
    yield f"loses at most {max(losses):.1f} % to the fastest at any of {len(made['by_rows'][0]['rows'])} row counts"
    elsewhere = [loss(r["kv"], r["heads"], r["rows"], r["us"]) for r in other["decode"]]
    yield f"at most {max(elsewhere):.1f} % on another GPU in the same hour"
    for kv in auto.CANDIDATES:
        first = {heads: auto.intervals("NVIDIA H200", kv, heads)[0] for heads in (16, 32, 64, 128)}
        assert {name for _, name in first.values()} == {"sparse_decode"}
        yield f"{KV[kv]}: up to " + ", ".join(f"{most} rows with {heads} heads" for heads, (most, _) in first.items())


@rule("attention_decode_0_5_23", "attention_decode_again_0_5_23")
def sparse_decode_beside_the_others(first: dict, newest: dict) -> Iterator[str]:
    """One line for each cache and head count, the cells that lose among them: FP8's from the run with its tiles of today."""
    columns = (1, 2, 4, 8, 16, 32, 64)
    runs = {"bf16": first, "fp8": newest}
    times = {(kv, r["heads"], r["rows"]): r["us"] for kv, report in runs.items() for r in report["decode"] if r["kv"] == kv}
    best = {key: min(t for name, t in us.items() if name != "sparse_decode") for key, us in times.items()}
    over = {key: us["sparse_decode"] / best[key] for key, us in times.items()}
    for kv in auto.CANDIDATES:
        for heads in HEADS:
            keys = [(kv, heads, rows) for rows in columns]
            cells = [f"{times[key]['sparse_decode']:.1f} / {best[key]:.1f} = {over[key]:.2f}" for key in keys]
            yield f"| {KV[kv]} | {heads} | " + " | ".join(cells) + " |"
    for kv, names in auto.CANDIDATES.items():
        errors = [
            r["relative_error"]
            for report in (first, newest)
            for r in report["decode"]
            if r["kv"] == kv and "relative_error" in r
        ]
        yield f"{KV[kv]}: " + ", ".join(f"{name} {100 * max(e[name] for e in errors):.2f} %" for name in names)
    single = [over["fp8", heads, 1] for heads in HEADS]
    yield f"at one request in {spread(single)} of flashmla_kv's time"
    bf16, fp8 = times["bf16", 16, 1], times["fp8", 16, 1]
    ours = f"sparse_decode {bf16['sparse_decode']:.1f} us; {fp8['sparse_decode']:.1f} us"
    yield f"{ours} | its kernels: fa3 {bf16['fa3']:.1f} us; flashmla_kv {fp8['flashmla_kv']:.1f} us"
    share = 32 * 2048 * 1152 / times["bf16", 16, 32]["sparse_decode"] / 1e6
    yield f"reads {share:.1f} TB/s at 32 rows and 16 heads, {100 * share / 4.3:.0f} % of 4.3, where 70 % was the aim"


@rule("attention_decode_0_5_23", "attention_decode_again_0_5_23")
def sparse_decode_in_both_runs(first: dict, newest: dict) -> Iterator[str]:
    """How far the runs lie from each other, and where both say that it pays on bfloat16 KV."""
    old, new = ({(r["kv"], r["heads"], r["rows"]): r["us"] for r in report["decode"]} for report in (first, newest))
    assert old.keys() == new.keys()

    def against_fa3(heads: int, rows: int) -> list[float]:
        return [us["bf16", heads, rows]["sparse_decode"] / us["bf16", heads, rows]["fa3"] for us in (old, new)]

    def apart(kv: str, name: str) -> str:
        return spread([new[key][name] / old[key][name] for key in old if key[0] == kv])

    yield f"on bfloat16 KV fa3 {apart('bf16', 'fa3')}, flashmla_sparse {apart('bf16', 'flashmla_sparse')}"
    yield f"and sparse_decode {apart('bf16', 'sparse_decode')}; on FP8 flashmla_kv {apart('fp8', 'flashmla_kv')}"
    yield f"sparse_decode, with the newer tiles, {apart('fp8', 'sparse_decode')}"
    bf16 = {key[1:]: new[key]["sparse_decode"] / old[key]["sparse_decode"] for key in old if key[0] == "bf16"}
    slower = sum(ratio > 1 for ratio in bf16.values())
    most = 100 * (max(bf16.values()) - 1)
    yield f"{slower} of {len(bf16)} cells of ours are slower, by up to {most:.0f} % (4 rows of 16 heads"
    assert max(bf16, key=bf16.get) == (16, 4)
    missed = [against_fa3(heads, 2) for heads in (16, 64)]
    assert all(before <= aim < after for (before, after), aim in zip(missed, (0.55, 0.65), strict=True))
    yield "missed with {:.3f} and {:.3f}".format(*(after for _, after in missed))
    many = {key[1:]: us for key, us in new.items() if key[0] == "fp8" and key[2] >= 64}
    ahead = [key for key, us in many.items() if us["sparse_decode"] < us["flashmla_kv"]]
    assert ahead == [(8, 64), (16, 64)]
    few = [ratio for rows in (1, 2, 4, 8) for ratio in against_fa3(16, rows)]
    yield f"takes {spread(few)} of fa3's time at 1 to 8 rows"
    assert max(ratio for rows in (16, 32) for ratio in against_fa3(16, rows)) <= 1  # no more than fa3's to 32
    yield "{:.2f} and {:.2f} of it at 64".format(*against_fa3(16, 64))
    assert max(against_fa3(64, 8)) <= 1 < min(against_fa3(64, 16))  # with 64 heads it pays to 8 rows
    assert max(against_fa3(128, 4)) <= 1 < min(against_fa3(128, 8))  # with 128 to 4


@rule("attention_decode_again_0_5_23")
def aims_on_fp8(report: dict) -> Iterator[str]:
    """Which head counts meet the aim at each number of rows."""
    over = {
        (r["heads"], r["rows"]): r["us"]["sparse_decode"] / r["us"]["flashmla_kv"] for r in report["decode"] if r["kv"] == "fp8"
    }
    met = {}
    for rows in (1, 2, 4, 8, 16):
        met[rows] = [heads for heads in HEADS if over[heads, rows] <= (0.8 if rows == 16 else 0.55 if heads <= 32 else 0.65)]
    assert met == {1: list(HEADS), 2: [8, 16, 32, 64], 4: [8, 16], 8: [], 16: [8, 16]}
    yield "on FP8 met at 1 row everywhere, at 2 rows but for 128 heads, at 4 and 16 rows of 8 and 16 heads"


@rule("attention_decode_again_0_5_23")
def the_choice_beside_newer_tiles(report: dict) -> Iterator[str]:
    losses = {}
    for r in report["decode"]:
        chosen = auto.choose(auto.intervals("NVIDIA H200", r["kv"], r["heads"]), r["rows"])
        losses[r["kv"], r["heads"], r["rows"]] = 100 * (r["us"][chosen] / min(r["us"].values()) - 1)
    lost = {key: loss for key, loss in losses.items() if loss > 1}
    assert list(lost) == [("fp8", 8, 64), ("fp8", 16, 64)]
    yield "loses {:.0f} and {:.0f} % at 64 rows of 8 and 16 heads on FP8".format(*lost.values())
    yield f"at most {max(loss for key, loss in losses.items() if key not in lost):.1f} % elsewhere"


@rule("sparse_decode_tiles_0_5_23")
def tiles(report: dict) -> Iterator[str]:
    """What the tiles of that commit lost to the fastest of the same cell."""
    for kv in auto.CANDIDATES:
        losses = [r["us"][r["of"][0]] / r["us"][r["best"]] - 1 for r in report["rows"] if r["kv"] == kv]
        yield f"at most {100 * max(losses):.0f} % on {KV[kv]}"
