"""docs/support.md says of every model what the code says of it."""

from model_table import BEGIN, END, installed_models, tables
from quoted import ROOT

PAGE = (ROOT / "docs" / "support.md").read_text()


def test_the_tables_are_what_the_code_says():
    _, _, after = PAGE.partition(BEGIN + "\n")
    assert after.partition("\n" + END)[0].strip() == tables(), "python tests/docs/model_table.py prints them anew"


def test_every_model_has_a_row_that_says_what_was_seen():
    rows = [line.split(" | ")[0].removeprefix("| ") for line in PAGE.partition(BEGIN)[0].splitlines() if line.startswith("| ")]
    assert set(installed_models()) <= set(rows)
