"""What the text must say of the model that was trained on real text, once there is a result file.

    cd tests/docs && python -c "import rules_trained, quoted; print(*rules_trained.says(quoted.result('trained')), sep='\\n')"

prints it: rows of the README's table, rows of the whole one in docs/numbers.md, and sentences.
"""

from collections.abc import Iterator

from quoted import files, one, rule

SIDES = ("ours", "shared", "builtin")
BATCHES = (1, 8, 32)
README_CELL = {"length": 300, "temperature": 0.0}


def says(report: dict) -> Iterator[str]:
    yield from readme_rows(report)
    yield from every_cell(report)
    yield from sentences(report)


def readme_rows(report: dict) -> Iterator[str]:
    """A row an N: accept length of each side, greedy on the shortest prompts, and tokens per second of both."""
    for steps in sorted({row["steps"] for row in report["speed"]}):
        cells = ["-"] * 4
        if steps:
            row = one(report["accept"], steps=steps, **README_CELL)
            cells = [f"{row[side]['accept']:.2f}" if side in row else "-" for side in SIDES] + [f"{row['gain']['ratio']:.3f}"]
        for batch in BATCHES:
            speed = one(report["speed"], steps=steps, batch=batch)
            cells.append(" / ".join(f"{speed[side]['tokens_per_s']:.0f}" for side in ("ours", "builtin")))
        yield f"| {steps} | " + " | ".join(cells) + " |"


def every_cell(report: dict) -> Iterator[str]:
    """A row a cell, with standard errors."""
    for row in report["accept"]:
        cells = [f"{row[s]['accept']:.3f} ± {row[s]['standard_error']:.3f}" if s in row else "-" for s in SIDES]
        cells.append(f"{row['gain']['ratio']:.3f} ± {row['gain']['standard_error']:.3f}")
        head = f"| {row['steps']} | {row['length']} | {row['temperature']:g} | {row['requests']} | "
        yield head + " | ".join(cells) + " |"


def sentences(report: dict) -> Iterator[str]:
    for batch in BATCHES:
        best = [best_steps(report, batch, side) for side in ("ours", "builtin")]
        yield f"At batch {batch} the best N is {best[0]} for ours and {best[1]} for the built-in backend"
    gains = [row["gain"]["ratio"] for row in report["accept"] if row["steps"] > 1]
    yield f"accept lengths are {min(gains):.3f} to {max(gains):.3f} times the built-in's for N above 1"
    errors = [row[side]["standard_error"] for row in report["accept"] for side in SIDES if side in row]
    yield f"standard errors of accept lengths are at most {max(errors):.3f}"
    language = report["training"]["language"]
    yield (
        f"{language['tokens'] / 1e6:.0f}M tokens, held-out loss {language['held_out']['target']:.2f} nats a token "
        f"of the target and {language['held_out']['mtp']:.2f} of the MTP layer"
    )


def best_steps(report: dict, batch: int, side: str) -> int:
    rows = [row for row in report["speed"] if row["batch"] == batch and side in row]
    return max(rows, key=lambda row: row[side]["tokens_per_s"])["steps"]


if files("trained"):
    rule("trained")(says)
