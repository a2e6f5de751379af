"""Speeds and memory: one table a kind of result file."""

from __future__ import annotations

from result_files import Parts, result, spread, table

PARTS = Parts()
RANK = "rank_v32_tp8_0_5_23"
LAYER_KERNELS = {
    "attention (FA3)": "flash::FlashAttnFwdSm90",
    "its combine": "flash::FlashAttnFwdCombine",
    "index logits": "deep_gemm::sm90_fp8_paged_mqa_logits",
}
"""Kernels that decode alone launches, once a layer."""


def ranks(steps: int) -> list[dict[str, dict]]:
    """Rows of both sides by cell, in the order of the file: {"ours": row, "builtin": row}."""
    cells: dict[tuple[int, int], dict[str, dict]] = {}
    for row in result(RANK)["rows"]:
        if row["steps"] == steps:
            cells.setdefault((row["batch"], row["length"]), {})[row["side"]] = row
    return list(cells.values())


def ratio(cell: dict[str, dict]) -> float:
    return cell["ours"]["round_ms"]["median"] / cell["builtin"]["round_ms"]["median"]


def shape(cell: dict[str, dict]) -> str:
    return f"{cell['ours']['batch']} x {cell['ours']['length']}"


@PARTS.part
def rank_short() -> str:
    """A row a number of drafts and a prompt length that has all batches."""
    rows = []
    for steps, words in ((3, "a round of three drafts"), (0, "a token without drafts")):
        for length in (300, 4096):
            cells = [cell for cell in ranks(steps) if cell["ours"]["length"] == length]
            times = [" / ".join(f"{cell[side]['round_ms']['median']:.2f}" for cell in cells) for side in ("ours", "builtin")]
            rows.append([f"{words}, {length} tokens", *times, " / ".join(f"{ratio(cell):.3f}" for cell in cells)])
    return table(["ms at 1 / 8 / 32 requests", "this package", "SGLang 0.5.23", "ratio"], rows)


@PARTS.part
def rank() -> str:
    """Every cell with its range."""

    def time(row: dict) -> str:
        low, high = row["round_ms"]["min_max"]
        return f"{row['round_ms']['median']:.2f} ({low:.2f} to {high:.2f})"

    rows = [
        [str(steps), shape(cell), time(cell["ours"]), time(cell["builtin"]), f"{ratio(cell):.3f}"]
        for steps in (3, 0)
        for cell in ranks(steps)
    ]
    return table(["drafts", "requests x tokens", "ours, ms", "built-in, ms", "ratio"], rows)


@PARTS.part
def rank_saved() -> str:
    """Percent of a round with drafts."""
    saved = [100 * (1 - ratio(cell)) for cell in ranks(3)]
    return f"{spread(saved, '{:.0f}')} %"


@PARTS.part
def rank_kernels() -> str:
    """Mean microseconds of a launch of what decode alone launches."""
    rows = []
    for cell in ranks(3):
        kernels = [cell[side]["kernels"] for side in ("ours", "builtin")]
        times = [" / ".join(f"{k[name][1] / k[name][0]:.1f}" for k in kernels) for name in LAYER_KERNELS.values()]
        rows.append([shape(cell), *times])
    return table(["requests x tokens", *LAYER_KERNELS], rows)


@PARTS.part
def replay_memory() -> str:
    (row,) = result("memory_0_5_23")["rows"]
    return " instead of ".join(f"{row['bytes'][side] / 2**20:.1f}" for side in ("ours", "builtin")) + " MiB"
