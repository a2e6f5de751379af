"""Run every case with ours and with SGLang's built-in backend on one GPU, several engines side by side, and judge.

    python tests/e2e/run_all.py OUT.json [--cases 'n3 fa3' ...] [--jobs 4] [--logs DIR]
    python tests/e2e/run_all.py OUT.json --list

OUT.json has after every engine what there is until then; ties are asked for as soon as both sides of a case are over.
CUDA_VISIBLE_DEVICES chooses the GPU; runs on different GPUs share neither ports nor folders, so that the cases can be spread
with --cases; file_report joins their reports. Exits with 1 where an accept length is below its floor, a case failed or was left
out, or an output differs without a tie to explain it.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean

from case import workload_of
from endings import facts
from engines import PORTS, first_device, refuse_taken_ports, run_to_its_end
from machine import Machine
from ports import begins, judge_begin, ports_of_run
from reports import report_of, show, write
from ties import asking_alike, differences, judge
from workloads import CASES, WORKLOADS, Case

from nsa_backend.benchmarks.checkpoints import eagle3, faithful
from nsa_backend.benchmarks.checkpoints.faithful_models import MODELS
from nsa_backend.benchmarks.servers.server import APART_SECONDS, BACKENDS, SIDE_BY_SIDE
from nsa_backend.releases import generation_of, installed

HERE = Path(__file__).resolve().parent

START_SECONDS = {"nsa": 40, "dsa": 80}
"""An engine's start beside three others, with kernels compiled; the first one without caches takes up to four minutes."""
ASKING_SECONDS = 120.0
"""Of a run with both sides, for asking whether parted outputs are ties: an engine's start and one token a question."""
MOST_GPUS_BESIDE = 2
"""Of engines that run side by side on the same GPUs. Ranks of one wait in their collectives while another one's kernels run:
four engines of eight GPUs each decoded one to five tokens a second."""
WAVE_SECONDS = {1: 2.0, 2: 8.0, 4: 25.0}
"""A wave of requests, by ranks that share a GPU; estimated from about 20 collectives a round where they do."""


@dataclass
class Run:
    """What has come of a run so far: (result or None, log) by (case name, backend)."""

    checkpoints: dict[tuple[str, str], Path]  # by model and shape
    cases: list[Case]
    args: argparse.Namespace
    machine: Machine
    began: float = field(default_factory=time.monotonic)
    results: dict = field(default_factory=dict)
    endings: dict = field(default_factory=dict)  # of engines without a result, what `endings.facts` keeps
    took: list[float] = field(default_factory=list)  # seconds of engines, in the order in which they ended
    over: set = field(default_factory=set)  # (case name, backend) of engines that have ended, or had no time
    kept: dict[str, list[dict]] = field(default_factory=dict)  # where outputs part, by case of which all engines are over
    judged: set[int] = field(default_factory=set)  # numbers of the groups of cases whose ties were asked for
    starting: threading.Lock = field(default_factory=threading.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def left(self) -> float:
        """Seconds of --minutes that are left."""
        return self.began + 60 * self.args.minutes - time.monotonic()

    def left_for_engines(self) -> float:
        """The same without those that asking about ties may take, half of --minutes at most."""
        both = set(BACKENDS) <= set(self.args.backends)
        return self.left() - both * min(ASKING_SECONDS, 30 * self.args.minutes)

    @property
    def an_engine(self) -> float:
        """Seconds that the next engine takes at least: those of the quickest of as many as run side by side.

        The slowest would not do: the first ones may wait minutes for kernels that later ones find compiled.
        """
        return min(self.took[-self.args.jobs :], default=0.0)

    def parted(self) -> list[tuple[Case, list[dict]]]:
        """Where outputs of ours part from the built-in's, if there are any, and from another run of ours, by case."""
        return [(case, self._differences(case)) for case in self.cases if self._outputs(case, "ours") is not None]

    def are_over(self, cases: list[Case]) -> bool:
        """Whether no engine of these is to come."""
        return all((case.name, backend) in self.over for case in cases for backend in self.args.backends)

    def _outputs(self, case: Case, backend: str) -> dict | None:
        return self.results.get((case.name, backend), (None, ""))[0]

    def _differences(self, case: Case) -> list[dict]:
        if case.name in self.kept:
            return self.kept[case.name]
        ours = self._outputs(case, "ours")
        found = [] if ours is None else differences(case, ours, self._outputs(case, "builtin"))
        if self.are_over([case]):
            self.kept[case.name] = found
        return found

    def ask(self) -> None:
        """Ask about the ties of each group of cases that are over, once; a run that is cut has what was asked until then."""
        for number, group in enumerate(asking_alike(self.cases)):
            with self.writing:
                if number in self.judged or not self.are_over(group):
                    continue
                self.judged.add(number)
                found = [difference for case in group for difference in self._differences(case)]
            if found:
                seconds = min(self.args.engine_seconds, max(self.left(), ASKING_SECONDS))
                port = judge_begin(number, self.args.port)
                asked = [dict(difference) for difference in found]  # others write the report meanwhile
                judge(self.checkpoints[group[0].checkpoint], group[0], asked, self.args.logs, port, seconds)
                with self.writing:
                    for difference, answered in zip(found, asked, strict=True):
                        difference |= answered
                    self.write(self.parted())

    def write(self, parted: list[tuple[Case, list[dict]]]) -> dict:
        found = [difference for _, of_case in parted for difference in of_case]
        command = " ".join(["python", "tests/e2e/run_all.py", *sys.argv[1:]])
        seconds = time.monotonic() - self.began
        report = report_of(self.cases, self.args.backends, self.results, found, command, seconds, self.endings)
        report["machine"] = self.machine.since(self.began)
        write(report, self.args.out)
        return report


@cache
def waves_of(workload: str) -> int:
    return len(WORKLOADS[workload]())


def estimate(case: Case, backends: int) -> float:
    """Minutes that a case takes, one engine after the other."""
    waves = sum(waves_of(workload_of(name)) for name in case.measured())
    starts = 2 if case.disaggregated else 1  # three servers, side by side
    wave = WAVE_SECONDS[case.ranks_per_gpu]
    return backends * (starts * START_SECONDS[generation_of(installed()).adapter] + wave * waves) / 60


def minutes_needed(cases: list[Case], args: argparse.Namespace) -> int:
    """--minutes in which all engines of these cases end, `args.jobs` side by side, and each group is asked about its ties."""
    both = set(BACKENDS) <= set(args.backends)
    engines = len(cases) * len(args.backends) + both * len(asking_alike(cases))
    longest = max(estimate(case, 1) for case in cases)
    return math.ceil(math.ceil(engines / args.jobs) * longest + both * ASKING_SECONDS / 60)


def launch(run: Run, case: Case, backend: str, port: int) -> tuple[dict | None, str]:
    """(what the case gave or None, its log)."""
    name = f"{case.name}-{backend}".replace(" ", "_")
    out, log = run.args.logs / f"{name}.json", run.args.logs / f"{name}.log"
    out.unlink(missing_ok=True)
    with run.starting:
        time.sleep(APART_SECONDS)
    command = [sys.executable, str(HERE / "run_case.py"), str(run.checkpoints[case.checkpoint]), case.name, str(out)]
    seconds = min(run.args.engine_seconds, max(run.left_for_engines(), 1))
    environment = os.environ | SIDE_BY_SIDE | {"NSA_BACKEND_DISABLE": BACKENDS[backend]}
    began, exits = time.monotonic(), []
    code = run_to_its_end([*command, "--port", str(port)], log, environment, seconds, exits)
    text = log.read_text(errors="replace")
    if code == 0 and out.exists():
        return json.loads(out.read_text()), text
    run.endings[case.name, backend] = facts(exits, code, text, run.machine.since(began), time.monotonic() - began)
    return None, text


def run_engines(run: Run) -> None:
    """Every case with every backend, as far as there is time."""
    engines = [(case, backend) for case in run.cases for backend in run.args.backends]
    ports = begins([case for case, _ in engines], run.args.port)
    items = [(port, *engine) for port, engine in zip(ports, engines, strict=True)]

    def engine(port: int, case: Case, backend: str) -> None:
        began = time.monotonic()
        if run.left_for_engines() < run.an_engine:
            run.over.add((case.name, backend))
            return
        result, log = launch(run, case, backend, port)
        with run.writing:
            run.results[case.name, backend] = result, log
            run.over.add((case.name, backend))
            run.took += [time.monotonic() - began] * (result is not None)
            run.write(run.parted())
        means = {w: round(fmean(c["accept"]), 3) for w, c in (result or {}).items()}
        why = run.endings.get((case.name, backend), {}).get("ended", "")
        print(f"{case.name}, {backend}: {means or f'FAILED: {why}'}, {time.monotonic() - began:.0f} s", flush=True)

    def job(item: tuple[int, Case, str]) -> None:
        engine(*item)
        run.ask()

    # Without caches the first start compiles kernels that all others load, so it runs alone.
    alone = 0 if run.args.warm else 1
    for item in items[:alone]:
        job(item)
    with ThreadPoolExecutor(run.args.jobs) as pool:
        list(pool.map(job, items[alone:]))


def written(model: str, shape: str, folder: Path) -> Path:
    out = folder / f"checkpoint-{model}-{shape}"
    return faithful.write(out, shape=faithful.ALL_SHAPES[shape], model=MODELS[model])


def write_dense_drafts(cases: list[Case], checkpoints: dict[tuple[str, str], Path]) -> None:
    """Beside each checkpoint whose cases ask for one."""
    for target in {checkpoints[case.checkpoint] for case in cases if case.dense_draft}:
        eagle3.write(eagle3.beside(target), target)


def arguments() -> tuple[argparse.Namespace, list[Case]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="*", help="all by default")
    parser.add_argument("--gpus", type=int, default=1, help="run the cases for this number of GPUs")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, help="run the cases whose ranks share GPUs so")
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument("--jobs", type=int, help="engines side by side: 4 by default, of more than two GPUs or shared ones 1")
    parser.add_argument(
        "--minutes", type=float, default=60, help="no engine starts that cannot end in time; asked about ties within it"
    )
    parser.add_argument("--engine-seconds", type=float, default=420, help="after which an engine counts as hanging")
    parser.add_argument("--warm", action="store_true", help="kernels are compiled: the first engine need not run alone")
    parser.add_argument("--port", type=int, default=12000 + PORTS * first_device())
    place = f"nsa-e2e-{installed()}-gpu{os.environ.get('CUDA_VISIBLE_DEVICES', '').replace(',', '-')}"
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / place)
    parser.add_argument("--list", action="store_true", help="the cases and their minutes; run nothing")
    args = parser.parse_args()
    args.jobs = args.jobs or (4 if args.ranks_per_gpu == 1 and args.gpus <= MOST_GPUS_BESIDE else 1)
    on_these = [c for c in CASES if (c.gpus, c.ranks_per_gpu) == (args.gpus, args.ranks_per_gpu) and c.runs_here()]
    if unknown := set(args.cases or ()) - {c.name for c in on_these}:
        where = f"{args.gpus} GPUs, ranks per GPU {args.ranks_per_gpu}, of this SGLang"
        parser.error(f"no case {sorted(unknown)} on {where}; there are {[c.name for c in on_these]}")
    return args, [c for c in on_these if not args.cases or c.name in args.cases]


def main() -> int:
    args, cases = arguments()
    for case in cases:
        print(f"{estimate(case, len(args.backends)):5.1f} minutes  {case.name}")
    minutes = sum(estimate(case, len(args.backends)) for case in cases)
    print(f"{minutes:5.1f} minutes in all, {minutes / args.jobs:.1f} with {args.jobs} engines side by side", flush=True)
    if (needed := minutes_needed(cases, args)) > args.minutes:
        print(f"--minutes {args.minutes:g} may leave some of them out: {needed} are enough", flush=True)
    if args.list:
        return 0
    refuse_taken_ports(ports_of_run([case for case in cases for _ in args.backends], args.port))
    args.logs.mkdir(parents=True, exist_ok=True)
    # Gigabytes, which nobody wants who keeps the logs.
    with tempfile.TemporaryDirectory(prefix="nsa-e2e-") as folder, Machine() as machine:
        checkpoints = {which: written(*which, Path(folder)) for which in {case.checkpoint for case in cases}}
        write_dense_drafts(cases, checkpoints)
        run = Run(checkpoints, cases, args, machine)
        run_engines(run)
        report = run.write(run.parted())
    show(report)
    return 1 if report["failures"] or report["problems"] or report["not_measured"] else 0


if __name__ == "__main__":
    sys.exit(main())
