"""What engines leave of a machine: host memory, /dev/shm, GPU memory, and how many processes the kernel ended for it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

from nsa_backend.benchmarks.servers.gpu_memory import used_mib

SAMPLE_SECONDS = 2.0
GIB = 2**30
CGROUPS = (
    ("memory.current", "memory.max", "memory.events"),
    ("memory/memory.usage_in_bytes", "memory/memory.limit_in_bytes", "memory/memory.oom_control"),
)
"""Files of a container's memory under /sys/fs/cgroup, version 2 and version 1: in use, the limit, counts of kills."""

LEAST, MOST = ("mem_available_gib",), ("shmem_gib", "dev_shm_gib", "cgroup_gib")
SAME = ("dev_shm_size_gib", "cgroup_limit_gib")


def sample(root: Path = Path("/"), gpus: str | None = None) -> dict:
    """What is in use now, in GiB; a field that this machine does not tell is missing.

    Args:
        root: of the file system, for tests.
        gpus: as CUDA_VISIBLE_DEVICES names them; all if None.
    """
    found = {name: kib / 2**20 for name, kib in _meminfo(root).items()}
    if (shm := root / "dev/shm").is_dir():
        usage = shutil.disk_usage(shm)
        found |= {"dev_shm_gib": usage.used / GIB, "dev_shm_size_gib": usage.total / GIB}
    kills = _counted(root / "proc/vmstat", "oom_kill")
    for current, limit, events in CGROUPS:
        folder = root / "sys/fs/cgroup"
        if (used := _number(folder / current)) is None:
            continue
        found["cgroup_gib"] = used / GIB
        most = _number(folder / limit)
        if most is not None and most < 2**60:  # version 1 says that there is no limit by a number beyond all memory
            found["cgroup_limit_gib"] = most / GIB
        kills = max((n for n in (kills, _counted(folder / events, "oom_kill")) if n is not None), default=None)
        break
    if kills is not None:
        found["oom_kills"] = kills
    if mib := used_mib(gpus, seconds=5):
        found["gpu_gib"] = [one / 1024 for one in mib]
    return found


def _meminfo(root: Path) -> dict[str, int]:
    """Fields in KiB."""
    names = {"MemAvailable": "mem_available_gib", "Shmem": "shmem_gib"}
    lines = (line.split() for line in _lines(root / "proc/meminfo"))
    return {names[words[0][:-1]]: int(words[1]) for words in lines if words[0][:-1] in names}


def _lines(path: Path) -> list[str]:
    """Lines of a file of the kernel; none where it has no such file, or lets nobody read it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    words = _lines(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _counted(path: Path, name: str) -> int | None:
    return next((int(line.split()[1]) for line in _lines(path) if line.startswith(f"{name} ")), None)


def extremes(samples: list[dict]) -> dict:
    """The worst of each field, and how many processes the kernel ended meanwhile; GiB with two digits."""
    found: dict = {}
    for names, worst in ((LEAST, min), (MOST, max), (SAME, max)):
        for name in names:
            if values := [one[name] for one in samples if name in one]:
                found[name] = round(worst(values), 2)
    if kills := [one["oom_kills"] for one in samples if "oom_kills" in one]:
        found["oom_kills"] = kills[-1] - kills[0]
    if rows := [one["gpu_gib"] for one in samples if "gpu_gib" in one]:
        found["gpu_gib"] = [round(max(of_gpu), 2) for of_gpu in zip(*rows, strict=False)]
    return found


class Machine:
    """Samples in a thread of its own, within its `with` block."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, dict]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Machine:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        self.look()
        while not self._stop.wait(SAMPLE_SECONDS):
            self.look()

    def look(self) -> None:
        """Take one sample."""
        self._samples.append((time.monotonic(), sample(gpus=os.environ.get("CUDA_VISIBLE_DEVICES"))))

    def since(self, began: float) -> dict:
        """Extremes from the last sample before `began` (of time.monotonic) until one that is taken now."""
        self.look()
        kept = list(self._samples)
        first = max((number for number, (at, _) in enumerate(kept) if at <= began), default=0)
        return extremes([found for _, found in kept[first:]])
