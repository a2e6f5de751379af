"""Which end-to-end cases a change owes."""

from __future__ import annotations

from types import SimpleNamespace

from owed import owed, seen

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
