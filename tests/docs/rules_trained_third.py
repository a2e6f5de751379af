"""What the text must say of the third model trained on real text: tokens per second of every number of drafts, on both sides.

    cd tests/docs && python -c "import rules_trained_third as r, quoted; print(*r.says(quoted.result(r.FILE)), sep='\\n')"

prints it: the README's row, rows of the tables of docs/numbers, and sentences. What it says of accept lengths stands beside
the other models': rules_trained_models.py.
"""

from collections.abc import Callable, Iterator

from quoted import one, rule, spread
from rules_trained import BATCHES, BOTH, best_steps, ratio
from rules_trained_rounds import every_speed, overlap, rates, speeds

FILE = "trained_third_0_5_23"
DRAFTS = (1, 2, 3, 5, 7)
STEPS = (0, *DRAFTS)
TEMPERATURES = (0.0, 1.0)


@rule(FILE)
def says(report: dict) -> Iterator[str]:
    yield from every_gain(report)
    yield from every_speed(report)
    yield from best_of_each(report)
    yield from with_drafts(report)
    yield from without_drafts(report)
    yield from drafts_against_none(report)
    yield from sampled_rounds(report)
    yield from behind(report)
    yield from what_the_host_does(report)
    nothing_was_left_out(report)


def every_gain(report: dict) -> Iterator[str]:
    """A row an N: tokens per second over the built-in's, greedy and sampled, in brackets where the ranges overlap."""
    for steps in STEPS:
        rows = [row for temperature in TEMPERATURES for row in speeds(report, steps, temperature)]
        cells = [f"({rates(row):.2f})" if overlap(row) else f"{rates(row):.2f}" for row in rows]
        yield f"| {steps} | {' | '.join(cells)} |"


def best_of_each(report: dict) -> Iterator[str]:
    """A row a side and temperature: the most tokens per second, with which N, and every N that has fewer than N = 0.

    The README has the greedy tokens per second; what ours has over the built-in's is a sentence.
    """
    for temperature in TEMPERATURES:
        at = {"speed": [row for row in report["speed"] if row["temperature"] == temperature]}
        most = {}
        for side, name in zip(BOTH, ("ours", "built-in"), strict=True):
            steps = [best_steps(at, batch, side, STEPS) for batch in BATCHES]
            most[side] = [rate(at, n, batch, side) for n, batch in zip(steps, BATCHES, strict=True)]
            slower = [[n for n in DRAFTS if rate(at, n, batch, side) < rate(at, 0, batch, side)] for batch in BATCHES]
            told = ["all" if len(found) == len(DRAFTS) else ", ".join(map(str, found)) or "-" for found in slower]
            yield f"| {name} | {temperature:g} | {whole(most[side])} | {' / '.join(map(str, steps))} | {' | '.join(told)} |"
        if not temperature:
            yield f"| {whole(most['ours'])} | {whole(most['builtin'])} |"
            apart = [(side, batch) for side in BOTH for batch in BATCHES if best_is_apart(at, batch, side)]
            assert apart == [("ours", 8)], "the text says where the best N can be told"
        gains = [mine / theirs for mine, theirs in zip(*most.values(), strict=True)]
        yield "{:.2f} / {:.2f} / {:.2f} times".format(*gains) + (" sampled" if temperature else "")


def best_is_apart(report: dict, batch: int, side: str) -> bool:
    """Whether every generation with the best N has more tokens per second than any with another."""
    ranges = {n: one(report["speed"], steps=n, batch=batch)[side]["tokens_per_s_spread"]["min_max"] for n in STEPS}
    least, _ = ranges.pop(best_steps(report, batch, side, STEPS))
    return least > max(most for _, most in ranges.values())


def rate(report: dict, steps: int, batch: int, side: str) -> float:
    return one(report["speed"], steps=steps, batch=batch)[side]["tokens_per_s"]


def whole(rates_of_batches: list[float]) -> str:
    return " / ".join(f"{found:.0f}" for found in rates_of_batches)


def with_drafts(report: dict) -> Iterator[str]:
    greedy, sampled = ([row for n in DRAFTS for row in speeds(report, n, t)] for t in TEMPERATURES)
    for row in greedy:
        for key in ("tokens_per_s_spread", "round_ms"):
            assert not overlap(row, key), "greedy ranges overlap: the text says that they lie apart"
    yield f"{spread(list(map(rates, greedy)))} times the built-in's tokens per second with the same number of drafts"
    apart = [(row["steps"], row["batch"]) for row in sampled if not overlap(row)]
    assert apart == [(2, 8), (3, 8), (5, 8), (7, 8), (7, 32)], "the text names the rows whose ranges lie apart"
    yield f"{spread(list(map(rates, sampled)))} times with drafts"
    few = [row for row in sampled if row["steps"] == 1]
    yield f"with one draft, {spread(list(map(rates, few)))} times, they overlap"


def without_drafts(report: dict) -> Iterator[str]:
    """What differs without drafts is told from noise by nothing that was measured."""
    rows = [row for temperature in TEMPERATURES for row in speeds(report, 0, temperature)]
    apart = [(row["temperature"], row["batch"]) for row in rows if not overlap(row)]
    assert apart == [(0.0, 8), (1.0, 8), (1.0, 32)], "the text names the rows whose ranges lie apart"
    yield f"{spread(list(map(rates, rows)))} times, which"
    least, most = rows[0]["builtin"]["tokens_per_s_spread"]["min_max"]
    yield f"its fastest generation of one request has {most / least:.2f} times the tokens per second of its slowest"


def drafts_against_none(report: dict) -> Iterator[str]:
    """What drafts gain ours over none: greedy always something, sampled at 8 and 32 requests nothing."""
    greedy = [(row, one(speeds(report, 0), batch=row["batch"])) for n in DRAFTS for row in speeds(report, n)]
    for row, none in greedy:
        assert limit(row, min) > limit(none, max), "drafts and none overlap: the text says that they lie apart"
    gains = [row["ours"]["tokens_per_s"] / none["ours"]["tokens_per_s"] for row, none in greedy]
    yield f"{spread(gains)} times its own tokens per second without drafts"
    for batch in (8, 32):
        none, *others = (one(speeds(report, n, 1.0), batch=batch) for n in STEPS)
        assert limit(none, min) > max(limit(row, max) for row in others), "the text says that they lie apart"


def sampled_rounds(report: dict) -> Iterator[str]:
    """Why: what a round of ours takes and brings beside what a token takes without drafts."""
    none, *others = ([row["ours"] for row in speeds(report, n, 1.0)] for n in STEPS)
    rounds = [side for rows in others for side in rows]
    token, took = (spread([side["round_ms"]["median"] for side in sides]) for sides in (none, rounds))
    accepted = spread([side["accept"]["median"] for side in rounds])
    yield f"a round takes {took} ms and brings {accepted} tokens, where a token takes {token} ms without drafts"


def limit(row: dict, which: Callable) -> float:
    """The least or the most tokens per second of a generation of ours."""
    return which(row["ours"]["tokens_per_s_spread"]["min_max"])


def behind(report: dict) -> Iterator[str]:
    """Rows in which ours loses."""
    quantities = {
        "fewer tokens per second": lambda row: 1 / rates(row),
        "longer rounds": lambda row: ratio(row, "round_ms"),
        "a later first token": lambda row: ratio(row, "ttft_ms"),
    }
    for words, loss in quantities.items():
        found = []
        for row in report["speed"]:
            if loss(row) > 1:
                told = rates(row) if words.startswith("fewer") else loss(row)
                found.append(f"N = {row['steps']}, T = {row['temperature']:g}, batch {row['batch']} ({told:.2f})")
        yield f"{words}: {'; '.join(found)}"
    lost = [row for row in report["speed"] if rates(row) < 1]
    assert all(map(overlap, lost)), "the text says that the ranges of rows with fewer tokens per second overlap"
    later = [row for row in report["speed"] if ratio(row, "ttft_ms") > 1 and not overlap(row, "ttft_ms")]
    assert [(r["steps"], r["temperature"], r["batch"]) for r in later] == [(5, 0.0, 32)], "the text names the one of them"


def what_the_host_does(report: dict) -> Iterator[str]:
    """Rounds with less work that took longer."""
    for side, steps, words in (("ours", 3, "three"), ("builtin", 7, "seven")):
        few, many = ([row[side]["round_ms"]["median"] for row in speeds(report, n)] for n in (1, steps))
        assert any(one_draft > more for one_draft, more in zip(few, many, strict=True))
        told = [" / ".join(f"{ms:.2f}" for ms in found) for found in (few, many)]
        yield f"{told[0]} ms with one draft and {told[1]} ms with {words}"


def nothing_was_left_out(report: dict) -> None:
    wanted = {(n, t, batch) for n in STEPS for t in TEMPERATURES for batch in BATCHES}
    assert {(r["steps"], r["temperature"], r["batch"]) for r in report["speed"]} == wanted
    assert not report["problems"]
