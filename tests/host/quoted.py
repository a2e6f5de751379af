"""README, docs and result files, for the tests that compare them."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCS = "\n".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))
README_TEXT, DOCS_TEXT = (" ".join(text.split()) for text in (README, DOCS))
"""Without line breaks, for sentences."""


def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}_h200.json").read_text())


def one(rows: list[dict], **wanted) -> dict:
    (row,) = [r for r in rows if all(r[k] == v for k, v in wanted.items())]
    return row
