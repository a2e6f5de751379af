"""Serve for minutes under changing load, with aborts and retractions, and check outputs, accept length, memory and log.

    python tests/e2e/soak.py OUT.json [--minutes 8] [--port 33000] [--seed 0]

Each template runs alone first; under load its output must be the same, up to ties. Exits with 1 where anything is wrong.
A run that fails, gets SIGTERM or has no time left writes what it has.
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

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from soak_judge import problems_of, summary
from soak_traffic import (
    FAILURES,
    Client,
    Template,
    Traffic,
    group_differences,
    judge_answer,
    judge_tie,
    make_templates,
    request_body,
)

from nsa_backend.benchmarks import faithful_checkpoint, servers
from nsa_backend.benchmarks.bench_common import environment

POOL_TOKENS = 57344
"""Less than what 64 random requests need (60000 to 90000 tokens, by the seed), so that SGLang admits more than fit and takes
some back; it still holds 30 to 50 requests at once, and four of the longest."""
CALM = 0.2  # of all the time, what the references may take
TAIL_SECONDS, DRAIN_SECONDS, LAST_SECONDS = 60.0, 20.0, 10.0  # after the load: all, waiting for requests, writing the JSON
IDLE_SECONDS = 6.0  # SGLang aborts a closed stream after 2 s, and counts its tokens whenever it is idle
SAMPLE_SECONDS, PROGRESS_SECONDS, QUESTIONS = 2.0, 15.0, 300


@dataclass
class Soak:
    """What has come of a run so far."""

    client: Client
    traffic: Traffic
    templates: list[Template]
    seconds: float
    began: float
    phase: str = "start"
    server: subprocess.Popen | None = None
    log: Path = field(default_factory=lambda: Path(tempfile.mkdtemp()) / "server.log")
    references: dict[int, list[int]] = field(default_factory=dict)
    load: tuple[float, float] = (0.0, 0.0)  # begin and end
    flushed: float | None = None  # when the idle server had emptied its caches
    samples: list[dict] = field(default_factory=list)
    differences: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()


def command(checkpoint: Path, port: int) -> list[str]:
    """The README's command with a small pool, small chunks, and graphs up to 64 requests.

    SGLang's indexer keeps a float32 score of every new token with every token of its batch: 448 MiB for chunks of 2048 over
    this pool, 112 MiB for chunks of 512. The largest comes late in a run, and would look like growth.
    """
    return [
        *servers.command(checkpoint, port), "--max-running-requests", "64", "--max-total-tokens", str(POOL_TOKENS),
        "--context-length", "16384", "--chunked-prefill-size", "512", "--cuda-graph-bs", "1", "2", "4", "8", "16", "32", "64",
        "--log-level-http", "warning",
    ]  # fmt: skip


def gpu_mib() -> int | None:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        return int(subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0])
    return None


def host_mib(pid: int) -> float | None:
    """Resident memory of the server's processes; a page that they share counts in each."""
    total = 0
    with suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return round(total / 2**20, 1) if total else None


def watch(run: Soak) -> None:
    """As long as the process lives: sample memory and clients, and say where the run is."""
    printed = 0.0
    while True:
        now, kinds = time.monotonic(), Counter(record.kind for record in list(run.traffic.records))
        sample = {"clients": run.traffic.in_flight(), "finished": kinds["finished"]}
        sample |= {"gpu_mib": gpu_mib(), "host_mib": host_mib(run.server.pid) if run.server else None}
        run.samples.append({"time": now} | sample)
        if now - printed >= PROGRESS_SECONDS:
            printed = now
            print(f"{now - run.began:4.0f} s {run.phase}: {len(run.references)} references, {dict(kinds) | sample}", flush=True)
        time.sleep(SAMPLE_SECONDS)


def alive(run: Soak) -> bool:
    with suppress(*FAILURES):
        return run.server.poll() is None and run.client.call("/health", timeout=5) is not None
    return False


def start(run: Soak) -> None:
    checkpoint = faithful_checkpoint.write(run.log.parent / "checkpoint")
    with run.log.open("w") as stream:
        run.server = subprocess.Popen(
            command(checkpoint, run.client.port), stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            # Each new record of those scores would take a segment of its own beside all the smaller ones.
            env=os.environ | {"NSA_BACKEND_REQUIRED": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        )  # fmt: skip
    while not alive(run):
        if run.server.poll() is not None:
            raise RuntimeError(f"the server ended with {run.server.returncode}")
        if run.left() < run.seconds / 2:
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
    try:
        while run.left() > TAIL_SECONDS:
            if run.server.poll() is not None:
                raise RuntimeError(f"the server ended with {run.server.returncode}")
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


def show(run: Soak, report: dict) -> None:
    if report["problems"] and run.log.exists():
        print(run.log.read_text(errors="replace")[-3000:])
    for key in ("requests", "retracted", "accept_length", "drift", "growth", "messages", "suspect_lines"):
        print(f"{key}: {report[key]}")
    for row in report["rows"]:
        print(row)
    ties = sum(d["tie"] is True for d in report["differences"])
    print(f"outputs left their references in {len(report['differences'])} ways, {ties} of them at ties")
    print("\n".join(report["problems"]) or "no problems", flush=True)


def cut(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8, help="of everything, the start of the server included")
    for option, default in (("--port", 33000), ("--seed", 0)):
        parser.add_argument(option, type=int, default=default)
    return parser.parse_args()


def main() -> int:
    args, began = arguments(), time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    client = Client(args.port)
    run = Soak(client, Traffic(client, args.seed), make_templates(args.seed), 60 * args.minutes, began)
    report = {"arguments": vars(args) | {"out": str(args.out)}}
    try:
        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, cut)
        signal.setitimer(signal.ITIMER_REAL, max(run.left() - LAST_SECONDS, 1))
        report["environment"] = environment()
        threading.Thread(target=watch, args=(run,), daemon=True).start()
        for phase in (start, calm, load, settle, explain):
            run.phase = phase.__name__
            phase(run)
    except (Exception, KeyboardInterrupt) as error:
        run.problems.append(f"cut short in phase {run.phase}: {type(error).__name__}: {error}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGTERM, signal.SIGINT):  # what is left is quick
        signal.signal(number, signal.SIG_IGN)
    report |= summary(run)
    report |= {"problems": run.problems + problems_of(report), "seconds": round(time.monotonic() - began, 1)}
    args.out.write_text(json.dumps(report, indent=1))
    if run.server is not None:
        with suppress(ProcessLookupError):  # not SIGTERM, after which SGLang waits for requests aborted in its queue for ever
            os.killpg(run.server.pid, signal.SIGKILL)
    show(run, report)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
