"""Many commands on the GPUs of one machine: each starts when its GPUs are free and when what it waits for has ended.

    python -m nsa_backend.benchmarks.lanes PLAN.json OUT

PLAN is a list of jobs, first come, first served on every GPU:

    name      what it is called, and its folder in OUT
    gpus      numbers of the GPUs that it has to itself; CUDA_VISIBLE_DEVICES says them to it
    command   for a shell; {python} is the interpreter of this process, $OUT the job's folder, $PLAN_OUT that of all
    minutes   after which it is ended, with all that it started
    after     names of jobs that must have ended before, however they did
    needs     names of jobs that must have succeeded before; otherwise this one is left out
    beside    true: it starts beside whatever runs on its GPUs, and others beside it; for what is not timed
    environment  variables that it gets besides

What a job prints is in OUT/NAME/log, where dashes stand for spaces of the name, and OUT/status.txt grows by a line as each
begins and ends. PLAN is read again every second, so jobs can be added while others run, and those that run can have more
minutes. Exits with 0 where every job succeeded, else 1; one that was left out has not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from nsa_backend.benchmarks.servers.process_trees import end_all

SCRIPTS = Path("tests/e2e")
"""Whose scripts import each other; jobs run in the checkout's root."""

THREADS = {"OMP_NUM_THREADS": "4"}
"""Of a job's processes, unless they are told: by itself torch takes all cores in each, and two that write checkpoints held up
eighteen servers that started beside them on 64 cores."""

ENDING = 10.0
"""Seconds between asking a job to end and killing it."""


@dataclass(frozen=True)
class Job:
    """One command of a plan."""

    name: str
    gpus: list[int]
    command: str
    minutes: float
    after: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    beside: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Its folder in OUT; without spaces, so that a command need not quote $OUT."""
        return self.name.replace(" ", "-")


def plan(path: Path) -> list[Job]:
    """The jobs of a file.

    Raises:
        ValueError: a job has a field that there is not, lacks one, waits for a job that does not come before it, or has the
            name of another.
    """
    jobs: list[Job] = []
    for entry in json.loads(path.read_text()):
        try:
            job = Job(**entry)
        except TypeError as error:
            raise ValueError(f"{path}, job {entry.get('name', len(jobs))}: {str(error).partition('() ')[2]}") from error
        known = [one.name for one in jobs]
        if job.folder in (one.folder for one in jobs):
            raise ValueError(f"{path}: two jobs are called {job.name}, and would write into one folder: rename one")
        for name in (*job.after, *job.needs):
            if name not in known:
                raise ValueError(f"{path}: {job.name} waits for {name}, which is no job before it: put it there")
        jobs.append(job)
    return jobs


class Lanes:
    """The jobs of one plan, as far as they have come."""

    def __init__(self, out: Path):
        self._out = out.absolute()
        self._out.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self._unread = ""  # why the plan could not be read again
        self._running: dict[str, tuple[Job, subprocess.Popen, float]] = {}
        self.succeeded: dict[str, bool] = {}
        """Whether a job that is over did, by name; one that was left out did not."""

    @property
    def running(self) -> list[str]:
        """Names of the jobs that run now."""
        return list(self._running)

    def step(self, jobs: list[Job]) -> bool:
        """End what is over, start what can start; whether anything is left to do."""
        now = {job.name: job for job in jobs}
        for name, (job, process, began) in list(self._running.items()):
            self._look_at(name, now.get(name, job).minutes, process, time.monotonic() - began)
        taken: set[int] = {gpu for job, *_ in self._running.values() if not job.beside for gpu in job.gpus}
        for job in jobs:
            if job.name in self.succeeded or job.name in self._running:
                continue
            failed = [name for name in job.needs if self.succeeded.get(name) is False]
            if failed:
                self._over(job.name, False, f"left out: {failed[0]} did not succeed")
            elif any(name not in self.succeeded for name in (*job.after, *job.needs)):
                continue
            elif job.beside:
                self._start(job)
            else:
                if taken.isdisjoint(job.gpus):
                    self._start(job)
                taken |= set(job.gpus)  # those who come later wait behind it, whether it runs or waits itself
        return any(job.name not in self.succeeded for job in jobs)

    def read_again(self, path: Path, jobs: list[Job]) -> list[Job]:
        """The jobs of the file now; `jobs` where it cannot be read, being half written, and the status says so once."""
        try:
            jobs, self._unread = plan(path), ""
        except (OSError, ValueError) as error:
            if str(error) != self._unread:
                self._unread = str(error)
                self._say(f"goes on with the plan as it was: {error}")
        return jobs

    def _start(self, job: Job) -> None:
        folder = self._out / job.folder
        folder.mkdir(exist_ok=True)
        own = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, job.gpus)),
            "OUT": str(folder),
            "PLAN_OUT": str(self._out),
            "PYTHONUNBUFFERED": "1",
        }
        paths = {}
        if os.environ.get("PYTHONSAFEPATH"):  # which keeps a script's own folder off sys.path
            paths["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SCRIPTS.resolve()), os.environ.get("PYTHONPATH"))))
        environment = THREADS | os.environ | paths | job.environment | own
        command = job.command.replace("{python}", sys.executable)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, shell=True, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._running[job.name] = job, process, time.monotonic()
        self._say(f"{job.name} begins on {job.gpus}")

    def _look_at(self, name: str, minutes: float, process: subprocess.Popen, seconds: float) -> None:
        code = process.poll()
        if code is None and seconds < 60 * minutes:
            return
        end_all(process, asked=ENDING)
        del self._running[name]
        how = f"ended after its {minutes:g} minutes" if code is None else f"exit code {code} after {seconds:.0f} s"
        self._over(name, code == 0, how)

    def _over(self, name: str, succeeded: bool, how: str) -> None:
        self.succeeded[name] = succeeded
        self._say(f"{name}: {how}")

    def _say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:7.1f} s  {text}"
        print(line, flush=True)
        with (self._out / "status.txt").open("a") as status:
            status.write(line + "\n")

    def close(self) -> None:
        """End what still runs."""
        for _, process, _ in self._running.values():
            end_all(process, asked=ENDING)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        jobs = plan(args.plan)
    except ValueError as error:
        sys.exit(str(error))
    lanes = Lanes(args.out)
    try:
        while lanes.step(jobs):
            time.sleep(1)
            jobs = lanes.read_again(args.plan, jobs)
    finally:
        lanes.close()
    return 0 if all(lanes.succeeded.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
