"""What the text must say of all models trained on real text together.

    cd tests/docs && python -c "import rules_trained_models as r, quoted; print(*r.says(*map(quoted.result, r.FILES)))"

prints it: rows of the tables of docs/numbers, a column a model, and sentences.
"""

from collections.abc import Iterator

from quoted import rule, spread
from rules_trained import BATCHES, BOTH, better_and_worse, cells_of_row, kept
from rules_trained_rounds import overlap, rates, speeds

TEMPERATURES = (0.0, 0.7, 1.0)
OUTSIDE_TWO_ERRORS = 0.0455
"""The share of a normal distribution that is more than two standard deviations from its mean."""
FILES = ("trained", "trained_rounds_0_5_23", "trained_third_0_5_23")


@rule(*FILES)
def says(*reports: dict) -> Iterator[str]:
    yield from how_they_were_trained(reports)
    yield from how_well_they_accept(reports)
    yield from the_same_cells(*reports[1:])
    yield from two_runs(*reports[1:])


def how_they_were_trained(reports: tuple[dict, ...]) -> Iterator[str]:
    """A row a property, a column a model."""
    languages = [report["training"]["language"] for report in reports]
    yield columns("tokens trained for", [f"{language['tokens'] / 1e6:.0f}M" for language in languages])
    yield columns("packages and modules of the text", [str(len(report["training_packages"].split())) for report in reports])
    losses = [language["held_out"] for language in languages]
    yield columns(
        "held-out loss, nats a token: target / MTP layer", [f"{each['target']:.2f} / {each['mtp']:.2f}" for each in losses]
    )
    later = [" / ".join(f"{loss:.2f}" for loss in each.get("mtp_by_step", ())[1:]) or "-" for each in losses]
    yield columns("MTP layer in the second / third draft step, which it is not trained for", later)
    for words, which in (("the indexers' choice", "indexer"), ("the best choice", "best"), ("the newest tokens", "newest")):
        yield columns(f"dense attention that 2048 of 4096 tokens keep: {words}", [kept(report, which) for report in reports])
    second, third = reports[1:]
    for name in ("held_out_packages", "training_packages", "training_text"):
        assert second[name] == third[name], "the text says that they were trained on the same"
    assert len({report["training"]["settings"]["seed"] for report in reports[1:]}) == 1
    yield "{} and {} steps".format(*(report["training"]["language"]["steps"] for report in reports[1:]))


def columns(head: str, cells: list[str]) -> str:
    return f"| {head} | {' | '.join(cells)} |"


def how_well_they_accept(reports: tuple[dict, ...]) -> Iterator[str]:
    """A row a model and one of all, of cells with two drafts and more; the README has the range of all."""
    each = [[row for row in report["accept"] if row["steps"] > 1] for report in reports]
    everything = [row for rows in each for row in rows]
    yield " | ".join(f"temperature {temperature:g}" for temperature in TEMPERATURES)
    for name, rows in zip(("first", "second", "third", "all"), (*each, everything), strict=True):
        gains = [row["gain"]["ratio"] for row in rows]
        means = [mean([row["gain"]["ratio"] for row in rows if row["temperature"] == t]) for t in TEMPERATURES]
        below, above = better_and_worse(rows)
        cells = [str(len(rows)), spread(gains, "{:.3f}"), *(f"{value:.3f}" for value in (mean(gains), *means))]
        yield f"| {name} | {' | '.join(cells)} | {len(below)} / {len(above)} |"
    gains = [row["gain"]["ratio"] for row in everything]
    yield f"{spread(gains, '{:.3f}')} times the built-in's"
    yield f"over {len(gains)} cells, {mean(gains):.3f} on average"
    below, above = better_and_worse(everything)
    yield f"{len(below)} of them are more than two standard errors below 1 and {len(above)} above"
    greedy = [row for row in everything if not row["temperature"]]
    assert all(row in greedy for row in (*below, *above)), "the text says that all of them are greedy"
    yield f"all greedy, where chance gives {OUTSIDE_TWO_ERRORS * len(greedy):.0f} in {len(greedy)} greedy cells"
    yield f"{spread([row['gain']['ratio'] for row in greedy], '{:.3f}')} over greedy cells"
    greedy_means = [mean([row["gain"]["ratio"] for row in rows if not row["temperature"]]) for rows in each]
    assert max(greedy_means[:2]) < 1 < greedy_means[2], "the text says whom the greedy cells of each model favour"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def the_same_cells(second: dict, third: dict) -> Iterator[str]:
    """A row a cell that two models have, one beside the other, and how well the third's are known."""
    for row, other in zip(second["accept"], third["accept"], strict=True):
        assert [row[key] == other[key] for key in ("steps", "length", "temperature")] == [True] * 3
        cells = [cell for one in (row, other) for cell in (str(one["requests"]), *cells_of_row(one, BOTH))]
        yield f"| {row['steps']} | {row['length']} | {row['temperature']:g} | {' | '.join(cells)} |"
    yield f"at most {max(row[side]['standard_error'] for row in third['accept'] for side in BOTH):.4f} of the third one"
    assert {row["steps"] for row in (*second["accept"], *third["accept"])} == {5, 7}


def two_runs(second: dict, third: dict) -> Iterator[str]:
    """Speeds of both runs whose greedy rounds are one graph."""
    greedy = [row for report in (second, third) for row in report["speed"] if row["steps"] and not row["temperature"]]
    assert not any(map(overlap, greedy)), "greedy ranges overlap: the text says that they lie apart"
    yield f"{spread(list(map(rates, greedy)))} times the built-in's tokens per second, greedy with drafts"
    pairs = list(zip(speeds(second, 3), speeds(third, 3), strict=True))
    ends = {side: [sorted(row[side]["round_ms"]["median"] for row in pair) for pair in pairs] for side in BOTH}
    for side in BOTH:
        yield " / ".join(f"{low:.2f} to {high:.2f}" for low, high in ends[side]) + " ms"
    slowest = [mine[1] / theirs[0] for mine, theirs in zip(ends["ours"], ends["builtin"], strict=True)]
    told = " / ".join(f"{part:.2f}" for part in slowest)
    yield f"the slower one of ours takes {told} times as long as the faster one of the built-in"
    before, after = ([row["ours"]["round_ms"]["median"] for row in speeds(report, 1)] for report in (second, third))
    told = [" / ".join(f"{ms:.2f}" for ms in found) for found in (before, after)]
    yield f"{told[0]} ms in the second run and {told[1]} ms in the third"
    assert len(before) == len(BATCHES)
