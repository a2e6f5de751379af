"""What end-to-end runs, runs under load and tests on a GPU gave."""

from __future__ import annotations

import math

from result_files import PRIMARY, Parts, release, reports, result, spread, table

PARTS = Parts()

MODELS = ("DeepSeek-V3.2", "GLM-5.1", "GLM-5.2")
STEPS = (1, 3, 5)
"""Numbers of drafts that have a column."""
OTHER_DRAFTS = ("adaptive", "EAGLE3")
"""How cases begin whose drafts are of another number, or wrong on purpose."""


def model(row: dict) -> str:
    """Whose architecture the checkpoint of a case has; the first one's where the case names none."""
    return next((name for name in MODELS if name.lower() in row["case"]), MODELS[0])


def in_triton(row: dict) -> bool:
    """Whether its rows went together by a kernel in Triton, which is no more: cases of few heads came after it."""
    return row["decode"] == "sparse_verify" and not row["case"].startswith(("8 heads", "16 heads"))


@PARTS.part
def accept_lengths() -> str:
    """Least to most of the means of workloads on the primary release, ours / the built-in's: by model and drafts."""
    found: dict[str, dict[tuple[int, str], list[float]]] = {}
    for report in (each for each in reports("e2e").values() if release(each) == PRIMARY):
        for row in report["rows"] + report.get("rerun", {}).get("rows", []):
            if row["steps"] in STEPS and not row["case"].startswith(OTHER_DRAFTS) and not in_triton(row):
                cells = found.setdefault(model(row), {})
                for workload in row["workloads"].values():
                    for side, given in workload.items():
                        cells.setdefault((row["steps"], side), []).append(given["mean"])
    rows = []
    for words, cells in sorted(found.items()):
        texts = []
        for steps in STEPS:
            sides = [spread(cells.get((steps, side), [])) for side in ("ours", "builtin")]
            texts.append(" / ".join(sides))
        rows.append([words, *texts])
    return table(["ours / SGLang's", *(f"of {n + 1}" for n in STEPS)], rows)


@PARTS.part
def parted_outputs() -> str:
    """Outputs that differ from the built-in's, by release."""
    found: dict[str, list[dict]] = {}
    for report in reports("e2e").values():
        found.setdefault(release(report), []).extend(report.get("differences") or [])
    rows = []
    for version, differences in sorted(found.items()):
        asked = [d for d in differences if d["tie"] is not None]
        widest = max(gap for d in asked for gap in d["below_best"].values() if gap is not None)
        counts = (len(differences), len(asked), sum(d["tie"] for d in asked))
        rows.append([version, *map(str, counts), f"{widest:.3f}"])
    return table(["SGLang", "outputs that differ", "looked at", "ties among them", "furthest from the best logit"], rows)


SOAKS = {
    "0_5_23/three_sides": "one server",
    "0_5_23/faults": "malformed requests between",
    "0_5_23/dp": "two ranks of DP attention",
    "0_5_23/dcp_again": "two ranks that divide the KV",
    "0_5_23/pd_again": "prefill and decode server",
    "0_5_12/small_chunks": "one server",
}
"""Runs under load; those that a later one of the same code replaced are in the files alone."""


ONE_GRAPH, THREE_GRAPHS = "one graph a round", "sampled rounds in three graphs"
SEEDS_OF_RANKS = {
    "rounds_deployments": ONE_GRAPH,
    "dp_attention_seeds": ONE_GRAPH,
    "dp_attention_seeds_in_three_graphs": THREE_GRAPHS,
}
"""Reports that together have sampled rounds of two ranks of DP attention of three seeds a kind, and the kind of each."""


@PARTS.part
def rejected_by_ranks() -> str:
    """In how many of these rounds a draft was rejected, and the p-value of the difference."""
    rounds = dict.fromkeys((ONE_GRAPH, THREE_GRAPHS), (0, 0))
    for name, kind in SEEDS_OF_RANKS.items():
        for row in result("e2e_0_5_23", name)["rows"]:
            if f"DP attention, sampled and greedy, {kind}" in row["case"]:
                counts = [counts for given in row["workloads"].values() for counts in given["ours"]["histograms"]]
                rejected, of = rounds[kind]
                rounds[kind] = rejected + sum(sum(one[:-1]) for one in counts), of + sum(map(sum, counts))
    one, three = (rejected / of for rejected, of in rounds.values())
    together, (first, second) = sum(n for n, _ in rounds.values()), (of for _, of in rounds.values())
    share = together / (first + second)
    apart = (one - three) / math.sqrt(share * (1 - share) * (1 / first + 1 / second))
    p_value = math.erfc(abs(apart) / math.sqrt(2))
    told = f"{one:.1%} of {first} cases in one graph, {three:.1%} of {second} in three (p = {p_value:.2f})"
    return told.replace("%", " %")


@PARTS.part
def soaks() -> str:
    """A row a run and side."""
    rows = []
    for name, words in SOAKS.items():
        version, _, part = name.partition("/")
        report = result(f"soak_{version}", part)
        for side, given in report.get("sides", {"ours": report}).items():
            requests = " / ".join(str(given["requests"][key]) for key in ("finished", "aborted", "closed", "failed"))
            parted = f"{given['differences']['ways']} / {given['differences']['at_ties']}"
            if unasked := sum(one["tie"] is None for one in given["differences"].get("others", ())):
                parted += f" ({unasked} not looked at)"
            held = f"{given['held']['before_mib']:.0f} / {given['held']['after_mib']:.0f}"
            what = f"{version.replace('_', '.')}, {words}: {side.replace('_', ' ').replace('builtin', 'built-in')}"
            latest = f"{given['latency']['first_token_s']['p99']:.1f}" if "latency" in given else "-"
            counts = (f"{given['load_minutes']:.1f}", requests, str(given["retracted"]["in_log"]))
            rows.append([what, *counts, f"{given['accept_length']:.2f}", latest, parted, held])
    head = [
        "run",
        "minutes",
        "finished / aborted / closed / failed",
        "retracted",
        "accepted of 4",
        "first token, s, p99",
        "differ / at ties",
        "MiB held before / after",
    ]
    return table(head, rows)


@PARTS.part
def faults() -> str:
    """What came of each fault that may end a server: requests under way that finished, how it ended, after how long."""
    sides = result("soak_0_5_23", "faults")["sides"]
    rows = []
    for name in sides["ours"]["fatal"]:
        found = [sides[side]["fatal"][name] for side in ("ours", "builtin")]
        if all("under_way" in one for one in found):
            rows.append([name, *map(_outcome, found)])
    sides, name = result("soak_0_5_23", "two_at_once")["sides"], "two servers started at once"
    served = [sides[side]["fatal"][name]["serves_again"] for side in ("ours", "builtin")]
    rows.append([name, *("both serve" if both else "one does not serve" for both in served)])
    return table(["fault", "ours", "built-in"], rows)


def _outcome(found: dict) -> str:
    ended = "goes on" if found["exit"] is None else f"exit {found['exit']} after {found['seconds']:.1f} s"
    return f"{found['finished']} of {found['under_way']} finished; {ended}"


def beyond(chi_square: float, freedom: int) -> float:
    """The share of samples that exceed it by chance (Wilson and Hilferty)."""
    width = 2 / (9 * freedom)
    return 0.5 * math.erfc(((chi_square / freedom) ** (1 / 3) - 1 + width) / math.sqrt(2 * width))


@PARTS.part
def sampled_alike() -> str:
    """The p-value of the difference between outputs of one graph and of three, and accept lengths."""
    rows = []
    for row in result("sampled_rounds_0_5_23", "mended")["rows"]:
        shares = [beyond(*pair) for pair in zip(row["chi_square"], row["freedom"], strict=True)]
        apart = f"{row['accept_apart']:+.3f} ± {row['accept_error']:.3f}"
        rows.append([row["sampling"], " / ".join(f"{share:.2f}" for share in shares), apart])
    return table(["sampling", "p-value", "accepted, one graph less three"], rows)
