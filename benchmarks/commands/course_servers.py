"""What several servers of each side tell in `course`: whether a difference is of the backend or of the process.

Two processes of one backend differ too, by where their memory lies. A difference of the sides says something about the backends
where it is larger than the spread between the servers of a side, at best so large that the ranges of the sides lie apart.
"""

from __future__ import annotations

import statistics

from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.benchmarks.servers.server import BACKENDS, side_of


def mean_us(ms_per_token: list[float], ends: list[int]) -> float:
    """Microseconds per token over all stretches, which begin at token 1 and end at `ends`."""
    tokens = [end - begin for begin, end in zip([1, *ends], ends, strict=False)]
    return 1e3 * sum(ms * count for ms, count in zip(ms_per_token, tokens, strict=True)) / sum(tokens)


def compared(servers: dict[str, dict], ends: list[int]) -> dict:
    """The sides of one row: microseconds per token of the servers of each, their spread, and what lies between the sides.

    Args:
        servers: by name, with `ms_per_token` of each stretch.
        ends: new tokens of a request at the end of each stretch.
    """
    by_server = {name: round(mean_us(of_one["ms_per_token"], ends), 2) for name, of_one in servers.items()}
    sides = {side: [us for name, us in by_server.items() if side_of(name) == side] for side in BACKENDS}
    ours, builtin = (sides[side] for side in BACKENDS)
    return {
        "us_per_token": by_server,
        "mean": {side: round(statistics.mean(us), 2) for side, us in sides.items()},
        "difference": round(statistics.mean(ours) - statistics.mean(builtin), 2),  # ours - builtin
        "spread": {side: round(max(us) - min(us), 2) for side, us in sides.items()},  # most less least of a side's servers
        "ranges_overlap": max(min(ours), min(builtin)) <= min(max(ours), max(builtin)),
    }


def told(row: dict) -> str:
    """One line of what a row comes to."""
    sides = row["sides"]
    spread = ", ".join(f"{us:.1f} of {side}" for side, us in sides["spread"].items())
    ranges = "overlap" if sides["ranges_overlap"] else "lie apart"
    return f"ours - builtin {sides['difference']:+.1f} us per token; between servers of a side {spread}; the ranges {ranges}"


def show(row: dict) -> None:
    """A line a server: microseconds per token of each stretch, and over all of them; then the line of both sides."""
    table = [
        (name, *(1e3 * ms for ms in of_one["ms_per_token"]), row["sides"]["us_per_token"][name])
        for name, of_one in row["servers"].items()
    ]
    print_table(("server", *map(str, row["tokens"]), "all"), table)
    print(told(row))
