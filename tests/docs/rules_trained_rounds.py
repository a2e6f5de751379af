"""What the text must say of the second model trained on real text, served with a greedy round of ours in one graph.

    cd tests/docs && python -c "import rules_trained_rounds as r, quoted; print(*r.says(quoted.result(r.FILE)), sep='\\n')"

prints it: cells of the README's table, rows of the tables in docs/numbers.md, and sentences.
"""

from collections.abc import Iterator

from quoted import one, rule, spread
from rules_trained import BOTH, accept_range, better_and_worse, every_cell, indexers, losses, timed

FILE = "trained_rounds_0_5_23"
BATCHES = (1, 8, 32)


@rule(FILE)
def says(report: dict) -> Iterator[str]:
    yield from gained(report)
    yield from every_cell(report, BOTH)
    yield from accept_sentences(report)
    yield from every_speed(report)
    yield from greedy_sentences(report)
    yield from host_time(report)
    yield from sampled_sentences(report)
    yield from drafts_to_choose(report)
    yield from what_was_left_out(report)
    yield from training(report)


def speeds(report: dict, steps: int, temperature: float = 0.0) -> list[dict]:
    """Rows of one N at 1, 8 and 32 requests."""
    return [one(report["speed"], steps=steps, temperature=temperature, batch=batch) for batch in BATCHES]


def rates(row: dict) -> float:
    return row["ours"]["tokens_per_s"] / row["builtin"]["tokens_per_s"]


def overlap(row: dict, key: str = "tokens_per_s_spread") -> bool:
    """Whether the ranges of both sides, over generations, have something in common."""
    (low, high), (least, most) = (row[side][key]["min_max"] for side in BOTH)
    return low <= most and least <= high


def gained(report: dict) -> Iterator[str]:
    """The README's row; both sides accept alike, as it says."""
    rows = speeds(report, 1)
    assert max(map(accepts_differ, rows)) < 0.03
    yield "| {} |".format(" | ".join(" / ".join(f"{row[side]['tokens_per_s']:.0f}" for row in rows) for side in BOTH))


def accepts_differ(row: dict) -> float:
    """How far the medians of the accept lengths of a speed row are apart."""
    return abs(row["ours"]["accept"]["median"] - row["builtin"]["accept"]["median"])


def accept_sentences(report: dict) -> Iterator[str]:
    yield from accept_range(report["accept"])
    below, above = better_and_worse(report["accept"])
    greedy = [row for row in below if not row["temperature"]]
    yield f"{len(below)} of them is more than two standard errors below 1 ({len(greedy)} greedy) and {len(above)} above"
    ratios = [row["gain"]["ratio"] for row in report["accept"] if (row["steps"], row["temperature"]) == (5, 0.0)]
    assert max(ratios) < 1
    yield f"the three greedy cells of N = 5 have {spread(ratios, '{:.3f}')}"
    errors = {
        steps: [max(row[side]["standard_error"] for side in BOTH) for row in report["accept"] if row["steps"] == steps]
        for steps in (5, 7)
    }
    five, known = errors[5], [error for error in errors[5] if error < 0.02]
    yield f"at most {max(five):.4f} for N = 5, below 0.02 in {len(known)} of its {len(five)} cells"
    yield f"{spread(errors[7], '{:.3f}')} for N = 7"


def every_speed(report: dict) -> Iterator[str]:
    """A row an N, temperature and batch: tokens per second, time per token and of a round, with the least and the most."""
    for row in report["speed"]:
        accept = " / ".join(f"{row[side]['accept']['median']:.2f}" for side in BOTH)
        yield f"| {row['steps']} | {row['temperature']:g} | {row['batch']} | {' | '.join(timed(row, BOTH))} | {accept} |"


def greedy_sentences(report: dict) -> Iterator[str]:
    greedy = [row for row in report["speed"] if not row["temperature"]]
    for row in greedy:
        for key in ("tokens_per_s_spread", "round_ms"):
            assert not overlap(row, key), "greedy ranges overlap: the text says that they lie apart"
    yield f"{spread([rates(row) for row in greedy])} times the built-in's tokens per second, greedy"
    for steps, words in ((3, "three drafts"), (1, "one draft")):
        gains = " / ".join(f"{rates(row):.2f}" for row in speeds(report, steps))
        yield f"{gains} times the built-in's tokens per second with {words}"
    (two,) = [row for row in greedy if row["steps"] == 2]
    assert two["batch"] == 1
    yield f"{rates(two):.2f} times with two, of which batch 1 alone was reached"
    yield f"medians of the accept length are at most {max(map(accepts_differ, greedy)):.2f} apart"


def host_time(report: dict) -> Iterator[str]:
    """The built-in's greedy rounds were slower than its sampled ones, which do more."""
    greedy, sampled = speeds(report, 3), speeds(report, 3, 1.0)
    for row, other in zip(greedy[:2], sampled[:2], strict=True):
        assert row["builtin"]["round_ms"]["median"] > 1.5 * other["builtin"]["round_ms"]["median"]
    words = "{:.2f} and {:.2f} ms at batch 1 and 8, its sampled rounds, which do more, {:.2f} and {:.2f} ms"
    yield words.format(*(row["builtin"]["round_ms"]["median"] for row in (*greedy[:2], *sampled[:2])))
    parts = [
        row["ours"]["round_ms"]["median"] / other["builtin"]["round_ms"]["median"]
        for row, other in zip(greedy, sampled, strict=True)
    ]
    yield "a greedy round of ours takes {:.2f} / {:.2f} / {:.2f} times as long as those sampled ones".format(*parts)
    yield "a whole round of three drafts takes {} ms".format(
        " / ".join(f"{row['ours']['round_ms']['median']:.2f}" for row in greedy)
    )


def sampled_sentences(report: dict) -> Iterator[str]:
    three, single = speeds(report, 3, 1.0), speeds(report, 1, 1.0)
    gains = [" / ".join(f"{rates(row):.2f}" for row in rows) for rows in (three, single)]
    yield f"{gains[0]} times with three drafts, {gains[1]} with one"
    apart = [(row["steps"], row["batch"]) for row in (*three, *single) if not overlap(row)]
    assert apart == [(3, 8), (3, 32), (1, 8)], "the text names the rows whose ranges lie apart"


def drafts_to_choose(report: dict) -> Iterator[str]:
    """The N with the most tokens per second of ours, greedy, among those that were measured; it cannot be told apart."""
    best = []
    for batch in BATCHES:
        rows = [row for row in report["speed"] if (row["batch"], row["temperature"]) == (batch, 0.0)]
        *others, most = sorted(rows, key=lambda row: row["ours"]["tokens_per_s"])
        best.append(most["steps"])
        least = most["ours"]["tokens_per_s_spread"]["min_max"][0]
        ends = [row["ours"]["tokens_per_s_spread"]["min_max"][1] for row in others]
        assert max(ends) > least, "the range of the best N lies apart: the text says that it does not"
    yield "Of N = 1, 2 and 3 ours has the most greedy tokens per second with {}, {} and {} at batch 1, 8 and 32".format(*best)


def what_was_left_out(report: dict) -> Iterator[str]:
    """Rows of N = 1 and 3 at every batch and temperature, and one of N = 2: the text names all others as not measured."""
    complete = {(steps, t, batch) for steps in (1, 3) for t in (0.0, 1.0) for batch in BATCHES}
    assert {(r["steps"], r["temperature"], r["batch"]) for r in report["speed"]} == complete | {(2, 0.0, 1)}
    assert {row["steps"] for row in report["accept"]} == {5, 7}
    yield "Not measured: speeds of N = 0, 5 and 7, of N = 2 but for one row, accept lengths of N = 1 to 3 and of `shared`"


def training(report: dict) -> Iterator[str]:
    yield losses(report["training"]["language"])
    second, third = report["training"]["language"]["held_out"]["mtp_by_step"][1:]
    yield f"{second:.2f} and {third:.2f} in the second and third draft step"
    yield from indexers(report)
    yield f"{len(report['training_packages'].split())} packages and modules"
    yield f"held out are {', '.join(report['held_out_packages'])}"
