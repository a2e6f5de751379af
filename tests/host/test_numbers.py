"""Every measured number in README and docs is in the result file that the text names."""

import re
import sys
from pathlib import Path

import pytest
from quoted import DOCS, DOCS_TEXT, README, README_TEXT, one, result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import soak_judge

KV = ("bf16", "fp8")


@pytest.mark.parametrize(
    ("label", "wanted"),
    [
        ("draft decode, 4 steps, 1 x 4K", {"mode": "draft_decode", "steps": 4, "bs": 1}),
        ("draft decode, 4 steps, 64 x 64K", {"mode": "draft_decode", "steps": 4, "bs": 64}),
        ("draft decode, 8 steps, 64 x 64K", {"mode": "draft_decode", "steps": 8, "bs": 64}),
        ("target_verify, D = 4, 64 x 64K", {"mode": "target_verify", "bs": 64}),
        ("draft_extend, D = 4, 64 x 64K", {"mode": "draft_extend", "bs": 64}),
    ],
)
def test_metadata_times(label, wanted):
    row = one(result("metadata")["rows"], **wanted)
    ours = row["ours"]
    cells = [f"{ours['gpu_us']:.1f} / {ours['cpu_us']:.1f}", f"{row['floor_us']:.1f}"]
    for generation in ("builtin", "builtin_precompute", "builtin_per_step"):
        side = row.get(generation)
        cells.append(f"{side['gpu_us']:.1f} / {side['cpu_us']:.0f}" if side else "-")
    assert f"| {label} | " + " | ".join(cells) + " |" in README


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_rounds(batch):
    row = one(result("draft")["rows"], batch=batch)
    sides = (row["ours"], row["builtin"])
    cells = [f"{side['round_ms']:.2f}" for side in sides] + [f"{side['outside_graphs_ms']:.2f}" for side in sides]
    cells += [f"{side['profile']['launch_calls']:.0f}" for side in sides]
    assert f"| {batch} | " + " | ".join(cells) + " |" in README


def test_serving():
    """Every checkpoint, N and batch was measured, stands in the README, and nothing else does."""
    report = result("serve")
    rows = report["rows"]
    assert report["not_measured"] == []
    assert len(rows) == 24
    for checkpoint, steps in dict.fromkeys((r["checkpoint"], r["steps"]) for r in rows):
        found = {r["batch"]: r for r in rows if (r["checkpoint"], r["steps"]) == (checkpoint, steps)}
        rates = [[found[batch][b]["tokens_per_s"]["median"] for b in ("ours", "builtin")] for batch in (1, 8, 32)]
        accept = [found[8][b]["accept"] for b in ("ours", "builtin")]
        cells = [f"{ours:.0f} / {builtin:.0f}" for ours, builtin in rates]
        assert f"| {checkpoint} | {steps} | " + " | ".join(cells) + f" | {accept[0]:.2f} / {accept[1]:.2f} |" in README
    assert len(re.findall(r"^\| (?:faithful|wide) \|", README, re.MULTILINE)) == 8


@pytest.mark.parametrize("rows", [1, 8, 32, 128, 512])
def test_attention_times(rows):
    found = {r["kv"]: r for r in result("attention")["decode"] if r["heads"] == 128 and r["rows"] == rows}
    bf16, fp8 = found["bf16"], found["fp8"]
    cells = [bf16["us"]["fa3"], bf16["us"]["flashmla_sparse"], fp8["us"]["flashmla_kv"], bf16["floor_us"]]
    assert f"| {rows} | " + " | ".join(f"{c:.1f}" for c in cells) + " |" in README


def test_attention_in_sentences():
    report = result("attention")
    errors = {kv: max(e for r in report["decode"] if r["kv"] == kv for e in r.get("relative_error", {}).values()) for kv in KV}
    assert f"at most {100 * errors['bf16']:.2f} % on bfloat16 KV and {100 * errors['fp8']:.2f} % on fp8" in README_TEXT
    cost = {"fa3": [], "flashmla": []}
    builtin_over_ours = {16: [], 64: [], 128: []}
    for row in report["wrapper"]:
        us = row["us"]
        cost[row["implementation"].split("_")[0]].append((us["ours"] - us["bare"], us["ours"] / us["bare"] - 1))
        builtin_over_ours[row["heads"]].append(us["builtin"] / us["ours"] - 1)
    assert f"costs at most {max(c for c, _ in cost['fa3']):.1f} us" in README_TEXT
    least, most = (f(c for c, _ in cost["flashmla"]) for f in (min, max))
    least_share, most_share = (100 * f(share for _, share in cost["flashmla"]) for f in (min, max))
    assert f"costs {least:.1f} to {most:.1f} us, {least_share:.0f} to {most_share:.0f} %" in README_TEXT
    many = [100 * x for heads in (64, 128) for x in builtin_over_ours[heads]]
    assert f"takes {min(many):.0f} to {max(many):.0f} % more than ours with 64 and 128 heads" in README_TEXT
    assert f"up to {100 * max(builtin_over_ours[16]):.0f} % more with 16" in README_TEXT
    for heads, rows, share in ((64, 68, "0.74"), (128, 57, "0.77")):
        (found,) = [r for r in report["by_rows"] if r["heads"] == heads]
        fa3, flashmla = (sum(one[n][rows - 1] for one in found["passes"]) for n in ("fa3", "flashmla_sparse"))
        assert f"{flashmla / fa3:.2f}" == share
        assert f"{share} of FA3's time at {rows} rows" in README_TEXT or f"{share} at {rows}" in README_TEXT


def test_soak_runs():
    runs = [result("soak_large_chunks"), result("soak")]
    for label, cell in (
        ("load, minutes", lambda r: str(r["load_minutes"])),
        ("requests finished / aborted / closed / failed", lambda r: " / ".join(map(str, r["requests"].values()))),
        ("retracted", lambda r: str(r["retracted"]["in_log"])),
        ("accept length, all", lambda r: f"{r['accept_length']:.3f}"),
        ("lines in the log that tell of errors", lambda r: str(r["suspect_lines"]["count"])),
        ("ways in which an output left its calm reference, all at ties", lambda r: str(r["differences"]["at_ties"])),
        ("GPU memory during the load, growth after warm-up", lambda r: f"+{r['growth']['gpu_mib']} MiB"),
    ):
        assert f"| {label} | {cell(runs[0])} | {cell(runs[1])} |" in DOCS, label
    assert all(r["differences"]["ways"] == r["differences"]["at_ties"] for r in runs)
    held = runs[1]["held"]
    assert f"after it and a flush, MiB | not taken | {held['before_mib']} / {held['after_mib']} |" in DOCS
    assert held["after_mib"] - held["before_mib"] <= soak_judge.HELD_MIB
    assert runs[1]["growth"]["gpu_mib"] <= soak_judge.GROWTH_MIB["gpu_mib"]


def test_serving_in_sentences():
    rows = result("serve")["rows"]
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
        assert words.format(min(found), max(found)) in README_TEXT


def test_metadata_on_the_second_generation():
    measured = result("metadata_0_5_17")["rows"]
    for row in measured:
        if (row["bs"], row["length"]) in ((1, 4096), (64, 65536)):
            ours, theirs = row["ours"], row["builtin"]
            cells = [f"{ours['gpu_us']:.1f} / {ours['cpu_us']:.1f}", f"{row['floor_us']:.1f}"]
            cells.append(f"{theirs['gpu_us']:.1f} / {theirs['cpu_us']:.0f}")
            assert f" | {' | '.join(cells)} |" in README
    draft = [r for r in measured if r["mode"] == "draft_decode"]
    cpu, gpu = ([r["builtin"][key] / r["ours"][key] for r in draft] for key in ("cpu_us", "gpu_us"))
    assert min(cpu) >= 10
    assert (
        f"takes {min(cpu):.0f} times less CPU time or better, and {min(gpu):.2f} to {max(gpu):.1f} times less on the GPU"
        in README_TEXT
    )


def test_numbers_in_sentences():
    rounds, memory = one(result("draft")["rows"], batch=1), result("memory")["bytes"]
    accept = one(result("e2e")["rows"], case="n3 fa3")["workloads"]["8x300"]
    assert f"rises from {accept['builtin']['mean']:.2f} to {accept['ours']['mean']:.2f} of 4" in README_TEXT
    assert f"{rounds['ours']['round_ms']:.1f} ms instead of {rounds['builtin']['round_ms']:.1f}" in README_TEXT
    assert f"{memory['ours'] / 2**20:.1f} MiB, built-in {memory['builtin'] / 2**20:.1f} MiB" in README_TEXT
    differences = result("e2e")["differences"]
    assert f"{len(differences)} requests part from the built-in backend's" in README_TEXT
    assert all(d["tie"] and max(d["below_best"].values()) <= 0.016 for d in differences)
    ratios = [r["ours"]["gpu_us"] / r["floor_us"] for r in result("metadata")["rows"]]
    assert f"{min(ratios):.1f} to {max(ratios):.2f} times the floor" in DOCS_TEXT
    assert (
        f"{rounds['ours']['round_ms']:.2f} ms, of which kernels take {rounds['ours']['profile']['kernel_us'] / 1e3:.2f}" in DOCS
    )
