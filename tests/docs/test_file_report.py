"""Runs go into the file of their topic and release as one report, and the other reports of the file stay as they are."""

import json

import pytest

from nsa_backend.benchmarks.reports.file_report import main


def report(commit: str = "one", *rows: str, **others) -> dict:
    environment = {"gpu": "NVIDIA H200", "packages": {}, "commit": commit, "date": "2026-11-23"}
    return {"environment": environment, "command": "bench", "rows": [{"checkpoint": row} for row in rows]} | others


@pytest.fixture
def put(tmp_path):
    """Returns a function that puts reports into a file by the command, and the file."""
    file = tmp_path / "serve_0_5_23_h200.json"

    def run(name: str, *reports: dict, options: tuple[str, ...] = ()) -> None:
        paths = [tmp_path / f"{number}.json" for number in range(len(reports))]
        for path, one in zip(paths, reports, strict=True):
            path.write_text(json.dumps(one))
        main([str(file), name, *map(str, paths), *options])

    return run, file


def test_reports_stand_beside_one_another_and_a_name_has_one(put):
    run, file = put
    first, second = report("one", "a", "b"), report("two", "a")
    run("order", first)
    run("rounds", second)
    run("order", second)
    assert json.loads(file.read_text()) == {"reports": {"order": second, "rounds": second}}
    run("rounds", first)
    assert '{"checkpoint": "a"},\n{"checkpoint": "b"}' in file.read_text()  # a row a line, so that a change can be read


def test_runs_of_one_code_are_one_report_of_one_model(put):
    run, file = put
    file.write_text(json.dumps(report("old", "a")))
    run("new", report("one", "a", "b"), report("one", "b", "a"), options=("--checkpoint", "b", "--first", "then"))
    found = json.loads(file.read_text())["reports"]
    assert [*found] == ["then", "new"]
    assert found["new"] == report("one", "b", "b", command=["bench", "bench"])


@pytest.mark.parametrize(
    ("said", "filed"),
    [
        ("run_all.py /srv/x/answers/report.json --logs /srv/x", "run_all.py answers/report.json --logs x"),
        ('  File "/srv/site/sglang/srt/models/deepseek_v2.py", line 1', '  File "sglang/srt/models/deepseek_v2.py", line 1'),
        ("'model_path': '/srv/x/logs/checkpoint-deep', 1.5 GiB", "'model_path': 'logs/checkpoint-deep', 1.5 GiB"),
        (
            "GET http://127.0.0.1:30000/server_info/now, ours / builtin",
            "GET http://127.0.0.1:30000/server_info/now, ours / builtin",
        ),
    ],
)
def test_a_report_names_no_folder_of_the_machine_that_it_ran_on(put, said, filed):
    """What was measured stays as it is."""
    run, file = put
    for command, expected in ((said, filed), ([said, "bench"], [filed, "bench"])):
        run("order", report("one", "/srv/x/y", command=command, failures=[{"log": [said], "exit_code": 1}]))
        found = json.loads(file.read_text())["reports"]["order"]
        assert found == report("one", "/srv/x/y", command=expected, failures=[{"log": [filed], "exit_code": 1}])


@pytest.mark.parametrize(
    ("there", "reports", "options", "words"),
    [
        (report(), [report()], (), "without a name: --first"),
        (None, [{}], (), "no environment"),
        (None, [report("")], (), "names no commit"),
        (None, [report("one"), report("two")], (), "the runs differ in commit"),
        (None, [report("one", "a")], ("--checkpoint", "b"), "no row is of --checkpoint b"),
    ],
)
def test_what_cannot_be_put_there(put, there, reports, options, words):
    run, file = put
    if there:
        file.write_text(json.dumps(there))
    with pytest.raises(SystemExit, match=words):
        run("new", *reports, options=options)
    assert file.exists() == bool(there)
