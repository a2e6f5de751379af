"""What the text must say of the model that was trained on real text.

    cd tests/docs && python -c "import rules_trained, quoted; print(*rules_trained.says(quoted.result('trained')), sep='\\n')"

prints it: cells of the README's table, rows of the tables of docs/numbers, and sentences.
"""

from collections.abc import Iterator

from quoted import files, one, rule, spread

SIDES = ("ours", "shared", "builtin")
BOTH = ("ours", "builtin")
BATCHES = (1, 8, 32)
README_CELL = {"steps": 3, "length": 300, "temperature": 0.0}


def says(report: dict) -> Iterator[str]:
    yield from gained(report)
    yield from every_cell(report)
    yield from every_speed(report)
    yield from accept_sentences(report)
    yield from speed_sentences(report)
    yield from training(report)


def checks(report: dict) -> Iterator[str]:
    """What check_checkpoint said: a row a prompt length, and both accept lengths of a side."""
    assert all(row["agrees"] for row in (*report["check"]["target"], *report["check"]["drafts"]))
    for row in report["check"]["target"]:
        numbers = [f"{row[kind][who]:.4f}" for kind in ("mean", "largest") for who in ("server", "rounding")]
        yield f"| {row['length']} | {row['tokens']} | " + " | ".join(numbers) + " |"
    for row in report["check"]["drafts"]:
        accept = row["accept"]
        yield f"{accept['server']:.4f} where the trainer predicts {accept['trainer']:.4f} (`{row['side']}`)"


def gained(report: dict) -> Iterator[str]:
    """The README's first table: accept length with three drafts."""
    row = one(report["accept"], **README_CELL)
    yield "| " + " | ".join(f"{row[side]['accept']:.2f}" for side in BOTH) + " |"


def every_cell(report: dict, sides: tuple[str, ...] = SIDES) -> Iterator[str]:
    """A row a cell, with standard errors."""
    for row in report["accept"]:
        head = f"| {row['steps']} | {row['length']} | {row['temperature']:g} | {row['requests']} | "
        yield head + " | ".join(cells_of_row(row, sides)) + " |"


def cells_of_row(row: dict, sides: tuple[str, ...]) -> list[str]:
    """The accept length of each side, then the gain, each with its standard error."""
    cells = [f"{row[s]['accept']:.3f} ± {row[s]['standard_error']:.3f}" if s in row else "-" for s in sides]
    return [*cells, f"{row['gain']['ratio']:.3f} ± {row['gain']['standard_error']:.3f}"]


def every_speed(report: dict) -> Iterator[str]:
    """A row an N and batch: tokens per second, time per token and of a round, each with the least and the most."""
    for row in report["speed"]:
        yield f"| {row['steps']} | {row['batch']} | " + " | ".join(timed(row)) + " |"


def timed(row: dict, sides: tuple[str, ...] = SIDES) -> list[str]:
    """Cells of a speed row: tokens per second of `sides`, then of ours and built-in time per token and of a round."""
    cells = [around(row[s]["tokens_per_s_spread"], row[s]["tokens_per_s"], "{:.0f}") if s in row else "-" for s in sides]
    for key in ("tpot_ms", "round_ms"):
        cells += [around(row[side][key], row[side][key]["median"], "{:.2f}") for side in BOTH]
    return cells


def around(found: dict, value: float, form: str) -> str:
    return " ".join([form.format(value), "({} to {})".format(*map(form.format, found["min_max"]))])


def better_and_worse(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Rows whose gain is more than two standard errors below 1, and above."""
    below, above = ([r for r in rows if sign * (r["gain"]["ratio"] - 1) > 2 * r["gain"]["standard_error"]] for sign in (-1, 1))
    return below, above


def accept_sentences(report: dict) -> Iterator[str]:
    drafting = [row for row in report["accept"] if row["steps"] > 1]
    shared = [row["ours"]["accept"] / row["shared"]["accept"] for row in drafting]
    yield f"{min(shared):.3f} to {max(shared):.3f} times `shared`'s"
    alike = [row["gain"]["ratio"] for row in report["accept"] if row["steps"] == 1]
    yield f"with one draft, where both sides do the same, {min(alike):.3f} to {max(alike):.3f}"
    for group, steps in (("to N = 3", (1, 2, 3)), ("for N = 5 and 7", (5, 7))):
        rows = [row for row in report["accept"] if row["steps"] in steps]
        yield f"at most {max(r[s]['standard_error'] for r in rows for s in SIDES if s in r):.3f} {group}"


def speed_sentences(report: dict) -> Iterator[str]:
    """What can be told: one draft, whose ranges lie apart, and that processes differ without drafts."""
    rows = [one(report["speed"], steps=1, batch=batch) for batch in BATCHES]
    for row in rows:
        for key, better in (("tokens_per_s_spread", 1), ("round_ms", -1)):
            ours, builtin = ([better * end for end in row[side][key]["min_max"]] for side in BOTH)
            assert min(ours) > max(builtin), "the ranges of one draft overlap: the text says that they do not"
    yield "{:.2f}, {:.2f} and {:.2f} times the tokens per second with one draft".format(
        *(row["ours"]["tokens_per_s"] / row["builtin"]["tokens_per_s"] for row in rows)
    )
    for batch in (8, 32):
        row = one(report["speed"], steps=0, batch=batch)
        yield "{:.0f} against {:.0f} at batch {}".format(*(row[side]["tokens_per_s"] for side in BOTH), batch)
    best = {best_steps(report, batch, side, (0, 1, 7)) for batch in BATCHES for side in BOTH}
    yield f"Of N = 0, 1 and 7 the most tokens per second come with {' or '.join(map(str, sorted(best)))}"
    yield "a round with seven drafts takes {} times the built-in's".format(
        spread([ratio(one(report["speed"], steps=7, batch=batch), "round_ms") for batch in BATCHES])
    )


def ratio(row: dict, key: str) -> float:
    return row["ours"][key]["median"] / row["builtin"][key]["median"]


def best_steps(report: dict, batch: int, side: str, steps: tuple[int, ...]) -> int:
    rows = [row for row in report["speed"] if row["batch"] == batch and row["steps"] in steps]
    return max(rows, key=lambda row: row[side]["tokens_per_s"])["steps"]


def training(report: dict) -> Iterator[str]:
    yield f"The first one's text left out {', '.join(report['held_out_packages'])}"


def kept(report: dict, which: str) -> str:
    """The share of the dense attention, least to most over layers, that 2048 tokens keep: indexer, best or newest."""
    return spread([layer[which] for layer in report["training"]["indexer"]["attention_kept"]], "{:.3f}")


if files("trained"):
    rule("trained")(says)
    rule("trained")(checks)
