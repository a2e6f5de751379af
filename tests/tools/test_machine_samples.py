"""Samples of the machine that an end-to-end run takes while engines run."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
import machine

GIB = 2**30


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Returns a function of (path, text) that writes a file of the kernel; no GPU is there."""
    monkeypatch.setattr(machine, "used_mib", lambda gpus, seconds: [])

    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return put


def test_a_sample_of_a_container(files, tmp_path, monkeypatch):
    files("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable:  {3 * 2**20} kB\nShmem: {2**19} kB\n")
    files("proc/vmstat", "oom_kill 3\n")
    files("sys/fs/cgroup/memory.current", f"{5 * GIB}\n")
    files("sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    files("sys/fs/cgroup/memory.events", "low 0\noom 9\noom_kill 4\noom_group_kill 0\n")
    monkeypatch.setattr(machine, "used_mib", lambda gpus, seconds: [1024, 2048] if gpus == "2,3" else [])
    assert machine.sample(tmp_path, "2,3") == {
        "mem_available_gib": 3.0,
        "shmem_gib": 0.5,
        "cgroup_gib": 5.0,
        "cgroup_limit_gib": 8.0,
        "oom_kills": 4,
        "gpu_gib": [1.0, 2.0],
    }


def test_what_a_machine_does_not_tell_is_missing(files, tmp_path):
    assert machine.sample(tmp_path) == {}
    files("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{2 * GIB}\n")
    files("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    files("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert machine.sample(tmp_path) == {"cgroup_gib": 2.0, "oom_kills": 1}
    files("sys/fs/cgroup/memory.current", f"{GIB}\n")
    files("sys/fs/cgroup/memory.max", "max\n")
    assert machine.sample(tmp_path) == {"cgroup_gib": 1.0}


def test_the_worst_of_all_samples():
    samples = [
        {"mem_available_gib": 3.0, "dev_shm_gib": 1.0, "dev_shm_size_gib": 2.0, "oom_kills": 4, "gpu_gib": [1.0, 9.0]},
        {"mem_available_gib": 0.126, "dev_shm_gib": 1.5, "dev_shm_size_gib": 2.0, "oom_kills": 6, "gpu_gib": [2.0, 8.0]},
        {"mem_available_gib": 2.0},
    ]
    worst = {"mem_available_gib": 0.13, "dev_shm_gib": 1.5, "dev_shm_size_gib": 2.0, "oom_kills": 2, "gpu_gib": [2.0, 9.0]}
    assert machine.extremes(samples) == worst
    assert machine.extremes([]) == {}


def test_an_engine_is_told_the_samples_of_its_own_life(monkeypatch):
    """What another engine took before it started is not held against it."""
    available = iter([1.0, 60.0, 40.0, 50.0, 45.0])
    monkeypatch.setattr(machine, "sample", lambda **options: {"mem_available_gib": next(available)})
    watched = machine.Machine()
    watched.look()
    watched.look()
    began = time.monotonic()
    watched.look()
    assert watched.since(began) == {"mem_available_gib": 40.0}
    assert watched.since(0.0) == {"mem_available_gib": 1.0}
