"""`pytest` without arguments, at the root of a checkout: what `make test` runs, in one process."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def bare(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_it_collects_every_folder():
    done = bare()
    assert done.returncode == 0, done.stdout + done.stderr
    folders = set(re.findall(r"^(tests/\w+)/\S+::", done.stdout, re.MULTILINE))
    assert folders == {"tests/kernels", "tests/backend", "tests/releases", "tests/docs", "tests/tools"}


def test_it_is_what_make_test_runs():
    (recipe,) = re.findall(r"^test: setup[^\n]*\n((?:\t[^\n]+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe == "\t$(BIN)/python -m pytest -q\n"


def test_for_a_gpu_it_says_what_to_run():
    """The same process would take the interpreter for its kernels, and pass without having compiled one."""
    done = bare("-m", "gpu")
    assert done.returncode != 0
    assert "run `make test-gpu` on a GPU" in done.stderr
