"""docs/support.md says of every model what the code says of it."""

import re
import sys

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
    _, _, section = PAGE.partition("## Deployments")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    told = [name for row in rows for name in re.findall(r"`([^`]+)`", row.partition("ases `")[1] + row.partition("ases `")[2])]
    told += [name for row in rows for name in re.findall(r"Case `([^`]+)`", row)]
    names = [name for name in told if "/" not in name]
    assert len(names) > 8
    for name in names:
        assert any(case.name == name or case.name.startswith(name.removesuffix("...")) for case in CASES), name
