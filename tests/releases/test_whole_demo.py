"""The demo as a user starts it: SGLang's own draft loop, batches and pools, on the CPU."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_the_demo_accepts_every_draft():
    """Its exit code says that tokens equal plain greedy decoding, with either kind of drafts."""
    clean = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "nsa_backend", "demo"],
        env=clean | {"COLUMNS": "120"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "per-step lengths True" in done.stdout
    ours, shared = [line for line in done.stdout.splitlines() if " of 4 " in line]
    assert "per-step lengths (ours)" in ours
    assert "4.00 of 4" in ours
    assert "one shared length" in shared
    assert "2.30 of 4" in shared
