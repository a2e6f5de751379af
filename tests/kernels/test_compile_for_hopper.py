"""The kernels of sparse decode compile for Hopper and fit it: split rows spill no register, and shared memory suffices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")
SHARED_BYTES = 227 * 1024
"""Of one program on Hopper at most (CUDA C++ Programming Guide, compute capability 9.0)."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_variant_fits(compiled):
    assert len(compiled) == 7
    for name, found in compiled.items():
        assert found["spilled"] == 0 or name.endswith("split False"), name  # of rows so many that none is split
        assert found["shared"] <= SHARED_BYTES, name
