"""Faults of a soak run (--faults): what a user sees and what is lost, ours and the built-in backend alike.

Some are for a server that serves others meanwhile, and must go on: requests that are malformed or larger than the pool. The
others end a server: a rank is killed, a SIGTERM comes under load, another process takes the GPU's memory. Then the server must
be gone soon, with all of its processes, and one that is started anew must answer as before. At last two are started at once.
"""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from soak_answers import judge_answer
from soak_server import POOL_TOKENS, processes, title
from soak_traffic import FAILURES, request_body

from nsa_backend.benchmarks.servers.process_trees import end_all

if TYPE_CHECKING:
    from soak_side import Soak

GONE_SECONDS = 60.0
"""Within which a server with a dead rank must have ended; SGLang's watchdog looks every few seconds."""
UNDER_WAY = 16
HOG = (
    "import torch, time; free = torch.cuda.mem_get_info()[0]; x = torch.empty(free - 2**26, dtype=torch.uint8, device='cuda'); "
)
HOG += "print('taken', flush=True); time.sleep(600)"


def _asked(**changed) -> dict:
    body = request_body([2, 3, 4], 4, "fault")
    sampling = body["sampling_params"] | changed.pop("sampling", {})
    return {name: value for name, value in (body | {"sampling_params": sampling} | changed).items() if value is not None}


MALFORMED = {
    "not JSON": b'{"input_ids": [1, 2',
    "no prompt": _asked(input_ids=None),
    "an empty prompt": _asked(input_ids=[]),
    "words for numbers": _asked(input_ids=["two", "three"]),
    "a negative length": _asked(sampling={"max_new_tokens": -4}),
    "a length in words": _asked(sampling={"max_new_tokens": "four"}),
    "a negative temperature": _asked(sampling={"temperature": -1.0}),
    "a huge top-k": _asked(sampling={"temperature": 1.0, "top_k": 2**31 - 1}),
    "a negative top-k": _asked(sampling={"temperature": 1.0, "top_k": -7}),
    "a top-p of two": _asked(sampling={"temperature": 1.0, "top_p": 2.0}),
    "more than the pool": _asked(input_ids=[2] * (POOL_TOKENS + 64)),
    "a longer answer than the context": _asked(sampling={"max_new_tokens": 10**9}),
}
"""Each is answered, by a refusal or by tokens: which is SGLang's choice, and must be the same on both sides. Two are not
among them, because SGLang 0.5.17 and 0.5.23 let them through and every server ends, the built-in's too: a top-k of 2^31, which
is put into a tensor of int32, and a token that is not in the vocabulary, which indexes the embedding on the GPU."""


def status_of(port: int, body: dict | bytes) -> int | str:
    """The HTTP status of an answer to /generate; the name of the error where there is none."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", "/generate", data, {"Content-Type": "application/json"})
        return connection.getresponse().status
    except FAILURES as error:
        return type(error).__name__
    finally:
        connection.close()


def malformed_under_load(run: Soak, every: float = 1.0) -> dict[str, list]:
    """As long as the load lasts: one malformed request after the other; by name, the different answers."""
    answers: dict[str, list] = {name: [] for name in MALFORMED}

    def send() -> None:
        while run.phase == "load":
            for name, body in MALFORMED.items():
                status = status_of(run.port, body)
                if run.phase == "load" and status not in answers[name]:
                    answers[name].append(status)
                time.sleep(every)

    threading.Thread(target=send, daemon=True).start()
    return answers


def schedulers(run: Soak) -> list[psutil.Process]:
    """The processes with a rank of the server."""
    found = []
    for process in processes(run.servers[0].pid):
        with suppress(psutil.Error):
            if "scheduler" in title(process):
                found.append(process)
    return found


def kill_rank(run: Soak) -> None:
    schedulers(run)[-1].kill()


def terminate(run: Soak) -> None:
    run.servers[0].send_signal(signal.SIGTERM)


def take_memory(run: Soak) -> subprocess.Popen:
    hog = subprocess.Popen([sys.executable, "-c", HOG], stdout=subprocess.PIPE, text=True, start_new_session=True)
    hog.stdout.readline()
    return hog


FATAL: dict[str, tuple[Callable[[Soak], subprocess.Popen | None], int, int, bool]] = {
    "no memory left in traffic": (take_memory, 12000, 64, False),
    "a rank killed in a round": (kill_rank, 64, 4096, True),
    "a rank killed in a prefill": (kill_rank, 12000, 1, True),
    "SIGTERM under load": (terminate, 64, 512, True),
}
"""What is done, tokens of each request's prompt and answer under way, and whether the server must end."""
TWO_AT_ONCE = "two servers started at once"
FAULTS = (*FATAL, TWO_AT_ONCE)


def add_faults(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--faults", nargs="*", choices=FAULTS, metavar="NAME",
        help=f"malformed requests under load, then these faults, all unless named: {', '.join(FAULTS)}; one server a side",
    )  # fmt: skip


def fatal(run: Soak, name: str) -> dict:
    """One of `FATAL` on a server with requests under way: what they come to, and the server after it."""
    act, prompt, new_tokens, ends = FATAL[name]
    ended_as: list[str] = []

    def ask(number: int) -> None:
        body = request_body([2 + number] * prompt, new_tokens, f"fatal-{number:010d}")
        try:
            answer = run.client.generate(body, timeout=GONE_SECONDS)
            ended_as.append(judge_answer(new_tokens, None, answer)["kind"])
        except FAILURES as error:
            ended_as.append(type(error).__name__)

    before = processes(run.servers[0].pid)
    asking = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(UNDER_WAY)]
    for thread in asking:
        thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    hog = act(run)
    until = began + GONE_SECONDS
    for thread in asking:
        thread.join(max(until - time.monotonic(), 0))
    if ends:
        with suppress(subprocess.TimeoutExpired):
            run.servers[0].wait(max(until - time.monotonic(), 1))
    code, seconds = run.servers[0].poll(), round(time.monotonic() - began, 1)
    time.sleep(2)
    left = [process.pid for process in before if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    if hog is not None:
        end_all(hog) if hog.poll() is None else hog.wait()
    found = {"under_way": UNDER_WAY, "finished": ended_as.count("finished"), "ends": sorted(set(ended_as))}
    return found | {"exit": code, "seconds": seconds, "processes_left": len(left) if code is not None else 0}


def problems_of_fatal(name: str, found: dict) -> list[str]:
    """What must not be: a server that hangs, that leaves processes, or that does not serve again."""
    ends = FATAL[name][3]
    must = [
        (not ends or found["exit"] is not None, f"the server had not ended {GONE_SECONDS:.0f} s after it"),
        (sum(1 for _ in found["ends"]) > 0, "no request under way was answered or refused"),
        (not found["processes_left"], f"{found['processes_left']} processes of the ended server were left"),
        (found["serves_again"], "a server started after it did not answer as before"),
    ]
    return [f"{name}: {sentence}" for holds, sentence in must if not holds]


def answers_again(run: Soak) -> bool:
    """Whether a server started anew answers the shortest template as it did alone."""
    template = min((t for t in run.templates if t.index in run.references), key=lambda t: len(t.prompt))
    body = request_body(list(template.prompt), template.new_tokens, "again-0000000000")
    return run.client.generate(body)["output_ids"] == run.references[template.index]


def two_at_once(run: Soak, start: Callable[[Soak], None]) -> dict:
    """Two servers started at the same moment on one GPU: whether each serves."""
    folder = tempfile.TemporaryDirectory()
    log = Path(folder.name) / "server.log"
    other = replace(run, port=run.port + 250, client=type(run.client)(run.port + 250), servers=[], log=log)
    errors: list[str] = []

    def begin(one: Soak) -> None:
        try:
            start(one)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=begin, args=(one,)) for one in (run, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = {"errors": errors, "exit": None, "serves_again": not errors and answers_again(run) and answers_again(other)}
    for server in other.servers:
        end_all(server)
    folder.cleanup()
    return found


@contextmanager
def gpu_shared(gpu: str, alone: bool = False) -> Iterator[None]:
    """Sides that run at once on one GPU share it, but for what needs it `alone`: that waits until no other side shares it."""
    with (Path(tempfile.gettempdir()) / f"soak_faults_gpu_{gpu}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def faults(run: Soak, start: Callable[[Soak], None], enough: float = 60.0) -> None:
    """Each fatal one on a server of its own, as long as there is time, and two servers at once; `run.fatal` has what they did.

    Args:
        run: its server runs and is idle.
        start: of a run, starts its server and waits for it.
        enough: seconds that a start may take.
    """
    for name in FATAL:
        if name not in run.faults:
            continue
        if run.left() < GONE_SECONDS + enough:
            break
        with gpu_shared(run.gpu, alone=FATAL[name][0] is take_memory):
            found = run.fatal[name] = fatal(run, name)
            end_all(run.servers.pop())
            start(run)
            found["serves_again"] = answers_again(run)
        run.problems += problems_of_fatal(name, found)
    if TWO_AT_ONCE in run.faults and run.left() > 2 * enough:
        with gpu_shared(run.gpu, alone=True):  # two, not those of another side beside them
            end_all(run.servers.pop())
            found = run.fatal[TWO_AT_ONCE] = two_at_once(run, start)
        run.problems += [f"{TWO_AT_ONCE}: {error}" for error in found["errors"]]


def compared(ours: dict | None, builtin: dict | None) -> list[str]:
    """A sentence for everything that the built-in backend survives and ours does not, or answers otherwise."""
    if any("fatal" not in (side or {}) for side in (ours, builtin)):
        return []
    found = []
    for name in MALFORMED:
        theirs, mine = (sorted(map(str, side["malformed"].get(name, []))) for side in (builtin, ours))
        if theirs and mine and theirs != mine:
            found.append(f"{name}: answered {', '.join(mine)}, and by the built-in backend {', '.join(theirs)}")
    for name, theirs in builtin["fatal"].items():
        mine = ours["fatal"].get(name)
        if mine is not None and theirs["exit"] is None and mine["exit"] is not None:
            found.append(f"{name}: ended with {mine['exit']}, and the built-in backend survives it")
    return found
