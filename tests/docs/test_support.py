"""docs/support.md says of every model what the code says of it."""

import re
import sys

import deployment_table
from model_table import BEGIN, END, installed_models, tables
from quoted import ROOT

sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from workloads import CASES

PAGE = (ROOT / "docs" / "support.md").read_text()


def test_the_tables_are_what_the_code_says():
    _, _, after = PAGE.partition(BEGIN + "\n")
    assert after.partition("\n" + END)[0].strip() == tables(), "python tests/docs/model_table.py prints them anew"


def test_every_model_has_a_row_that_says_what_was_seen():
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.partition(BEGIN)[0].splitlines() if line.startswith("| ")]
    assert set(installed_models()) <= set(rows)


def test_every_case_of_a_deployment_is_one():
    seen = [row[deployment_table.SEEN] for row in deployment_table.on_the_page()]
    names = [name for cell in seen for name in re.findall(r"`([^`]+)`", cell) if "/" not in name]
    assert len(names) > 8
    for name in names:
        assert any(case.name == name or case.name.startswith(name.removesuffix("...")) for case in CASES), name


def test_the_deployments_are_what_the_start_up_checks_say():
    """What was seen of each is written by hand; the rest follows from the code."""
    page = deployment_table.on_the_page()
    wanted = deployment_table.rows({row[0]: row[deployment_table.SEEN] for row in page})
    assert page == wanted, "python tests/docs/deployment_table.py prints them anew"
