"""`pytest` without arguments, at the root of a checkout: what `make test` runs, in one process."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bare() -> dict[str, subprocess.CompletedProcess]:
    """What pytest collects without arguments and with `-m gpu`, both started at once: each loads SGLang."""

    def collected(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    with ThreadPoolExecutor() as pool:
        everything, gpu = pool.submit(collected), pool.submit(collected, "-m", "gpu")
        return {"": everything.result(), "-m gpu": gpu.result()}


def test_it_collects_every_folder(bare):
    done = bare[""]
    assert done.returncode == 0, done.stdout + done.stderr
    folders = set(re.findall(r"^(tests/\w+)/\S+::", done.stdout, re.MULTILINE))
    assert folders == {"tests/kernels", "tests/backend", "tests/releases", "tests/docs", "tests/tools"}


def test_it_is_what_make_test_runs():
    (recipe,) = re.findall(r"^test: setup[^\n]*\n((?:\t[^\n]+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe == "\t$(BIN)/python -m pytest -q\n"


def test_for_a_gpu_it_says_what_to_run(bare):
    """The same process would take the interpreter for its kernels, and pass without having compiled one."""
    done = bare["-m gpu"]
    assert done.returncode != 0
    assert "run `make test-gpu` on a GPU" in done.stderr
