"""The commands that run the tests: `make test`, `make test-all`, and `pytest` alone."""

import re
import shlex
import subprocess
import sys
import tomllib
from itertools import chain, combinations, pairwise
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = {"gpu", "e2e", "mutation", "support"}
"""Folders of tests/ that need a GPU, or that are no tests."""


def test_every_folder_of_tests_is_collected(pytestconfig):
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    assert {Path(path).name for path in pytestconfig.getini("testpaths")} == folders - BY_HAND


def test_both_commands_together_run_every_test_that_needs_no_gpu():
    """And properties twice: with few examples, and with all."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    (recipe,) = re.findall(r"^test-all: setup[^\n]*\n\t([^\n]+)\n", (ROOT / "Makefile").read_text(), re.MULTILINE)
    quick, rest = (
        Expression.compile(next(word for before, word in pairwise(words) if before == "-m" and " " in word))
        for words in (shlex.split(options), shlex.split(recipe))
    )
    names = ("gpu", "slow", "hypothesis")
    for marks in chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)):
        runs = [one.evaluate(lambda name, marks=marks, **_: name in marks) for one in (quick, rest)]
        assert any(runs) == ("gpu" not in marks), marks
        assert all(runs) == (marks == ("hypothesis",)), marks


@pytest.mark.slow
def test_for_a_gpu_it_says_what_to_run():
    """The same process would take the interpreter for its kernels, and pass without having compiled one."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests/backend"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "run `make test-gpu` on a GPU" in done.stderr
