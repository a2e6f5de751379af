"""Write the table of what serves by rows from what `bench attention` and two scripts of `benchmarks/tuning` measured.

python benchmarks/reports/auto_table.py benchmarks/results/auto_0_5_23_h200.json benchmarks/results/attention_0_5_23_h200.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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
            "prefill": {"bf16": _prefill(shared["prefill_together"]["rows"])},
        }
    }


def _together(rows: list[dict], kv: str) -> dict[str, dict[str, int]]:
    """{heads: {rows of a request: least rows of a call}} from which on sparse_verify gains at every overlap of REAL."""
    wins: dict[tuple[int, int], dict[int, bool]] = {}
    for row in rows:
        if row["kv"] == kv and row["overlap"] in REAL:
            others = min(us for name, us in row["us"].items() if name in CANDIDATES[kv])
            by_rows = wins.setdefault((row["heads"], row["rows_per_request"]), {})
            count = row["requests"] * row["rows_per_request"]
            by_rows[count] = by_rows.get(count, True) and row["us"][TOGETHER] < GAIN * others
    found: dict[str, dict[str, int]] = {}
    for (heads, rows_per_request), by_rows in wins.items():
        if least := _from_where_all_win(by_rows):
            found.setdefault(str(heads), {})[str(rows_per_request)] = least
    return found


def _prefill(rows: list[dict]) -> dict[str, int]:
    """{heads: least rows of a prefill} from which on sparse_prefill gains at every overlap of REAL."""
    few, many = PREFILL
    wins: dict[int, dict[int, bool]] = {}
    for row in rows:
        if row["overlap"] in REAL:
            by_rows = wins.setdefault(row["heads"], {})
            by_rows[row["rows"]] = by_rows.get(row["rows"], True) and row["us"][many] < GAIN * row["us"][few]
    return {str(heads): least for heads, by_rows in wins.items() if (least := _from_where_all_win(by_rows))}


def _from_where_all_win(by_rows: dict[int, bool]) -> int | None:
    """Of the counts above the largest that did not win, the least."""
    lost = max((count for count, won in by_rows.items() if not won), default=0)
    return min((count for count in by_rows if count > lost), default=None)


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
