"""What the text must say of rounds in one graph, and of other models and deployments on SGLang 0.5.23."""

import re
from collections.abc import Iterator

from quoted import medians, one, rule, spread

SIDES = ("round_graph", "ours", "builtin")


@rule("serve_rounds_0_5_23")
def every_cell(report: dict) -> Iterator[str]:
    for row in report["rows"]:
        over, accept = row["round_graph_over_ours"], " / ".join(f"{row[side]['accept']:.2f}" for side in SIDES)
        rates, rounds = (medians(row, SIDES, *what, " | ") for what in (("tokens_per_s", "{:.0f}"), ("round_ms", "{:.2f}")))
        yield (
            f"| {row['checkpoint']} | {row['steps']} | {row['batch']} x {row['length']} | {rates} | {over['speedup']:.3f} | "
            f"{rounds} | {over['ratio']['round_ms']:.3f} | {accept} |"
        )


@rule("serve_rounds_0_5_23")
def targets(report: dict) -> Iterator[str]:
    def gains(checkpoint: str, length: int, batches: tuple[int, ...]) -> list[float]:
        rows = [r for r in report["rows"] if (r["checkpoint"], r["steps"], r["length"]) == (checkpoint, 3, length)]
        return [one(rows, batch=batch)["round_graph_over_ours"]["speedup"] for batch in batches]

    yield "{:.2f}, {:.2f} and {:.2f} times this package without it".format(*gains("faithful", 300, (1, 8, 32)))
    yield "{:.3f} and {:.3f} at batch 1 and 8".format(*gains("wide", 300, (1, 8)))
    level = [*gains("wide", 300, (32,)), *gains("wide", 4096, (1, 8, 32))]
    yield f"{spread(level, '{:.3f}')} elsewhere"
    single = one(report["rows"], checkpoint="wide", steps=1)["round_graph_over_ours"]["speedup"]
    yield f"{single:.3f} with one draft"


@rule("serve_rounds_0_5_23")
def where_something_is_lost(report: dict) -> Iterator[str]:
    """Time to first token, and the rounds that take longer than the built-in's."""
    rows = report["rows"]
    graph = spread([r["round_graph_over_ours"]["ratio"]["ttft_ms"] for r in rows])
    plain = spread([r["ratio"]["ttft_ms"] for r in rows])
    yield f"Time to first token is {graph} times that without it, which is {plain} times the built-in's"
    longer = [r for r in rows if r["ratio"]["round_ms"] > 1]
    cells = " and ".join(f"{r['batch']} x {r['length']} ({r['ratio']['round_ms']:.2f})" for r in longer)
    assert {r["checkpoint"] for r in longer} == {"wide"}
    yield f"Without it a round of `wide` takes longer than the built-in's at {cells}"
    slower = [r for r in rows if r["round_graph"]["round_ms"]["median"] > r["builtin"]["round_ms"]["median"]]
    yield "with it at {}".format(" and ".join(f"{r['batch']} x {r['length']}" for r in slower))


@rule("draft_rounds_0_5_23")
def a_round(report: dict) -> Iterator[str]:
    (row,) = report["rows"]
    graph, ours, builtin = (row[side] for side in SIDES)
    yield f"takes {graph['round_ms']:.2f} ms instead of {ours['round_ms']:.2f}, built-in {builtin['round_ms']:.2f}"
    yield f"kernels add up to {graph['profile']['kernel_us'] / 1e3:.2f} ms"
    (whole,) = [g for g in graph["profile"]["graphs"] if g["replays"] > 0.5]
    yield f"one graph of {whole['nodes']} nodes that spans {whole['span_us'] / 1e3:.2f} ms"
    parts = [g for g in ours["profile"]["graphs"] if g["replays"] > 0.5]
    yield f"three that span {sum(g['span_us'] for g in parts) / 1e3:.2f} ms"
    launches = [side["profile"]["launch_calls"] for side in (graph, ours, builtin)]
    yield "{:.0f} kernel launches outside graphs for every round, against {:.0f} and {:.0f}".format(*launches)
    assert report["not_measured"]


@rule("e2e_rounds_0_5_23")
def captures(report: dict) -> Iterator[str]:
    assert report["problems"] == report["failures"] == report["not_measured"] == []
    assert all(d["tie"] for d in report["differences"])
    seconds = [capture["seconds"] for capture in report["captures"]]
    *most, worst = sorted(capture["mib"] for capture in report["captures"])
    yield f"captured in {spread(seconds, '{:.1f}')} s"
    yield f"with {most[0]} to {most[-1]} MiB less of the GPU free afterwards in {len(most)} cases, and {worst} MiB in one"


@rule("e2e_deployments_0_5_23")
def on_one_gpu(report: dict) -> Iterator[str]:
    assert all(d["tie"] for d in report["differences"])
    asked = {(f["case"], f["backend"]) for f in report["failures"]}
    assert asked == {(case, side) for case in ("weights updated", "EAGLE3, dense draft") for side in ("ours", "builtin")}
    cells = one(report["rows"], case="HiCache")["workloads"]
    before, after = cells["prompts"], cells["the first prompts again"]
    assert all(tokens > 0 for tokens in after["ours"]["host_tokens"])
    for side, words in (("ours", "ours"), ("builtin", "the built-in's")):
        yield f"{words} {before[side]['mean']:.2f} before and {after[side]['mean']:.2f} after a load-back"
    (missed,) = report["problems"]
    heads = one(report["rows"], case="8 heads, fa3")["workloads"]["8x300"]["ours"]["mean"]
    assert missed.startswith(f"8 heads, fa3, 8x300: mean accept length {heads:.3f} <")
    yield f"8 requests of 300 tokens had {heads:.3f} with 8 heads"
    chosen = one(report["rows"], case="adaptive n3 fa3")["workloads"]["1x300"]
    yield f"one request {chosen['ours']['mean']:.2f} where the built-in has {chosen['builtin']['mean']:.2f}"


@rule("e2e_deployments_two_gpus_0_5_23")
def on_two_gpus(report: dict) -> Iterator[str]:
    assert all(d["tie"] for d in report["differences"])
    assert report["failures"] == []
    rows = {row["case"]: row["workloads"] for row in report["rows"]}
    pair = [cell["ours"]["mean"] for name, cell in rows["PD"].items() if "one server" not in name]
    alone = [cell["ours"]["mean"] for name, cell in rows["PD"].items() if "one server" in name]
    yield f"PD {spread(pair)} of 4, one server {spread(alone)}"
    drafts = rows["two GPUs, pipeline parallel with drafts"]
    found = [cell["ours"]["mean"] for cell in drafts.values()]
    yield f"pipeline parallel {spread(found)}"
    (missed,) = report["problems"]
    assert missed.startswith("two GPUs, pipeline parallel with drafts, 8x300")
    # Every request, of either side, has a round that accepts nothing.
    assert all(h[0] > 0 for cell in drafts.values() for side in cell.values() for h in side["histograms"])


@rule("e2e_models_0_5_23")
def other_models(report: dict) -> Iterator[str]:
    assert report["problems"] == report["failures"] == report["not_measured"] == []
    assert all(d["tie"] for d in report["differences"])
    for model, words in (("glm-5.1", "GLM-5.1 {} times the built-in's"), ("glm-5.2", "GLM-5.2 {} times")):
        cells = [c for r in report["rows"] if r["case"].startswith(model) and r["steps"] > 1 for c in r["workloads"].values()]
        yield words.format(spread([cell["ours"]["mean"] / cell["builtin"]["mean"] for cell in cells]))
    below = [c["ours"]["mean"] / c["builtin"]["mean"] for r in report["rows"] for c in r["workloads"].values()]
    less = [ratio for ratio in below if ratio < 1]
    yield f"{len(less)} of {len(below)} cells are below the built-in's, the furthest by {100 * (1 - min(less)):.1f} %"


@rule("printed_0_5_23")
def printed_last(report: dict) -> Iterator[str]:
    """Runs of which the last lines are all that is left."""
    names = ("sampled and greedy", "tensor parallel", "EAGLE3", "DP attention")
    runs = {name: run for run in report["runs"] for name in names if name in run["command"]}
    parted = re.compile(r"(\d+) of the outputs differ .*, (\d+) of them at ties")
    for name in ("EAGLE3", "tensor parallel"):
        *_, differing, floors = runs[name]["printed"]
        count, ties = parted.match(differing).groups()
        assert (count, floors, runs[name]["exit_code"]) == (ties, "all floors met", 0)
        yield f"all floors met, {count} parted outputs, ties"
    means = [re.findall(r"': ([\d.]+)", line) for line in runs["tensor parallel"]["printed"][:2]]
    yield "{} and {} of 4, built-in {} and {}".format(*means[0], *means[1])
    assert runs["sampled and greedy"]["printed"][-1] == "no floor missed where something was measured"
    builtin, *_, floors = runs["DP attention"]["printed"]
    assert (runs["DP attention"]["exit_code"], floors) == (1, "no floor missed where something was measured")
    assert ", builtin: " in builtin
    yield f"the built-in's on bfloat16 were {spread(list(map(float, re.findall(r': ([0-9.]+)', builtin))))}"
