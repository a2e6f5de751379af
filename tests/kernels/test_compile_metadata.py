"""The metadata launch compiles for Hopper in every form that a release asks for, with a schedule and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_metadata.py")


def test_every_form_compiles_and_those_of_one_warp_wait_at_no_barrier(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    assert len(compiled) == 12
    assert {name for name, found in compiled.items() if found["barriers"]} <= {n for n in compiled if "wide tables" in n}
