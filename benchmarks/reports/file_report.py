"""Put a report into the result file of its topic and release, beside the reports that the file has.

python -m nsa_backend.benchmarks.reports.file_report benchmarks/results/serve_0_5_23_h200.json rounds OUT.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nsa_backend.benchmarks.reports.report import dumped


def put(file: Path, name: str, report: dict) -> None:
    """Write `report` into `file` under this name, in place of one that has it.

    Raises:
        SystemExit: the report says nothing of where it ran, or the file holds one report and no names.
    """
    if "environment" not in report:
        raise SystemExit("the report has no environment: give one that a benchmark or an end-to-end run wrote")
    reports = {}
    if file.exists():
        found = json.loads(file.read_text())
        if "reports" not in found:
            raise SystemExit(f'{file} is one report without a name: move it into "reports" first, or choose another file')
        reports = found["reports"]
    bodies = [f"{json.dumps(key)}: {dumped(value).rstrip()}" for key, value in (reports | {name: report}).items()]
    file.write_text('{"reports": {\n' + ",\n".join(bodies) + "\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("name")
    parser.add_argument("report", type=Path)
    args = parser.parse_args()
    put(args.file, args.name, json.loads(args.report.read_text()))


if __name__ == "__main__":
    main()
