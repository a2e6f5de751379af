"""Commands on lanes of GPUs: who waits for whom, and what ends what."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

from nsa_backend.benchmarks import lanes
from nsa_backend.cli import bench

PLANS = sorted((Path(lanes.__file__).parent / "plans").glob("*.json"))


def job(name: str, gpus: list[int], command: str = "true", **others) -> dict:
    return {"name": name, "gpus": gpus, "command": command, "minutes": 1} | others


def written(folder: Path, *jobs: dict) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(jobs))
    return path


def run(folder: Path, *jobs: dict) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "nsa_backend.benchmarks.lanes", str(written(folder, *jobs)), str(folder / "out")]
    code = subprocess.run(command, check=False, capture_output=True, timeout=60).returncode
    return code, [line.split(" s  ", 1)[1] for line in (folder / "out" / "status.txt").read_text().splitlines()]


def stepped(folder: Path, *jobs: dict) -> lanes.Lanes:
    one = lanes.Lanes(folder / "out")
    one.step(lanes.plan(written(folder, *jobs)))
    return one


def test_scripts_find_each_other_where_python_leaves_their_folder_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert run(tmp_path, job("listed", [0], "{python} tests/e2e/run_all.py OUT.json --list"))[0] == 0


def test_a_job_takes_few_cores_unless_it_is_told(tmp_path, monkeypatch):
    def threads(name: str, **told: str) -> str:
        assert run(tmp_path, job(name, [0], "echo $OMP_NUM_THREADS", environment=told))[0] == 0
        return (tmp_path / "out" / name / "log").read_text().strip()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (threads("few"), threads("told", OMP_NUM_THREADS="9")) == ("4", "9")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads("around") == "7"


def test_jobs_have_gpus_and_folders_of_their_own_and_end_as_the_plan_says(tmp_path):
    """A job after one that failed runs, and one that needs it is left out; one whose time is up ends with all it started."""
    marker = tmp_path / "alive"
    code, said = run(
        tmp_path,
        job("first", [0, 3], 'echo "$CUDA_VISIBLE_DEVICES"; echo kept > $OUT/file; {python} -c "import nsa_backend"'),
        job("second", [3], "cat $PLAN_OUT/first/file; echo $NSA_BACKEND_CHECK", environment={"NSA_BACKEND_CHECK": "1"}),
        job("failing", [0], "exit 3"),
        job("next", [0], "true", after=["failing"]),
        job("dependent", [1], "true", needs=["failing"]),
        job("of the dependent", [1], "true", needs=["dependent"]),
        job("two words", [1], "echo here > $OUT/file"),
        job("endless", [2], f"(while true; do touch {marker}; sleep 0.1; done) & wait", minutes=0.02),
        job("after it", [2]),
    )
    before = marker.stat().st_mtime
    assert code == 1
    assert (tmp_path / "out" / "first" / "log").read_text() == "0,3\n"
    assert (tmp_path / "out" / "second" / "log").read_text() == "kept\n1\n"
    assert (tmp_path / "out" / "two-words" / "file").read_text() == "here\n"
    assert [line for line in said if line.startswith("failing: exit code 3")]
    for name in ("first", "second", "next", "after it"):
        assert any(line.startswith(f"{name}: exit code 0") for line in said), name
    assert "dependent: left out: failing did not succeed" in said
    assert "of the dependent: left out: dependent did not succeed" in said
    assert "endless: ended after its 0.02 minutes" in said
    time.sleep(0.5)
    assert marker.stat().st_mtime == before


def test_who_comes_first_is_served_first_on_every_gpu(tmp_path):
    wait = "sleep 60"
    one = stepped(
        tmp_path,
        job("on 0", [0], wait),
        job("on both", [0, 1], wait),
        job("on 1, later", [1], wait),
        job("on 2", [2], wait),
        job("beside", [0, 1], wait, beside=True),
    )
    try:
        assert one.running == ["on 0", "on 2", "beside"]
    finally:
        one.close()


def test_jobs_can_be_added_and_given_other_minutes_while_others_run(tmp_path):
    one = stepped(tmp_path, job("first", [0], "sleep 60"))
    try:
        more = lanes.plan(written(tmp_path, job("first", [0], "sleep 60"), job("second", [1], "sleep 60")))
        assert one.step(more)
        assert one.running == ["first", "second"]
        one.step([replace(each, minutes=0) if each.name == "second" else each for each in more])
        assert one.running == ["first"]
        half = tmp_path / "plan.json"
        half.write_text(half.read_text()[:-20])
        assert one.read_again(half, more) == one.read_again(half, more) == more
        said = (tmp_path / "out" / "status.txt").read_text()
        assert said.count("goes on with the plan as it was") == 1
    finally:
        one.close()


@pytest.mark.parametrize(
    ("jobs", "sentence"),
    [
        ([job("a", [0]), job("a", [1])], "two jobs are called a"),
        ([job("a", [0], after=["b"]), job("b", [0])], "a waits for b, which is no job before it"),
        ([job("a", [0], minuts=3)], "job a: got an unexpected keyword argument 'minuts'"),
        ([{"name": "a", "gpus": [0], "command": "true"}], "job a: missing 1 required positional argument: 'minutes'"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(tmp_path, jobs, sentence):
    with pytest.raises(ValueError, match=sentence):
        lanes.plan(written(tmp_path, *jobs))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_of_the_repository_can_be_read(path):
    jobs = lanes.plan(path)
    assert jobs
    assert all(job.command.startswith("{python} ") for job in jobs)
    words = [word for job in jobs for word in shlex.split(job.command)]
    ports = sorted(int(words[place + 1]) for place, word in enumerate(words) if word == "--port")
    assert all(after - before >= 2000 for before, after in pairwise(ports)), "runs at the same time need ports 2000 apart"
    assert max(ports, default=0) < 30000, "the system gives the ports from 32768 on to anybody"


COMMANDS = [pytest.param(job, id=f"{path.stem} {job.name}") for path in PLANS for job in lanes.plan(path)]


@pytest.mark.parametrize("job", COMMANDS)
@pytest.mark.slow
def test_a_command_of_a_plan_is_understood_by_what_it_runs(job, monkeypatch):
    _, *words = shlex.split(job.command)
    if words[0] == "tests/e2e/run_all.py":
        listed = subprocess.run([sys.executable, *words, "--list"], check=True, capture_output=True, timeout=60, text=True)
        assert "may leave some of them out" not in listed.stdout
    elif words[:3] == ["-m", "nsa_backend", "bench"]:
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        args = parser.parse_args(words[3:])
        assert args.out.parent == Path("$OUT")
    elif words[0] == "-m" and words[1] != "pytest":
        module = import_module(words[1])
        if hasattr(module, "parsed"):
            monkeypatch.setattr(sys, "argv", [words[1], *words[2:]])
            module.parsed()
    elif words[0] != "-c":
        path = words[0] if words[0] != "-m" else next(word for word in words if word.endswith(".py"))
        assert Path(path).exists()
