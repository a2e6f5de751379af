"""What the text must say of deployments whose rounds are one graph, and of ranks that share GPUs."""

import statistics
from collections.abc import Iterator

from quoted import one, rule, spread
from rules_deployments import means

DP = "two GPUs, DP attention"


def request_by_request(row: dict, other: dict) -> list[float]:
    """Accept lengths of the one less those of the other, by workload and request."""
    pairs = ((row["workloads"][name]["ours"], other["workloads"][name]["ours"]) for name in row["workloads"])
    return [a - b for one_, two in pairs for a, b in zip(one_["requests"], two["requests"], strict=True)]


def mebibytes(report: dict, prefix: str, of: str = "greedy") -> list[int]:
    """What the captures of these cases took, by the logs."""
    return [c["mib"] for c in report["captures"] if c["case"].startswith(prefix) and c["of"] == of]


@rule("e2e_rounds_deployments_0_5_23")
def pairs_in_one_graph(report: dict) -> Iterator[str]:
    assert report["problems"] == report["failures"] == []
    assert report["not_measured"] == ["two GPUs, expert parallel, one graph a round, ours"]
    found = {}
    for how in ("", ", fp8", ", glm-5.2"):
        row = one(report["rows"], case=f"PD{how}, one graph a round")
        found[how] = row
        sides = [[], []]
        for name, cell in row["workloads"].items():
            sides[name.endswith(", one server")].append(cell["ours"]["mean"])
        assert len(sides[0]) == len(sides[1])
        yield f"{spread(sides[0])} (one server {spread(sides[1])})"
    beside = report["beside_one_server"]
    parted = [(row["workload"], len(row["parted"])) for row in beside if row["parted"]]
    yield f"{sum(number for _, number in parted)} of {sum(row['outputs'] for row in beside)} outputs part from one server's"
    many = sum(number for workload, number in parted if workload in ("32x300", "8x3000"))
    yield f"{many} of these where 32 and 24 requests came at once"
    assert all(len(mebibytes(report, row["case"])) == 2 for row in found.values())
    yield f"{spread(mebibytes(report, 'PD'), '{:.0f}')} MiB a server as they were captured"


@rule("e2e_rounds_deployments_0_5_23")
def ranks_in_one_graph_again(report: dict) -> Iterator[str]:
    head = one(report["rows"], case=f"{DP}, its own LM head, one graph a round")
    assert {"1x300", "8x300", "unequal ranks"} == head["workloads"].keys()
    yield f"with an LM head of its own on each rank {means(head, 'ours')}"
    ranks = [*mebibytes(report, DP), *mebibytes(report, DP, "sampled")]
    yield f"{spread(ranks, '{:.0f}')} MiB a rank"


@rule("e2e_rounds_deployments_0_5_23", "e2e_dp_rounds_0_5_23")
def sampled_in_one_graph_and_in_three(report: dict, before: dict) -> Iterator[str]:
    case = f"{DP}, sampled and greedy, one graph a round"
    single = one(report["rows"], case=case)
    three = one(report["rows"], case=f"{DP}, sampled and greedy, sampled rounds in three graphs")
    greedy = one(report["rows"], case=f"{DP}, its own LM head, one graph a round")
    yield f"{means(single, 'ours')} in one graph and {means(three, 'ours')} in three"
    assert not any(request_by_request(single, one(before["rows"], case=case)))
    for row, other, words in (
        (single, three, "one graph is {:.3f} below three, with a standard error of {:.3f} over {} requests"),
        (single, greedy, "one graph {:.3f} ± {:.3f} below greedy requests on the same {} prompts"),
        (three, greedy, "three graphs {:.3f} ± {:.3f} below these {}"),
    ):
        less = request_by_request(row, other)
        mean, error = -statistics.fmean(less), statistics.stdev(less) / len(less) ** 0.5
        yield words.format(mean, error, len(less))
    less = request_by_request(single, three)
    yield f"{-statistics.fmean(less) / (statistics.stdev(less) / len(less) ** 0.5):.1f} standard errors"


@rule("e2e_shared_ranks_0_5_23")
def four_ranks(report: dict) -> Iterator[str]:
    assert report["problems"] == report["failures"] == []
    assert report["not_measured"] == ["four ranks on two GPUs, DP attention 2, fa3, ours"]
    assert all(row["ranks_per_gpu"] == 2 for row in report["rows"])
    single = one(report["rows"], case="four ranks on two GPUs, DP attention 2, one graph a round")
    fp8 = one(report["rows"], case="four ranks on two GPUs, DP attention 2, fp8, flashmla_kv")
    assert list(single["workloads"]) == list(fp8["workloads"]) == ["8x300", "some unequal ranks"]
    assert sorted(c["rank"] for c in report["captures"]) == ["DP0 TP0", "DP0 TP1", "DP1 TP2", "DP1 TP3"]
    assert {c["case"] for c in report["captures"]} == {single["case"]}
    assert "speculative rounds are three CUDA graphs" in report["notes"]["three graphs"]
    found = [cell["ours"]["mean"] for row in (single, fp8) for cell in row["workloads"].values()]
    yield "in one graph a round on bfloat16 {:.2f} and {:.2f} of 4, and on FP8 KV {:.2f} and {:.2f}".format(*found)
    yield f"rounds took {spread([c['mib'] for c in report['captures']], '{:.0f}')} MiB a rank"
