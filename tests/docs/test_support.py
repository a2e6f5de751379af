"""docs/support.md says of every model what the code says of it."""

import re
import sys
from pathlib import Path

import deployment_table
from model_table import BEGIN, END, installed_models, tables

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from workloads import CASES  # noqa: E402

PAGE = (ROOT / "docs" / "support.md").read_text()


def test_the_tables_are_what_the_code_says():
    _, _, after = PAGE.partition(BEGIN + "\n")
    assert after.partition("\n" + END)[0].strip() == tables(), "python tests/docs/model_table.py prints them anew"


def test_every_model_has_a_row_that_says_what_was_seen():
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.partition(BEGIN)[0].splitlines() if line.startswith("| ")]
    assert set(installed_models()) <= set(rows)


RAN = re.findall(r"^- \*\*(.+?)\*\*: (.+(?:\n  .+)*)", PAGE.partition("### What ran")[2].partition("###")[0], re.MULTILINE)
"""(deployment, what ran of it)."""


def test_every_case_of_a_deployment_is_one():
    names = [name for _, text in RAN for name in re.findall(r"`([^`]+)`", " ".join(text.split())) if "/" not in name]
    assert len(names) > 8
    for name in names:
        assert any(case.name == name or case.name.startswith(name.removesuffix("...")) for case in CASES), name


def test_every_deployment_says_what_ran_of_it():
    served, refused = (dict.fromkeys(row[0] for row in table[1:]) for table in deployment_table.on_the_page())
    assert [name for name, _ in RAN if name in served] == list(served)
    assert {name for name, _ in RAN} <= set(served | refused)
    for name, seen in deployment_table.seen_on_the_page().items():
        assert ("H200" in seen) == ("benchmarks/results/" in dict(RAN)[name] and "not run" not in seen), name


def test_the_deployments_are_what_the_start_up_checks_say():
    """What was seen of each is written by hand; the rest follows from the code."""
    wanted = deployment_table.tables(deployment_table.seen_on_the_page())
    assert deployment_table.on_the_page() == wanted, "python tests/docs/deployment_table.py prints them anew"
