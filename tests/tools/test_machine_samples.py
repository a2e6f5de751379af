"""Samples of the machine that an end-to-end run takes while engines run."""

import machine

GIB = 2**30


def test_a_sample_of_a_container(tmp_path, monkeypatch):
    files = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {3 * 2**20} kB\nShmem: {2**19} kB\n",
        "proc/vmstat": "oom_kill 3\n",
        "sys/fs/cgroup/memory.current": f"{5 * GIB}\n",
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.events": "low 0\noom 9\noom_kill 4\noom_group_kill 0\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(machine, "used_mib", lambda gpus, seconds: [1024, 2048] if gpus == "2,3" else [])
    assert machine.sample(tmp_path, "2,3") == {
        "mem_available_gib": 3.0,
        "shmem_gib": 0.5,
        "cgroup_gib": 5.0,
        "cgroup_limit_gib": 8.0,
        "oom_kills": 4,
        "gpu_gib": [1.0, 2.0],
    }
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert "cgroup_limit_gib" not in machine.sample(tmp_path)
    assert machine.sample(tmp_path / "elsewhere") == {}


def test_the_worst_of_all_samples():
    samples = [
        {"mem_available_gib": 3.0, "dev_shm_gib": 1.0, "dev_shm_size_gib": 2.0, "oom_kills": 4, "gpu_gib": [1.0, 9.0]},
        {"mem_available_gib": 0.126, "dev_shm_gib": 1.5, "dev_shm_size_gib": 2.0, "oom_kills": 6, "gpu_gib": [2.0, 8.0]},
        {"mem_available_gib": 2.0},
    ]
    worst = {"mem_available_gib": 0.13, "dev_shm_gib": 1.5, "dev_shm_size_gib": 2.0, "oom_kills": 2, "gpu_gib": [2.0, 9.0]}
    assert machine.extremes(samples) == worst
    assert machine.extremes([]) == {}
