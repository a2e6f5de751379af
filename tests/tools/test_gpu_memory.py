"""Memory of some processes on the GPUs, as nvidia-smi tells it."""

from __future__ import annotations

import pytest

from nsa_backend.benchmarks.gpu_memory import of_processes_mib


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Returns a function of what nvidia-smi prints from then on, and of its exit code."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))

    def tells(text: str, code: int = 0) -> None:
        program.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
        program.chmod(0o755)

    return tells


def test_memory_is_that_of_the_processes_asked_for_on_all_gpus(nvidia_smi):
    nvidia_smi("11, 500\\n12, 40\\n11, 300\\n13, 7\\n")
    assert of_processes_mib({11, 13}) == 807
    assert of_processes_mib([99]) == 0
    nvidia_smi("")
    assert of_processes_mib({11}) == 0


def test_memory_that_nobody_tells_is_unknown(nvidia_smi):
    assert of_processes_mib({11}) is None
    nvidia_smi("11, [N/A]\\n")
    assert of_processes_mib({11}) is None
    nvidia_smi("No devices were found\\n", code=6)
    assert of_processes_mib({11}) is None
