"""Every measured accept length and rejection in README and docs is in the result file that the text names."""

import pytest
from quoted import DOCS, DOCS_TEXT, README, README_TEXT, one, result


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


def test_the_grid_of_batches_and_contexts():
    report = result("e2e_grid")
    rows = {r["case"]: r["workloads"] for r in report["rows"]}
    rows["grid flashmla_sparse"] = one(report["rerun"]["rows"], case="grid flashmla_sparse")["workloads"]
    builtin = []
    for case, label in (
        ("grid fa3", "fa3"),
        ("grid flashmla_sparse", "flashmla_sparse"),
        ("grid fp8, flashmla_kv", "flashmla_kv on fp8 KV"),
    ):
        means = [cell["ours"]["mean"] for cell in rows[case].values()]
        builtin += [cell["builtin"]["mean"] for cell in rows[case].values() if "builtin" in cell]
        assert f"{label} {min(means):.2f} to {max(means):.2f}" in README_TEXT
    assert f"the built-in backend has {min(builtin):.2f} to {max(builtin):.2f}" in README_TEXT


def test_several_gpus():
    two = {r["case"]: r["workloads"]["8x300"]["ours"]["mean"] for r in result("e2e_two_gpus")["rows"]}
    tp, dp = two["two GPUs, tensor parallel"], two["two GPUs, DP attention"]
    assert f"tensor parallel {tp:.2f}, DP attention {dp:.2f}" in README_TEXT
    report = result("e2e_four_gpus")
    assert report["problems"] == report["failures"] == []
    assert all(d["tie"] for d in report["differences"])
    tp, dp, fp8 = (r["workloads"]["8x300"]["ours"]["mean"] for r in report["rows"])
    assert (
        f"tensor parallel {tp:.2f}, DP attention 2 of two GPUs each {dp:.2f}, DP attention 4 on fp8 KV {fp8:.2f}; "
        in README_TEXT
    )
    assert f"{len(report['differences'])} outputs part from the built-in backend's" in README_TEXT
    idle = one(report["rows"], case="four GPUs, DP attention 4, fp8")["workloads"]["1x300"]["ours"]["mean"]
    assert f"{idle:.2f} with three of four idle" in DOCS


def rejections(*names: str) -> tuple[list[dict], list[float]]:
    """(rows of these files, gaps at every rejection in them); all of their requests were judged."""
    rows = [row for name in names for row in result(name)["rows"]]
    assert sum(r["requests_whose_stream_joined_rounds"] for r in rows) == 0
    return rows, [gap for r in rows for gap in r["gaps"]]


def test_rejected_drafts():
    rows, gaps = rejections("rejections")
    assert (
        f"at each of {len(gaps)} that were looked at, the target's two best tokens are at most {max(gaps)} apart" in README_TEXT
    )
    close = sum(r["ties_among_positions"] for r in rows) / sum(r["positions"] for r in rows)
    assert f"at most {max(gaps)} apart at each of the {len(gaps)} rejections, where {100 * close:.0f} % of all" in DOCS_TEXT
    rates = []
    for steps in (2, 3, 5, 8):
        histograms = one(result("e2e")["rows"], case=f"n{steps} fa3")["workloads"]["8x300"]["ours"]["histograms"]
        rejected = sum(sum(h[:steps]) for h in histograms)
        accepted = sum(drafts * count for h in histograms for drafts, count in enumerate(h))
        rates.append(f"{100 * rejected / (rejected + accepted):.1f}")
    assert "rejects {}, {}, {} and {} % of the drafts it comes to judge".format(*rates) in DOCS_TEXT
    eight = one(result("e2e")["rows"], case="n8 fa3")["workloads"]
    everyone = [accept for cell in eight.values() for accept in cell["ours"]["requests"]]
    assert f"alone reach {eight['8x300']['ours']['mean']:.2f} of 9, all {len(everyone)} requests" in DOCS_TEXT
    assert f"of that case {sum(everyone) / len(everyone):.2f}." in DOCS_TEXT


def test_rejected_drafts_on_fp8_and_long_contexts():
    _, gaps = rejections("rejections_fp8", "rejections_0_5_17")
    assert max(gaps) < result("rejections")["tie"]
    assert f"at each of {len(gaps)} more, at most {max(gaps)}" in README_TEXT
    assert f"{len(gaps)} of them, on fp8 KV and on bfloat16, of 300 and of 3000 tokens" in DOCS_TEXT
    assert f"at most {max(gaps)} apart (" in DOCS_TEXT
    single = one(result("e2e_0_5_17")["rows"], case="n1 fp8, flashmla_kv")["workloads"]
    (ours, theirs), (short, short_theirs) = (
        [sum(h[0] for h in single[workload][side]["histograms"]) for side in ("ours", "builtin")]
        for workload in ("8x3000", "8x300")
    )
    requests = len(single["8x3000"]["ours"]["requests"])
    assert f"{requests} requests of 3000 tokens lose {ours} drafts of ours and {theirs} of the built-in's" in DOCS_TEXT
    assert f"8 short ones {short} and {short_theirs} " in DOCS_TEXT
    means = [f"{single['8x3000'][side]['mean']:.2f}" for side in ("ours", "builtin")]
    assert means[0] == means[1]
    assert f"both have {means[0]} of 2 on {requests} requests of 3000 tokens" in README_TEXT


def test_the_second_generation():
    """SGLang 0.5.17: accept lengths and outputs."""
    report = result("e2e_0_5_17")
    assert report["problems"] == report["failures"] == []
    assert all(d["tie"] for d in report["differences"])
    assert f"Of all outputs, {len(report['differences'])} part from the built-in backend's, each at a tie" in README_TEXT
    rows = {r["case"]: r["workloads"] for r in report["rows"]}
    for cell in rows["batches fa3"].values():
        assert cell["ours"]["mean"] >= 3.9
        assert f" | {cell['ours']['mean']:.2f} | {cell['builtin']['mean']:.2f} |" in README
    five = rows["n5 fa3"]["8x300"]
    assert f"N = 5, 8 requests: {five['ours']['mean']:.2f} against {five['builtin']['mean']:.2f} of 6" in README_TEXT
    fp8 = rows["batches fp8, flashmla_kv"].values()
    ours, theirs = (sorted(cell[side]["mean"] for cell in fp8) for side in ("ours", "builtin"))
    assert f"has {ours[0]:.2f} to {ours[-1]:.2f} against {theirs[0]:.2f} to {theirs[-1]:.2f}" in README_TEXT
    named = ("n3 flashmla_sparse", "n3 without CUDA graphs", "n3 chunked prefill", "n3 fa3 prefill too", "n3 unfused top-k")
    others = [c["ours"]["mean"] for case in named for c in rows[case].values()]
    assert f"stay between {min(others):.2f} and {max(others):.2f}" in README_TEXT
    two = result("e2e_two_gpus_0_5_17")
    assert two["differences"] == []
    tp, fp8, dp = (r["workloads"]["8x300"]["ours"]["mean"] for r in two["rows"])
    assert f"tensor parallel {tp:.2f} and DP attention {dp:.2f}, both with the built-in backend's outputs" in README_TEXT
    assert f"DP attention on fp8 KV {fp8:.2f}, where the built-in server ends" in README_TEXT
