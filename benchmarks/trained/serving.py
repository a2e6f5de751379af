"""Servers of the trained checkpoint: ours, SGLang's built-in, and ours with one length for all draft steps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nsa_backend.benchmarks import server_options
from nsa_backend.benchmarks.servers import Server, call, greedy
from nsa_backend.benchmarks.trained.shared_length import ANNOUNCEMENT

SIDES = {
    "ours": ("sglang.launch_server", "0"),
    "shared": ("nsa_backend.benchmarks.trained.shared_length", "0"),
    "builtin": ("sglang.launch_server", "1"),
}
"""Side to the module that serves it and its NSA_BACKEND_DISABLE."""

BATCHES = (1, 8, 32, 128)
"""Requests of the captured graphs: those whose speed is measured, and one for accept lengths, which need many requests."""
PREFILLS = (512, 4096, 8192)
"""Tokens of the captured prefills, fewer than the release's own so that a server starts sooner."""
CONTEXT = 8192
LONGEST = 4352  # tokens of a request: prompt, new ones, and what SGLang holds back
START_SECONDS = 330.0
AGAIN_SECONDS = 60.0
"""What must be left of START_SECONDS for a second start."""
PORTS = 24  # from one server to the next
TOP_P = 0.95  # of every answer that is sampled


def sampling_at(temperature: float) -> dict[str, float]:
    """What a temperature asks of SGLang beside or in place of `greedy`'s; 0 is greedy."""
    return {"temperature": temperature, "top_p": TOP_P} if temperature else {"temperature": 0}


def command(side: str, checkpoint: Path, port: int, steps: int, requests: int = BATCHES[-1]) -> list[str]:
    """The same options for every side, spelled as the installed release spells them; `requests` run at the same time.

    Many servers start on one GPU at once: each has a small pool and a port of its own for its process group, and what others
    load meanwhile, which SGLang takes for its own, leaves a pool at this share of memory.
    """
    graphs = server_options.decode_graphs(batch for batch in BATCHES if batch <= requests)
    if prefill_graphs := server_options.names().prefill_graphs:
        graphs += [prefill_graphs, *map(str, PREFILLS)]
    return [
        sys.executable, "-m", SIDES[side][0], "--model-path", str(checkpoint),
        "--port", str(port), "--nccl-port", str(port + PORTS // 2), "--context-length", str(CONTEXT),
        *server_options.implementations("fa3", "flashmla_sparse"), "--kv-cache-dtype", "bfloat16",
        *server_options.speculation(steps),
        "--skip-tokenizer-init", "--grammar-backend", "none", "--disable-radix-cache", "--random-seed", "0",
        "--mem-fraction-static", "0.92", "--max-total-tokens", str(requests * LONGEST),
        "--max-running-requests", str(requests),
        *graphs,
    ]  # fmt: skip


class SideServer(Server):
    """A running server of one side."""

    def __init__(self, side: str, checkpoint: Path, port: int, steps: int, log: Path, requests: int = BATCHES[-1]):
        """Start it; does not wait."""
        self.side, self.port, self.log, self.steps = side, port, log, steps
        self.name = f"{side}, N = {steps}"
        self._stream = log.open("w")
        self._process = subprocess.Popen(
            command(side, checkpoint, port, steps, requests), stdout=self._stream, stderr=subprocess.STDOUT,
            env=os.environ | {"NSA_BACKEND_DISABLE": SIDES[side][1]},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the process that started all others of this server."""
        return self._process.pid

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Wait until it answers; raises RuntimeError with the end of its log, or where it is not the side it should be."""
        super().wait(seconds)
        text = self.log.read_text(errors="replace")
        for sentence, expected in (
            ("is active: decode=", self.side != "builtin"),
            (ANNOUNCEMENT, self.side == "shared" and self.steps > 1),
        ):
            if (sentence in text) != expected:
                raise RuntimeError(f"the log of {self.side} says {'nothing of' if expected else ''} {sentence!r}: {self.log}")

    def end(self) -> None:
        """Tell it to end; does not wait."""
        self._process.terminate()

    def sampled(self, prompts: list[list[int]], tokens: int, temperature: float) -> list[dict]:
        """Answers of one batch, exactly `tokens` new tokens each; greedy where `temperature` is 0."""
        sampling = greedy(tokens) | sampling_at(temperature)
        return call(self.port, "/generate", {"input_ids": prompts, "sampling_params": sampling}, timeout=600)

    def log_probabilities(self, prompt: list[int]) -> list[float]:
        """Log-probability of every token of `prompt` but the first, by one prefill."""
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        return [value for value, *_ in call(self.port, "/generate", body)["meta_info"]["input_token_logprobs"][1:]]


@dataclass
class Started:
    """Servers that answer, and what became of the others."""

    servers: list[SideServer]
    problems: list[str]  # one sentence or the end of a log each

    def of(self, steps: int) -> list[SideServer]:
        return [server for server in self.servers if server.steps == steps]


def started(
    stack: ExitStack, folder: Path, wanted: list[tuple[str, int]], port: int, logs: Path, say: Callable[[str], None],
    requests: int = BATCHES[-1], seconds: float = START_SECONDS,
) -> Started:  # fmt: skip
    """Servers of the run in `folder`, (side, steps) each, all started at once; leaving `stack` ends them.

    One that does not come up within `seconds` is ended, and where time is left started a second time, alone; where that fails
    too the others go on without it. So all that runs when this returns answers, in the order of `wanted`.
    """
    checkpoint = folder / "checkpoint"
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(f"{checkpoint} has no config.json: run train_checkpoint until it says that it is ready")
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds

    def start(number: int, log: str) -> SideServer:
        side, steps = wanted[number]
        server = SideServer(side, checkpoint, port + PORTS * number, steps, logs / f"n{steps}-{side}{log}.log", requests)
        return stack.enter_context(server)

    def problem_of(server: SideServer) -> str | None:
        try:
            server.wait(max(1.0, deadline - time.monotonic()))
        except RuntimeError as error:
            say(f"{server.name} did not start: {str(error)[-1500:]}")
            server.stop()  # or it would go on loading, or poll for requests, beside those that are timed
            return f"{server.name}: {error}"
        say(f"{server.name} answers")
        return None

    servers = [start(number, "") for number in range(len(wanted))]
    stack.callback(lambda: [server.end() for server in servers])  # all at once; leaving one waits for it
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        last = list(pool.map(problem_of, servers))
    problems = [text for text in last if text]
    for number, text in enumerate(last):
        if text and deadline - time.monotonic() >= AGAIN_SECONDS:
            servers[number] = start(number, "-again")
            last[number] = problem_of(servers[number])
            problems += filter(None, [last[number]])
    return Started([server for server, text in zip(servers, last, strict=True) if not text], problems)
