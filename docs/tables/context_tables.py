"""Two of the eight ranks of DeepSeek-V3.2 as one server, which divide the KV (--dcp-size) or do not."""

from __future__ import annotations

from functools import cache

from rank_tables import BUILTIN, FEW_TOKENS, FIRST_FILE, TIMES, cells_of, order, percent, shape, spreads, worst
from result_files import Parts, result, spread, table

from nsa_backend.benchmarks.reports.rank_rows import Cell, Spread, over_tensor_parallel
from nsa_backend.benchmarks.servers.parallel import Parallel

PARTS = Parts()
CONTEXT_FILE, CONTEXT_AGAIN = (FIRST_FILE, "two_of_eight_ranks"), (FIRST_FILE, "context_divided_whole_prefills")
"""Two of the eight ranks as one server, which divide the KV or do not; and without the built-in, but with whole prefills."""
DIVIDED, UNDIVIDED = str(Parallel(dcp=2)), str(Parallel(tp=2))


@cache
def two_ranks(key: str) -> dict[Cell, dict[str, Spread]]:
    """`key` by cell and side of two of the eight ranks as one server, the KV divided, and not; of ours the newest."""
    found = spreads(cells_of(result(*CONTEXT_FILE), key), key)
    for cell, sides in spreads(cells_of(result(*CONTEXT_AGAIN), key), key).items():
        found[cell] = found.get(cell, {}) | sides
    return found


def of_two(key: str) -> dict[Cell, dict[str, Spread]]:
    """The same where the KV is divided, in the order of tables."""
    found = sorted(two_ranks(key).items(), key=lambda item: order(item[0]))
    return {cell: sides for cell, sides in found if cell.parallel == DIVIDED and cell.length >= FEW_TOKENS}


def over_undivided(key: str, other: str) -> dict[Cell, float]:
    """By cell, `key` of ours where the KV is divided over that of the default or the built-in, which divide none there."""
    found = two_ranks(key)
    ratios = {cell: over_tensor_parallel(found, cell, "default", other) for cell in of_two(key)}
    return {cell: ratio for cell, ratio in ratios.items() if ratio}


@PARTS.part
def context_ranks() -> str:
    """A row a cell: milliseconds with the KV divided, in brackets over those of both sides without."""

    def told(cell: Cell, key: str, form: str) -> str:
        over = (over_undivided(key, other).get(cell) for other in ("default", BUILTIN))
        both = " / ".join(f"{one:.3f}" if one else "-" for one in over)
        return f"{form.format(two_ranks(key)[cell]['default'].median)} ({both})"

    cells = of_two("round_ms")
    rows = [[shape(cell), told(cell, "round_ms", "{:.2f}"), told(cell, "ttft_ms", "{:.0f}")] for cell in cells]
    return table(["requests x tokens", "round", "first token"], rows)


@PARTS.part
def context_longer() -> str:
    """Percent that rounds take longer where the KV is divided, least to most."""
    return spread((100 * (ratio - 1) for ratio in over_undivided("round_ms", "default").values()), "{:.0f}") + " %"


@PARTS.part
def context_saved() -> str:
    """Percent that they are shorter all the same than the built-in's, which divides none."""
    return percent(over_undivided("round_ms", BUILTIN).values())


@PARTS.part
def context_pool() -> str:
    """Tokens that the pools of both hold."""
    pools = {row["parallel"]: row["pool_tokens"] for row in result(*CONTEXT_FILE)["rows"] if "pool_tokens" in row}
    return f"{pools[DIVIDED]} tokens where {pools[UNDIVIDED]} fitted, {pools[DIVIDED] / pools[UNDIVIDED]:.2f} times"


@PARTS.part
def context_exchange() -> str:
    """Microseconds a layer of what ranks that divide the KV exchange, least to most over shapes."""
    rows = [row for row in result(*CONTEXT_FILE)["rows"] if row["parallel"] == DIVIDED and "parts" in row]
    return spread((row["exchange_a_layer"][1] for row in rows), "{:.0f}")


@PARTS.part
def crowd() -> str:
    """What the deployment that divides the KV did with more long requests than fit undivided."""
    (row,) = result(FIRST_FILE, "crowd")["rows"]
    first, last = row["first_token_s"][0], row["first_token_s"][-1]
    taken_back = row["retracted"] or "none"
    return (
        f"{row['decoded_at_once']} of {row['requests']} requests of {row['length']} tokens were decoded at once, "
        f"{taken_back} retracted; first tokens took {first:.0f} to {last:.0f} s"
    )


def lost_by_two_ranks() -> list[list[str]]:
    """A row of where two ranks that divide the KV take longer than ours, and one of where than the built-in's, of neither."""
    rows = []
    for other, whose in (("default", "ours"), (BUILTIN, "SGLang's")):
        told = []
        for key, behind in TIMES.items():
            over = over_undivided(key, other)
            if found := worst(over):
                lost, cell = found
                told.append(f"{behind} {lost} of {len(over)}, at most {over[cell]:.3f} ({shape(cell)})")
        if told:
            rows.append(["--dcp-size 2", f"beside {whose} without it", "; ".join(told)])
    return rows
