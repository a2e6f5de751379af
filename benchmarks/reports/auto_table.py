"""Write the table of NSA_BACKEND_AUTO_DECODE=1 from what `bench attention` measured.

python benchmarks/reports/auto_table.py benchmarks/results/auto_0_5_23_h200.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nsa_backend.attention.auto import CANDIDATES, TABLE

ROOT = Path(__file__).resolve().parents[2]
KEEP = 1.01
"""A choice is kept for the next row count while it loses no more than this: fewer intervals, and noise decides nothing."""


def derive(result: Path) -> dict:
    """{GPU name: {source, commit, date, KV dtype: {heads: [[most rows, implementation], ...]}}}."""
    report = json.loads(result.read_text())
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
        }
    }


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
    parser.add_argument("result", type=Path)
    found = derive(parser.parse_args().result)
    others = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    TABLE.write_text(json.dumps(others | found, indent=1) + "\n")
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
