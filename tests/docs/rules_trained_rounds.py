"""What the text must say of the second model trained on real text, served with a greedy round of ours in one graph.

    cd tests/docs && python -c "import rules_trained_rounds as r, quoted; print(*r.says(quoted.result(r.FILE)), sep='\\n')"

prints it: rows of the tables of docs/numbers, and sentences.
"""

from collections.abc import Iterator

from quoted import one, rule, spread
from rules_trained import BATCHES, BOTH, timed

FILE = "trained_rounds_0_5_23"


@rule(FILE)
def says(report: dict) -> Iterator[str]:
    yield from accept_sentences(report)
    yield from every_speed(report)
    yield from greedy_sentences(report)
    yield from host_time(report)
    yield from sampled_sentences(report)
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


def accepts_differ(row: dict) -> float:
    """How far the medians of the accept lengths of a speed row are apart."""
    return abs(row["ours"]["accept"]["median"] - row["builtin"]["accept"]["median"])


def accept_sentences(report: dict) -> Iterator[str]:
    """How well they are known; what they say stands beside the other models': rules_trained_models.py."""
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


def sampled_sentences(report: dict) -> Iterator[str]:
    three, single = speeds(report, 3, 1.0), speeds(report, 1, 1.0)
    gains = [" / ".join(f"{rates(row):.2f}" for row in rows) for rows in (three, single)]
    yield f"{gains[0]} times with three drafts, {gains[1]} with one"
    apart = [(row["steps"], row["batch"]) for row in (*three, *single) if not overlap(row)]
    assert apart == [(3, 8), (3, 32), (1, 8)], "the text names the rows whose ranges lie apart"


def what_was_left_out(report: dict) -> Iterator[str]:
    """Rows of N = 1 and 3 at every batch and temperature, and one of N = 2: the text names all others as not measured."""
    complete = {(steps, t, batch) for steps in (1, 3) for t in (0.0, 1.0) for batch in BATCHES}
    assert {(r["steps"], r["temperature"], r["batch"]) for r in report["speed"]} == complete | {(2, 0.0, 1)}
    assert {row["steps"] for row in report["accept"]} == {5, 7}
    yield "Not measured in it: N = 0, 5 and 7, and N = 2 but for one row"


def training(report: dict) -> Iterator[str]:
    yield f"The second one's text, and the third one's, left out {', '.join(report['held_out_packages'])}"
