"""A report goes into the file of its topic and release, and the other reports of the file stay as they are."""

import json

import pytest

from nsa_backend.benchmarks.reports.file_report import put

FIRST, SECOND = ({"environment": {"commit": c}, "rows": [{"a": 1}, {"a": 2}]} for c in ("one", "two"))


def test_reports_stand_beside_one_another_and_a_name_has_one(tmp_path):
    file = tmp_path / "serve_0_5_23_h200.json"
    put(file, "order", FIRST)
    put(file, "rounds", SECOND)
    put(file, "order", SECOND)
    assert json.loads(file.read_text()) == {"reports": {"order": SECOND, "rounds": SECOND}}
    assert '{"a": 1},\n{"a": 2}' in file.read_text()  # a row a line, so that a change can be read


@pytest.mark.parametrize(("there", "report", "words"), [(FIRST, SECOND, "without a name"), (None, {}, "no environment")])
def test_what_cannot_be_put_there(tmp_path, there, report, words):
    file = tmp_path / "x.json"
    if there:
        file.write_text(json.dumps(there))
    with pytest.raises(SystemExit, match=words):
        put(file, "new", report)
    assert file.exists() == bool(there)
