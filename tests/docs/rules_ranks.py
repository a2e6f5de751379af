"""What the text must say of two GPUs since rounds of DP attention can be one graph, and of what ran beside them."""

from collections.abc import Iterator

from quoted import one, rule
from rules_deployments import means
from rules_more import apart, behind, cells_of_row, over

SIDES = ("ours", "three_graphs", "builtin")


@rule("e2e_dp_rounds_0_5_23")
def ranks_in_one_graph(report: dict) -> Iterator[str]:
    assert report["problems"] == report["not_measured"] == report["failures"] == []
    plain, fp8, sampled = (
        one(report["rows"], case=f"two GPUs, DP attention{how}, one graph a round")
        for how in ("", ", fp8", ", sampled and greedy")
    )
    assert {"1x300", "unequal ranks"} <= plain["workloads"].keys() & fp8["workloads"].keys() & sampled["workloads"].keys()
    yield f"{means(plain, 'ours')} of 4 on bfloat16, {means(fp8, 'ours')} on FP8 KV"
    yield f"sampled and greedy requests in one batch {means(sampled, 'ours')}"
    compared = report["beside_three_graphs"]
    parted = [(row["workload"], len(row["parted"])) for row in compared if row["parted"]]
    assert {workload for workload, _ in parted} == {"4x3000", "unequal ranks"}
    outputs = sum(row["outputs"] for row in compared)
    yield f"{sum(number for _, number in parted)} of {outputs} outputs part from those of three graphs"
    yield f"{sum(number for workload, number in parted if workload == '4x3000')} of these on prompts of 3000 tokens"


@rule("serve_parallel_0_5_23")
def every_cell_in_parallel(report: dict) -> Iterator[str]:
    assert report["environment"]["switches"] == {"NSA_BACKEND_ROUND_GRAPH": "1"}
    assert "after the first cell of tp2" in report["notes"]["cut"]
    for row in report["rows"]:
        assert (row["checkpoint"], row["steps"], row["length"]) == ("faithful", 3, 300)
        memory = " / ".join(f"{max(row[side]['memory_gib']):.2f}" if row[side]["memory_gib"] else "-" for side in SIDES)
        yield f"| {row['parallel']} | {row['batch']} x 300 | {' | '.join(cells_of_row(row, SIDES))} | {memory} |"


@rule("serve_parallel_0_5_23")
def what_ranks_gain(report: dict) -> Iterator[str]:
    ranks = [one(report["rows"], parallel="dp2", batch=batch) for batch in (1, 8, 64)]
    for side, words in (("three_graphs", "three graphs'"), ("builtin", "the built-in's")):
        assert all(apart(row, "ours", side, key) for row in ranks for key in ("tokens_per_s", "round_ms"))
        rates, rounds = ([over(row, "ours", side, key) for row in ranks] for key in ("tokens_per_s", "round_ms"))
        yield "{:.2f} / {:.2f} / {:.2f} times {words} tokens per second".format(*rates, words=words)
        yield "{:.2f} / {:.2f} / {:.2f} of {words} time a round".format(*rounds, words=words)
    late = [row for row in ranks if over(row, "ours", "three_graphs", "ttft_ms") > 1]
    assert [row["batch"] for row in late] == [8, 64]
    assert [row["batch"] for row in late if apart(row, "ours", "three_graphs", "ttft_ms")] == [8]
    yield f"first token later than with three graphs: {behind(ranks, 'ours', 'three_graphs', 'ttft_ms')}"
    assert behind(ranks, "ours", "builtin", "ttft_ms") == ""
    (plain,) = [row for row in report["rows"] if row["parallel"] == "tp2"]
    rates = [over(plain, "ours", side) for side in SIDES[1:]]
    yield "tensor parallel 2, one request: {:.2f} times three graphs' and {:.2f} times the built-in's".format(*rates)
    memory = [max(max(row[side]["memory_gib"]) for row in ranks) for side in SIDES]
    yield "{:.2f} GiB a GPU, three graphs {:.2f}, the built-in {:.2f}".format(*memory)


@rule("e2e_two_gpus_more_0_5_23")
def heads_halves_and_a_pair(report: dict) -> Iterator[str]:
    assert report["problems"] == report["not_measured"] == report["failures"] == []
    assert all(d["tie"] for d in report["differences"])
    heads = {row["decode"]: row for row in report["rows"] if "8 heads each" in row["case"]}
    yield "with 8 heads a GPU fa3 {} of 4 (built-in {}), flashmla_sparse {}, sparse_decode {}, flashmla_kv {}".format(
        means(heads["fa3"], "ours"),
        means(heads["fa3"], "builtin"),
        *(means(heads[name], "ours") for name in ("flashmla_sparse", "sparse_decode", "flashmla_kv")),
    )
    halves = one(report["rows"], case="two GPUs, two-batch overlap")
    yield f"two-batch overlap {means(halves, 'ours')} (built-in {means(halves, 'builtin')})"
    pair = one(report["rows"], case="PD, glm-5.2")
    yield f"PD of GLM-5.2 with a shared selection, five drafts, {means(pair, 'ours')} of 6"
    beside = report["beside_one_server"]
    assert {row["case"] for row in beside} == {pair["case"]}
    parted, outputs = sum(len(row["parted"]) for row in beside), sum(row["outputs"] for row in beside)
    yield f"{parted} of its {outputs} outputs part from one server's, and nobody asked whether at ties"


@rule("e2e_two_batch_overlap_0_5_23")
def halves_for_the_first_time(report: dict) -> Iterator[str]:
    assert report["failures"] == []
    assert all("nobody asked" in problem for problem in report["problems"])
    plain, fp8 = (one(report["rows"], case=f"two GPUs, two-batch overlap{how}") for how in ("", ", fp8"))
    yield f"{means(plain, 'ours')} on bfloat16 (built-in {means(plain, 'builtin')}) and {means(fp8, 'ours')} on FP8 KV"
    yield f"{len(report['differences'])} parted outputs that nobody asked about"


@rule("e2e_default_0_5_23")
def the_default_again(report: dict) -> Iterator[str]:
    assert report["failures"] == []
    assert all("nobody asked" in problem for problem in report["problems"])
    cache, fp8 = (one(report["rows"], case=f"HiCache{how}") for how in ("", ", fp8"))
    for row in (cache, fp8):
        assert all(row["workloads"]["the first prompts again"]["ours"]["host_tokens"])
    yield f"HiCache {means(cache, 'ours')} of 4 (built-in {means(cache, 'builtin')}), on FP8 KV {means(fp8, 'ours')}"
    yield f"{len(report['differences'])} of its outputs part from the built-in's"
    yield f"Time was up for {len(report['not_measured'])} engines"


@rule("e2e_storage_0_5_23")
def what_came_back_from_storage(report: dict) -> Iterator[str]:
    cells = [cell[side] for row in report["rows"] for cell in row["workloads"].values() for side in cell]
    assert not any(tokens for cell in cells for tokens in (*cell["storage_tokens"], *cell["host_tokens"]))
    (failure,) = report["failures"]
    assert failure["case"] == "weights updated from disk, graphs captured again"
    assert "graph.capture_begin(pool=self._pool" in failure["traceback"]
    yield failure["ended"].split("RuntimeError: ")[1].split(" at ")[0]
    assert "use_count > 0" in failure["ended"]
    yield "no token came back from storage on either side"


@rule("e2e_weights_from_disk_0_5_23", "gpu_tests_0_5_23")
def captured_again(report: dict, tests: dict) -> Iterator[str]:
    assert report["problems"] == report["not_measured"] == report["failures"] == []
    (row,) = report["rows"]
    assert row["case"] == "weights updated from disk, graphs captured again"
    for side, words in (("ours", "{} and {} before, {} and {} after"), ("builtin", "the built-in's {} and {}, and {} and {}")):
        found = {name: f"{cell[side]['mean']:.2f}" for name, cell in row["workloads"].items()}
        again = ", after weights were loaded again"
        yield words.format(found["8x300"], found["4x3000"], found["8x300" + again], found["4x3000" + again])
    assert [capture["sizes"] for capture in report["captures"]] == [[1, 2, 4, 8]] * 2
    (parted,) = report["differences"]
    assert parted["tie"]
    yield "one output parts from the built-in's, at a tie"
    last = [run["outcome"] for run in tests["runs"] if run["command"].endswith("gpu tests/gpu/test_round_graph.py")][-1]
    assert "captures_again" in last
    yield f"`tests/gpu/test_round_graph.py` has {last.split(' in ')[0]}"
