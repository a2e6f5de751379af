"""Write the table of what serves by rows from what `bench attention` and two scripts of `benchmarks/tuning` measured.

python benchmarks/reports/auto_table.py benchmarks/results/auto_0_5_23_h200.json benchmarks/results/attention_0_5_23_h200.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

from nsa_backend.attention.auto import CANDIDATES, PREFILL, TABLE, TOGETHER

ROOT = Path(__file__).resolve().parents[2]
KEEP = 1.01
"""A choice is kept for the next row count while it loses no more than this: fewer intervals, and noise decides nothing."""


REAL = (0.5, 0.9)
"""What a row shares with the one before it, of those that were measured, where contexts are real."""
GAIN = 0.95
"""Rows go together where that takes less than this of the fastest other's time: at a third shared it is level then."""


def derive(result: Path, sharing: Path) -> dict:
    """{GPU name: {source, commit, date, KV dtype: {heads: [[most rows, implementation], ...]}, together, prefill: as below}}.

    Args:
        result: of rows by themselves, `by_rows`.
        sharing: of rows of a request and of a prompt, reports `rows_together` and `prefill_together`, on the same GPU.
    """
    report = json.loads(result.read_text())
    shared = json.loads(sharing.read_text())["reports"]
    environment = report["environment"]
    return {
        environment["gpu"]: {
            "source": str(result.resolve().relative_to(ROOT)),
            "commit": environment["commit"],
            "date": environment["date"],
            **{
                kv: {str(found["heads"]): _intervals(found, names) for found in report["by_rows"] if found["kv"] == kv}
                for kv, names in CANDIDATES.items()
            },
            "together_source": str(sharing.resolve().relative_to(ROOT)),
            "together": {kv: _together(shared["rows_together"]["rows"], kv) for kv in CANDIDATES},
            "prefill": {kv: _prefill(shared["prefill_together"]["rows"], kv) for kv in PREFILL},
        }
    }


def _together(rows: list[dict], kv: str) -> dict[str, dict[str, int]]:
    """{heads: {rows of a request: least rows of a call}} from which on sparse_verify gains at every overlap of REAL."""
    least = _from_where_all_gain(
        (
            (row["heads"], row["rows_per_request"]),
            row["requests"] * row["rows_per_request"],
            row["us"][TOGETHER] / min(us for name, us in row["us"].items() if name in CANDIDATES[kv]),
        )
        for row in rows
        if row["kv"] == kv and row["overlap"] in REAL
    )
    found: dict[str, dict[str, int]] = {}
    for (heads, rows_per_request), count in least.items():
        found.setdefault(str(heads), {})[str(rows_per_request)] = count
    return found


def _prefill(rows: list[dict], kv: str) -> dict[str, int]:
    """{heads: least rows of a prefill} from which on sparse_prefill gains at every overlap of REAL."""
    few, many = PREFILL[kv]
    taken = [row for row in rows if row["kv"] == kv and row["overlap"] in REAL]
    measured = ((row["heads"], row["rows"], row["us"][many] / row["us"][few]) for row in taken)
    return {str(heads): count for heads, count in _from_where_all_gain(measured).items()}


def _from_where_all_gain(measured: Iterable[tuple[Hashable, int, float]]) -> dict[Any, int]:
    """Of (kind, rows, time over that of others), by kind the least rows above the largest that did not gain."""
    worst: dict[Hashable, dict[int, float]] = {}
    for kind, rows, ratio in measured:
        of_kind = worst.setdefault(kind, {})
        of_kind[rows] = max(ratio, of_kind.get(rows, 0.0))
    found = {}
    for kind, of_kind in worst.items():
        lost = max((rows for rows, ratio in of_kind.items() if ratio >= GAIN), default=0)
        if over := [rows for rows in of_kind if rows > lost]:
            found[kind] = min(over)
    return found


def _intervals(found: dict, names: tuple[str, ...]) -> list[list]:
    table: list[list] = []
    for i, rows in enumerate(found["rows"]):
        times = {name: sum(one[name][i] for one in found["passes"]) for name in names}
        best = min(times, key=times.get)
        if table and times[table[-1][1]] <= KEEP * times[best]:
            table[-1][0] = rows
        else:
            table.append([rows, best])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="of rows by themselves")
    parser.add_argument("sharing", type=Path, help="of rows of a request")
    args = parser.parse_args()
    found = derive(args.result, args.sharing)
    others = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    TABLE.write_text(json.dumps(others | found, indent=1) + "\n")
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
