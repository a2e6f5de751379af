"""Memory of some processes on the GPUs, as nvidia-smi tells it."""

from __future__ import annotations

import pytest

from nsa_backend.benchmarks.servers.gpu_memory import by_process_mib


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Returns a function of what nvidia-smi prints from then on, and of its exit code."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))

    def tells(text: str, code: int = 0) -> None:
        program.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
        program.chmod(0o755)

    return tells


def test_memory_of_a_process_is_that_on_all_gpus(nvidia_smi):
    nvidia_smi("11, 500\\n12, 40\\n11, 300\\n13, 7\\n")
    assert by_process_mib() == {11: 800, 12: 40, 13: 7}
    nvidia_smi("")
    assert by_process_mib() == {}


def test_memory_that_nobody_tells_is_unknown(nvidia_smi):
    assert by_process_mib() is None
    nvidia_smi("11, [N/A]\\n")
    assert by_process_mib() is None
    nvidia_smi("No devices were found\\n", code=6)
    assert by_process_mib() is None
