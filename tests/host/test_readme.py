"""Every measured number in README and docs is in the result file that the text names."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCS = "\n".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))


def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}_h200.json").read_text())


def one(rows: list[dict], **wanted) -> dict:
    (row,) = [r for r in rows if all(r[k] == v for k, v in wanted.items())]
    return row


@pytest.mark.parametrize(
    ("label", "case", "workload"),
    [
        ("fa3, N = 3, 8 requests of 300 to 559 tokens", "n3 fa3", "8x300"),
        ("fa3, N = 3, 4 requests of 3000 to 3111 tokens", "n3 fa3", "4x3000"),
        ("flashmla_sparse, N = 3, the same 8 requests", "n3 flashmla_sparse", "8x300"),
        ("flashmla_kv on fp8 KV, N = 3, the same 8 requests", "n3 fp8, flashmla_kv", "8x300"),
        ("fa3, N = 5, the same 8 requests", "n5 fa3", "8x300"),
    ],
)
def test_accept_lengths(label, case, workload):
    cell = one(result("e2e")["rows"], case=case)["workloads"][workload]
    assert f"| {label} | {cell['ours']['mean']:.2f} | {cell['builtin']['mean']:.2f} |" in README


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
    ours, builtin = row["ours"], row["builtin"]
    cells = [ours["gpu_us"], row["floor_us"], builtin["gpu_us"], ours["cpu_us"]]
    assert f"| {label} | " + " | ".join(f"{c:.1f}" for c in cells) + f" | {builtin['cpu_us']:.0f} |" in README


@pytest.mark.parametrize("batch", [1, 8])
def test_rounds(batch):
    row = one(result("round")["rows"], batch=batch)
    ours, builtin = row["ours"], row["builtin"]
    sides = (ours, builtin)
    cells = [f"{side['round_ms']:.2f}" for side in sides] + [f"{side['tokens_per_s']:.0f}" for side in sides]
    cells += [f"{side['profile']['launch_calls']:.0f}" for side in sides]
    assert f"| {batch} | " + " | ".join(cells) + " |" in README


def test_numbers_in_sentences():
    rounds, memory = one(result("round")["rows"], batch=1), result("memory")["bytes"]
    accept = one(result("e2e")["rows"], case="n3 fa3")["workloads"]["8x300"]
    text = " ".join(README.split())
    assert f"rises from {accept['builtin']['mean']:.2f} to {accept['ours']['mean']:.2f} of 4" in text
    assert f"{rounds['ours']['round_ms']:.1f} ms instead of {rounds['builtin']['round_ms']:.1f}" in text
    assert f"{memory['ours'] / 2**20:.1f} MiB, built-in {memory['builtin'] / 2**20:.1f} MiB" in text
    differences = result("e2e")["differences"]
    assert f"{len(differences)} requests part from the built-in backend's" in text
    assert all(d["tie"] and max(d["below_best"].values()) <= 0.016 for d in differences)
    ratios = [r["ours"]["gpu_us"] / r["floor_us"] for r in result("metadata")["rows"]]
    assert f"{min(ratios):.1f} to {max(ratios):.2f} times the floor" in " ".join(DOCS.split())
    assert (
        f"{rounds['ours']['round_ms']:.2f} ms, of which kernels take {rounds['ours']['profile']['kernel_us'] / 1e3:.2f}" in DOCS
    )


def test_every_result_file_that_is_named_exists_and_says_where_it_ran():
    named = set(re.findall(r"benchmarks/results/(\w+)\.json", README + DOCS))
    assert named
    for name in named:
        environment = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["environment"]
        assert environment["gpu"] == "NVIDIA H200"
        assert environment["packages"]["sglang"] == "0.5.12.post1" or name.startswith("tune")
        assert environment["commit"]
        assert environment["date"]
