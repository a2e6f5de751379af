"""What the text must say of sampled rounds in one graph: how often outputs come, their speed, and the GPU tests."""

import math
from collections.abc import Iterator

from quoted import one, rule, spread
from rules_more import apart, behind, cells_of_row, over

SIDES = ("ours", "three_graphs")


def beyond(chi_square: float, freedom: int) -> float:
    """The share of samples that exceed it by chance (Wilson and Hilferty)."""
    width = 2 / (9 * freedom)
    return 0.5 * math.erfc(((chi_square / freedom) ** (1 / 3) - 1 + width) / math.sqrt(2 * width))


@rule("sampled_rounds_mended_0_5_23", "sampled_rounds_0_5_23")
def what_was_asked(newest: dict, first: dict) -> Iterator[str]:
    """Both runs asked alike."""
    asked, before = ({row["sampling"]: row["parameters"] for row in report["rows"]} for report in (newest, first))
    assert asked == before
    yield '"top-k" is top-k {top_k}'.format(**asked["top-k"][0])
    yield '"top-p" is top-p {top_p} at temperature {temperature}'.format(**asked["top-p"][0])
    yield '"both" top-k {top_k} and top-p {top_p} at {temperature}'.format(**asked["both"][0])


def how_often_outputs_come(report: dict) -> Iterator[str]:
    rows = report["rows"]
    assert all(row["same"] for row in rows)
    assert len(report["captured"]["ours"]) == 1
    assert report["captured"]["three_graphs"] == []
    chances = []
    for row in rows:
        found = [beyond(*pair) for pair in zip(row["chi_square"], row["freedom"], strict=True)]
        chances += found
        counted = " / ".join(
            f"{chi_square:.1f} of {freedom}" for chi_square, freedom in zip(row["chi_square"], row["freedom"], strict=True)
        )
        shares = " / ".join(f"{100 * share:.1f} %" for share in found)
        accept = " | ".join(f"{row['accept'][side]:.3f}" for side in SIDES)
        cells = f"{counted} | {shares} | {accept} | {row['accept_apart']:+.3f} ± {row['accept_error']:.3f}"
        yield f"| {row['sampling']} | {cells} |"
    yield f"furthest of these {len(chances)} is one that chance exceeds {100 * min(chances):.1f} % of the time"
    furthest = max(abs(row["accept_apart"]) for row in rows)
    errors = spread([row["accept_error"] for row in rows], "{:.3f}")
    yield f"lengths lie apart by at most {furthest:.3f}, with standard errors of {errors}"


for each in ("sampled_rounds_mended_0_5_23", "sampled_rounds_0_5_23"):
    rule(each)(how_often_outputs_come)


@rule("serve_sampled_0_5_23")
def what_they_hold(report: dict) -> Iterator[str]:
    """Three tensors of float32 over DeepSeek-V3.2's vocabulary, of 64 requests with four tokens to verify."""
    assert {row["steps"] for row in report["rows"]} == {3}
    yield f"({3 * 64 * 4 * 129280 * 4 / 1e9:.1f} GB for 64 requests of DeepSeek-V3.2 with three drafts)"


@rule("serve_sampled_0_5_23")
def how_fast_they_are(report: dict) -> Iterator[str]:
    assert report["environment"]["switches"] == {"NSA_BACKEND_SAMPLED_ROUNDS": "1"}
    rows = report["rows"]
    assert {(row["temperature"], row["top_p"], row["steps"]) for row in rows} == {(1.0, 0.95, 3)}
    yield "temperature 1.0, top-p 0.95, N = 3"
    yield "--temperature 1.0 --top-p 0.95"
    wide = [one(rows, checkpoint="wide", batch=batch) for batch in (1, 8, 32)]
    alone = one(rows, checkpoint="faithful", batch=1)
    for other, words in (("three_graphs", "three graphs'"), ("builtin", "the built-in's")):
        rates = [over(row, "ours", other) for row in (*wide, alone)]
        rounds = [over(row, "ours", other, "round_ms") for row in (*wide, alone)]
        yield "{:.2f}, {:.2f} and {:.2f} times {words} tokens per second, {:.2f} on `faithful`".format(*rates, words=words)
        yield "{:.2f}, {:.2f} and {:.2f} of {words} time, {:.2f} on `faithful`".format(*rounds, words=words)
    level = [(row["batch"], other) for row in wide for other in ("three_graphs", "builtin") if not apart(row, "ours", other)]
    assert level == [(8, "builtin"), (32, "three_graphs")]
    assert apart(alone, "ours", "three_graphs")
    assert apart(alone, "ours", "builtin")
    for other, words in (("three_graphs", "three graphs'"), ("builtin", "the built-in's")):
        if lost := behind(rows, "ours", other, "ttft_ms"):
            yield f"first token later than {words}: {lost}"
        assert behind(rows, "ours", other, "tokens_per_s") == behind(rows, "ours", other, "round_ms") == ""
    accept = [row[side]["accept"] for row in rows for side in (*SIDES, "builtin")]
    yield f"accept lengths are {spread(accept)} there on all sides"


@rule("serve_sampled_default_0_5_23", "serve_sampled_0_5_23")
def how_fast_they_are_by_default(report: dict, before: dict) -> Iterator[str]:
    """No switch is set, and every cell was asked as before."""
    assert "switches" not in report["environment"]
    rows = report["rows"]
    asked = ("temperature", "top_p", "steps", "length", "tokens", "samples")
    assert len({tuple(row[key] for key in asked) for row in (*rows, *before["rows"])}) == 1
    for row in rows:
        cells = cells_of_row(row, (*SIDES, "builtin"))
        yield f"| {row['checkpoint']} | {row['steps']} | {row['batch']} x {row['length']} | {' | '.join(cells)} |"
    (where,) = {cell.replace(" tp1,", "").rsplit(", ", 1)[0] for cell in report["not_measured"]}
    yield f"Not reached: {where}, {', '.join(cell.rsplit(', ', 1)[1] for cell in report['not_measured'])}"
    faithful = [one(rows, checkpoint="faithful", batch=batch) for batch in (1, 8, 32)]
    alone = one(rows, checkpoint="wide", batch=1)
    for other, words in (("three_graphs", "three graphs'"), ("builtin", "the built-in's")):
        assert all(apart(row, "ours", other, key) for row in rows for key in ("tokens_per_s", "round_ms"))
        rates = [over(row, "ours", other) for row in (*faithful, alone)]
        rounds = [over(row, "ours", other, "round_ms") for row in (*faithful, alone)]
        yield "{:.2f}, {:.2f} and {:.2f} times {words} tokens per second, {:.2f} on `wide`".format(*rates, words=words)
        yield "{:.2f}, {:.2f} and {:.2f} of {words} time, {:.2f} on `wide`".format(*rounds, words=words)
    yield f"first token later than three graphs': {behind(rows, 'ours', 'three_graphs', 'ttft_ms')}"
    assert behind(rows, "ours", "builtin", "ttft_ms") == ""
    assert not apart(faithful[2], "ours", "three_graphs", "ttft_ms")
    yield f"accept lengths are {spread([row[side]['accept'] for row in rows for side in (*SIDES, 'builtin')])} on all sides"
    cells = [(row["checkpoint"], row["batch"]) for row in before["rows"]]
    both = [
        (one(before["rows"], checkpoint=c, batch=b), row)
        for c, b in cells
        for row in rows
        if (row["checkpoint"], row["batch"]) == (c, b)
    ]
    yield "{:.2f} and {:.2f} ms on `wide`, {:.2f} and {:.2f} on `faithful`".format(
        *(run["ours"]["round_ms"]["median"] for pair in both for run in pair)
    )


@rule("gpu_tests_0_5_23")
def what_the_gpu_tests_say(report: dict) -> Iterator[str]:
    *_, before, last = [run["outcome"] for run in report["runs"] if "test_sampled_round_graph" in run["command"]]
    assert before.startswith("1 failed, 8 passed")
    assert "6 of 400 requests got other tokens" in before
    yield "6 of 400 requests got other tokens, where it allows 2"
    yield f"the run after that has {last.split(' in ')[0]}"
