"""A disk that fills up under the cache of compiled kernels: an error that says so, and a cache that still serves afterwards.

Triton writes the cache, for SGLang's kernels as for ours, so a server of either backend ends at the same place.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from in_a_process import ran

COMPILE = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
import compile_for_hopper as hopper
largest = int(sys.argv[2])  # of a file, in bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (largest, -1))
join = hopper.Join.of(8, 16)
constants = {"LATENT": 512, "BLOCK_S": join.parts, "BLOCK_D": join.latent, "COMPILED": True, "LSE": False}
print(json.dumps(hopper.resources(hopper.join_kernel, constants)))
"""
NO_LIMIT = -1


def compiled(cache: Path, largest: int) -> subprocess.CompletedProcess:
    return ran("-c", COMPILE, Path(__file__).parent, str(largest), cache=cache)


@pytest.mark.slow
def test_what_was_cut_short_is_not_taken_for_a_kernel_later(tmp_path):
    fresh = compiled(tmp_path / "with room", NO_LIMIT)
    assert fresh.returncode == 0, fresh.stderr
    full = compiled(tmp_path, largest=4096)
    assert full.returncode != 0
    assert "File too large" in full.stderr.splitlines()[-1]
    again = compiled(tmp_path, NO_LIMIT)
    assert (again.returncode, again.stdout) == (0, fresh.stdout), again.stderr
