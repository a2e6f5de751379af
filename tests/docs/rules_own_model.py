"""What the text must say of `bench serve --model --prompts`, tried on a checkpoint that was trained on real text."""

from collections.abc import Iterator

from quoted import rule
from rules_trained import BOTH, around, cells_of_row

FILE = "serve_own_model_0_5_23"


@rule(FILE)
def says(report: dict) -> Iterator[str]:
    """A row a batch, and what the rounds of both sides took."""
    assert not report["not_measured"], "the text says that both sides were measured"
    assert [(row["steps"], row["batch"]) for row in report["rows"]] == [(3, 1), (3, 8)]
    for row in report["rows"]:
        cells = cells_of_row(row, BOTH)
        for key, form in (("tokens_per_s", "{:.0f}"), ("ttft_ms", "{:.1f}"), ("round_ms", "{:.2f}")):
            cells += [around(row[side][key], row[side][key]["median"], form) for side in BOTH]
        yield f"| {row['batch']} | {' | '.join(cells)} |"
    rounds = [[f"{row[side]['round_ms']['median']:.2f}" for row in report["rows"]] for side in BOTH]
    yield "{} ms of ours and {} ms of the built-in".format(*(" and ".join(found) for found in rounds))
    yield f"in {report['seconds']:.0f} seconds"
