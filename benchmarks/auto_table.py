"""Write the table of NSA_BACKEND_AUTO_DECODE=1 from what bench_attention.py measured.

python benchmarks/auto_table.py benchmarks/results/attention_h200.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nsa_backend.attention.auto import CANDIDATES, TABLE

ROOT = Path(__file__).resolve().parents[1]
KEEP = 1.01
"""A choice is kept over the next row count while it loses no more than this: fewer intervals, and noise decides nothing."""


def derive(result: Path) -> dict:
    """{GPU name: {source, commit, date, heads: {heads: [[most rows, implementation], ...]}}}."""
    report = json.loads(result.read_text())
    by_heads: dict[int, list[dict]] = {}
    for row in report["decode"]:
        if set(CANDIDATES) <= set(row["us"]):
            by_heads.setdefault(row["heads"], []).append(row)
    environment = report["environment"]
    return {
        environment["gpu"]: {
            "source": str(result.resolve().relative_to(ROOT)),
            "commit": environment["commit"],
            "date": environment["date"],
            "heads": {str(heads): _intervals(rows) for heads, rows in sorted(by_heads.items())},
        }
    }


def _intervals(rows: list[dict]) -> list[list]:
    table: list[list] = []
    for row in sorted(rows, key=lambda r: r["rows"]):
        times = {name: row["us"][name] for name in CANDIDATES}
        best = min(times, key=times.get)
        if table and times[table[-1][1]] <= KEEP * times[best]:
            table[-1][0] = row["rows"]
        else:
            table.append([row["rows"], best])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    found = derive(parser.parse_args().result)
    others = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    TABLE.write_text(json.dumps(others | found, indent=1) + "\n")
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
