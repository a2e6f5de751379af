"""What the README's first table must say: medians at 1, 8 and 32 requests of 300 tokens, beside one another."""

from collections.abc import Iterator

from quoted import one, rule

SIDES = ("ours", "builtin")


def cells(report: dict, checkpoint: str, steps: int, key: str, form: str, unit: str = "") -> str:
    """The last two cells of a row."""
    rows = [one(report["rows"], checkpoint=checkpoint, steps=steps, length=300, batch=batch) for batch in (1, 8, 32)]
    sides = (" / ".join(form.format(row[side][key]["median"]) for row in rows) + unit for side in SIDES)
    return f"| {' | '.join(sides)} |"


def alike(report: dict, checkpoint: str, steps: int) -> None:
    """Both sides accept alike, as the row says."""
    rows = [r for r in report["rows"] if (r["checkpoint"], r["steps"], r["length"]) == (checkpoint, steps, 300)]
    assert rows
    assert all(abs(r["ours"]["accept"] - r["builtin"]["accept"]) < 0.01 for r in rows)


@rule("serve_auto_0_5_23")
def three_drafts(report: dict) -> Iterator[str]:
    yield cells(report, "wide", 3, "round_ms", "{:.2f}", " ms")
    yield cells(report, "wide", 3, "tokens_per_s", "{:.0f}")


@rule("serve_order_0_5_23")
def one_draft(report: dict) -> Iterator[str]:
    alike(report, "wide", 1)
    yield cells(report, "wide", 1, "tokens_per_s", "{:.0f}")


@rule("serve_models_0_5_23")
def five_drafts_that_share(report: dict) -> Iterator[str]:
    alike(report, "glm-5.2", 5)
    yield cells(report, "glm-5.2", 5, "tokens_per_s", "{:.0f}")
