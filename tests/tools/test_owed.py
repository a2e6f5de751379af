"""Which end-to-end cases a change owes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from owed import committed, is_since, owed, seen
from workloads import CASES

RELEASE = "0.5.23"


def report(commit: str, *cases: str, release: str = RELEASE, failed: tuple[str, ...] = ()) -> dict:
    rows = [{"case": case, "workloads": {"8x300": {"ours": {"mean": 3.9}}}} for case in cases]
    rows += [{"case": case, "workloads": {"8x300": {"builtin": {"mean": 2.3}}}} for case in failed]
    return {"environment": {"commit": commit, "packages": {"sglang": release}}, "rows": rows}


def test_what_an_older_commit_another_release_or_the_other_side_gave_does_not_count():
    reports = [
        report("new", "a", failed=("d",)),
        report("old", "b"),
        report("new", "c", release="0.5.17"),
    ]
    assert seen(reports, RELEASE, lambda commit: commit == "new") == {"a"}


def test_cases_of_other_machines_are_not_owed():
    def case(name: str, gpus: int, here: bool = True, ranks: int = 1) -> SimpleNamespace:
        return SimpleNamespace(name=name, gpus=gpus, ranks_per_gpu=ranks, runs_here=lambda: here)

    cases = [case("a", 1), case("b", 2), case("c", 1, here=False), case("d", 1), case("e", 2, ranks=4)]
    assert owed(cases, 1, {"d"}) == ["a"]
    assert owed(cases, 2, set(), ranks_per_gpu=4) == ["e"]
    assert owed(cases, 2, set()) == ["b"]


@pytest.fixture
def history(tmp_path, monkeypatch) -> list[str]:
    """Two commits of a repository in the test's folder, the older one first."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")

    def git(*words: str) -> str:
        given = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(given, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    for name in ("older", "newer"):
        git("commit", "-q", "--allow-empty", "-m", name)
    return [git("rev-parse", "--short", name) for name in ("HEAD~1", "HEAD")]


def test_since_a_commit(history, tmp_path):
    older, newer = history
    assert is_since(older, tmp_path)(newer)
    assert is_since(older, tmp_path)(older)
    assert not is_since(newer, tmp_path)(older)
    assert not is_since(newer, tmp_path)("unknown")
    with pytest.raises(SystemExit, match="unknown is no commit of this history: name one of `git log`"):
        is_since("unknown", tmp_path)


def test_every_report_has_what_it_is_asked_for():
    """Cases are renamed and go; those that are still there under their names must be found."""
    known = seen(committed(), RELEASE, lambda commit: True)
    assert {case.name for case in CASES} & known
    assert "n3 fa3" in known
