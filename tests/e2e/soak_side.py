"""One side of a soak run: a server under changing load, with aborts and retractions; outputs, accept length, memory and log.

    python tests/e2e/soak_side.py OUT.json --side ours [--gpu 0] [--topology pd] [--minutes 8] [--port 9000] [--seed 0]
        [--faults [NAME ...]]

Each template runs alone first; under load its output must be the same, up to ties. A run that fails, gets SIGTERM or has no
time left writes what it has. soak.py runs both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from replays import replayed
from soak_answers import Template, group_differences, judge_answer, judge_tie
from soak_faults import FAULTS, add_faults, faults, gpu_shared, malformed_under_load
from soak_judge import problems_of, summary
from soak_server import BUILTIN, SIDES, TOPOLOGIES, memory
from soak_traffic import FAILURES, Client, Traffic, make_templates, request_body

from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.reports.report import environment
from nsa_backend.benchmarks.servers.process_trees import end_all
from nsa_backend.benchmarks.servers.server import SIDE_BY_SIDE

CALM = 0.2  # of all the time, what the references may take
FAULT_SECONDS = 100.0  # that a fault which ends a server takes, with a start after it
SHARING_SECONDS = 120.0  # that sides on one GPU wait for one another before such faults
TAIL_SECONDS, DRAIN_SECONDS, LAST_SECONDS = 60.0, 20.0, 10.0  # after the load: all, waiting for requests, writing the JSON
IDLE_SECONDS = 6.0  # SGLang aborts a closed stream after 2 s, and counts its tokens whenever it is idle
SAMPLE_SECONDS, PROGRESS_SECONDS, QUESTIONS = 2.0, 15.0, 600


@dataclass
class Soak:
    """What has come of a run so far."""

    client: Client
    traffic: Traffic
    templates: list[Template]
    seconds: float
    began: float
    port: int = 0  # the first of its servers'
    side: str = "ours"  # a key of SIDES
    gpu: str = "0"
    phase: str = "start"
    topology: str = "one"  # a key of TOPOLOGIES
    servers: list[subprocess.Popen] = field(default_factory=list)
    log: Path = Path("server.log")  # beside it is the checkpoint
    references: dict[int, list[int]] = field(default_factory=dict)
    load: tuple[float, float] = (0.0, 0.0)  # begin and end
    replayed: list[dict[str, int]] = field(default_factory=list)  # rounds that were one graph, of each rank that decodes
    flushed: float | None = None  # when the idle server had emptied its caches
    samples: list[dict] = field(default_factory=list)
    differences: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    faults: tuple[str, ...] = ()  # after the load; malformed requests come under it then
    malformed: dict[str, list] = field(default_factory=dict)  # by name, the different answers to such requests under load
    fatal: dict[str, dict] = field(default_factory=dict)  # by name, what came of a fault that may end a server

    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()


def watch(run: Soak) -> None:
    """Until the run is over: sample memory and clients, and say where the run is."""
    printed = 0.0
    while not run.over.is_set():
        now, kinds = time.monotonic(), Counter(record.kind for record in list(run.traffic.records))
        sample = {"clients": run.traffic.in_flight(), "finished": kinds["finished"]}
        started = zip(TOPOLOGIES[run.topology].servers, run.servers, strict=False)  # while the run starts, not yet all
        sample |= memory({name: server.pid for name, server in started})
        run.samples.append({"time": now} | sample)
        if now - printed >= PROGRESS_SECONDS:
            printed = now
            print(
                f"{run.side} {now - run.began:4.0f} s {run.phase}: {len(run.references)} references, {dict(kinds) | sample}",
                flush=True,
            )
        run.over.wait(SAMPLE_SECONDS)


def ended(run: Soak) -> int | None:
    """The exit code of a server that has ended; None while all are there."""
    return next((code for server in run.servers if (code := server.poll()) is not None), None)


def alive(run: Soak) -> bool:
    with suppress(*FAILURES):
        return ended(run) is None and run.client.call("/health", timeout=5) is not None
    return False


def start(run: Soak) -> None:
    checkpoint = faithful.write(run.log.parent / "checkpoint")
    topology = TOPOLOGIES[run.topology]
    with run.log.open("a") as stream:
        for words in topology.commands(checkpoint, run.port):
            server = subprocess.Popen(
                words, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | SIDE_BY_SIDE | SIDES[run.side] | {"CUDA_VISIBLE_DEVICES": run.gpu} | topology.environment,
            )  # fmt: skip
            run.servers.append(server)
    half = run.left() / 2
    while not alive(run):
        if (code := ended(run)) is not None:
            raise RuntimeError(f"the server ended with {code}")
        if run.left() < half:
            raise TimeoutError("the server did not become ready")
        time.sleep(1)


def calm(run: Soak) -> None:
    """Every template alone, the shortest first, as long as there is time."""
    until = time.monotonic() + CALM * run.seconds
    for template in sorted(run.templates, key=lambda t: t.new_tokens + len(t.prompt) / 50):
        if time.monotonic() > until:
            break
        answer = run.client.generate(request_body(list(template.prompt), template.new_tokens, f"calm-{template.index:010d}"))
        if message := judge_answer(template.new_tokens, None, answer).get("message"):
            raise RuntimeError(f"template {template.index} alone: {message}")
        run.references[template.index] = answer["output_ids"]


def load(run: Soak) -> None:
    began = time.monotonic()
    run.traffic.start(run.templates, run.references)
    until = TAIL_SECONDS
    if run.faults:
        run.malformed = malformed_under_load(run)
        until += SHARING_SECONDS + FAULT_SECONDS * len(run.faults)
    try:
        while run.left() > until:
            if (code := ended(run)) is not None:
                raise RuntimeError(f"the server ended with {code}")
            time.sleep(0.5)
    finally:
        run.load = (began, time.monotonic())


def settle(run: Soak) -> None:
    """Let everything finish; then the server must be idle, and must have survived its own count of tokens."""
    run.traffic.drain(time.monotonic() + DRAIN_SECONDS)
    if left := run.traffic.in_flight():
        run.problems.append(f"{left} requests did not end after the load")
    time.sleep(IDLE_SECONDS)
    try:
        run.replayed = replayed(json.loads(run.client.call("/server_info")))
    except FAILURES as error:
        run.problems.append(f"the idle server does not say how many rounds were one graph: {error}")
    try:
        run.client.call("/flush_cache")
        run.flushed = time.monotonic() + SAMPLE_SECONDS
    except FAILURES as error:
        run.problems.append(f"the idle server does not flush its cache: {error}")


def explain(run: Soak) -> None:
    """Ask for the best tokens at each parting point: one forward of one request, without drafts."""
    run.differences = group_differences(run.traffic.records, run.templates, run.references)
    for number, difference in enumerate(run.differences[:QUESTIONS]):
        if run.left() < LAST_SECONDS + 4:
            break
        index = difference["template"]
        prompt = list(run.templates[index].prompt) + run.references[index][: difference["position"]]
        question = request_body(prompt, 1, f"tell-{number:010d}") | {"return_logprob": True, "top_logprobs_num": 8}
        judge_tie(difference, run.client.generate(question)["meta_info"]["output_top_logprobs"][0])
    if not alive(run):
        run.problems.append("the server is not alive at the end")


def cut(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", choices=list(SIDES), required=True)
    parser.add_argument("--gpu", default="0", help="as CUDA_VISIBLE_DEVICES names it")
    parser.add_argument("--topology", choices=list(TOPOLOGIES), default="one")
    parser.add_argument("--minutes", type=float, default=8, help="of everything, the start of the server included")
    add_faults(parser)
    for option, default in (("--port", 9000), ("--seed", 0)):
        parser.add_argument(option, type=int, default=default)
    return parser.parse_args()


def main() -> int:
    args, began = arguments(), time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu  # of this process too, which asks for the GPU's name
    client = TOPOLOGIES[args.topology].client(args.port)
    templates = make_templates(args.seed)
    traffic = Traffic(client, args.seed)
    run = Soak(client, traffic, templates, 60 * args.minutes, began, args.port, args.side, args.gpu, topology=args.topology)
    folder = tempfile.TemporaryDirectory()
    run.log = Path(folder.name) / "server.log"
    if args.faults is not None:
        run.faults = tuple(args.faults or FAULTS)
    report = {"arguments": vars(args) | {"out": args.out.name}}
    try:
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, cut)
        signal.setitimer(signal.ITIMER_REAL, max(run.left() - LAST_SECONDS, 1))
        report["environment"] = environment(TOPOLOGIES[args.topology].gpus)
        threading.Thread(target=watch, args=(run,), daemon=True).start()
        with gpu_shared(run.gpu):
            for phase in (start, calm, load, settle, explain):
                run.phase = phase.__name__
                phase(run)
        if run.faults:
            report |= summary(run)  # of the one server, before others are started
            run.phase = faults.__name__
            faults(run, start)
    except (Exception, KeyboardInterrupt) as error:
        run.problems.append(f"cut short in phase {run.phase}: {type(error).__name__}: {error}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGTERM, signal.SIGINT):  # what is left is quick
        signal.signal(number, signal.SIG_IGN)
    report = summary(run) | report
    problems = run.problems + problems_of(report, ours=run.side != BUILTIN, faults=bool(run.faults))
    if run.faults:
        report |= {"malformed": run.malformed, "fatal": run.fatal}
    report |= {"problems": problems, "seconds": round(time.monotonic() - began, 1)}
    args.out.write_text(json.dumps(report, indent=1))
    run.over.set()
    for server in run.servers:
        end_all(server)
    if report["problems"] and run.log.exists():
        print(run.log.read_text(errors="replace")[-3000:])
    folder.cleanup()
    print("\n".join(f"{run.side}: {problem}" for problem in report["problems"]) or f"{run.side}: no problems", flush=True)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
