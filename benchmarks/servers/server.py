"""Real servers for benchmarks and end-to-end tests: the README's command in a process of its own, asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.servers import server_options

BACKENDS = {"ours": "0", "builtin": "1"}
"""Side of a comparison to its NSA_BACKEND_DISABLE."""

THREE_GRAPHS = "three_graphs"
VARIANTS = {
    THREE_GRAPHS: {"NSA_BACKEND_ROUND_GRAPH": "0", "NSA_BACKEND_SAMPLED_ROUNDS": "0"},
    "auto": {"NSA_BACKEND_AUTO_DECODE": "1"},
    "front": {"NSA_BACKEND_LAYER_FRONT": "1"},
    "sparse_verify": {},
    "sparse_prefill": {},
    "verify": {"NSA_BACKEND_PAIRED_LOGITS": "1"},
    "front_verify": {"NSA_BACKEND_LAYER_FRONT": "1", "NSA_BACKEND_PAIRED_LOGITS": "1"},
    "any_length": {"NSA_BACKEND_AUTO_DECODE": "1", "NSA_BACKEND_SHORT_GRAPHS": "0"},
    "sglang_moe": {"NSA_BACKEND_AUTO_DECODE": "1", "NSA_BACKEND_MOE_CONFIGS": "0"},
    "pieces": {"NSA_BACKEND_AUTO_DECODE": "1", "NSA_BACKEND_SHORT_PREFILLS": "0"},
    "tiles": {"NSA_BACKEND_AUTO_DECODE": "1", "NSA_BACKEND_FEW_EXPERTS": "0"},
    "more_experts": {"NSA_BACKEND_AUTO_DECODE": "1", "NSA_BACKEND_FEW_EXPERTS": "1"},
    "divided_indexer": {"NSA_BACKEND_AUTO_DECODE": "1", "NSA_BACKEND_DIVIDED_INDEXER": "1"},
    "undivided": {"NSA_BACKEND_AUTO_DECODE": "1", "NSA_BACKEND_DIVIDED_INDEXER": "0"},
}
"""Sides that are ours with switches set, or with an option of OPTIONS; `bench --help` has them all."""

WITH_DRAFTS = (THREE_GRAPHS, "sparse_verify", "verify", "front_verify")
"""Sides that are ours and no other where there are no drafts."""

BF16 = "bfloat16"
KV = {BF16: "fa3", "fp8_e4m3": "flashmla_kv"}
"""KV cache to the decode implementation that SGLang's own backend takes for it without a name."""

OPTIONS = {
    "sparse_verify": lambda decode: server_options.implementations("sparse_verify"),
    "sparse_prefill": lambda decode: server_options.implementations(decode, "sparse_prefill"),
    "verify": lambda decode: server_options.implementations("sparse_verify"),
    "front_verify": lambda decode: server_options.implementations("sparse_verify"),
}
"""Of sides that have some, by the names of the installed release, where others decode with `decode`."""

ENVIRONMENTS = {side: {"NSA_BACKEND_DISABLE": disabled} for side, disabled in BACKENDS.items()}
ENVIRONMENTS |= {side: ENVIRONMENTS["ours"] | switch for side, switch in VARIANTS.items()}
"""All sides there are, to the environment of their servers."""

RANK_SERVER = "nsa_backend.benchmarks.servers.rank_server"

SIDE_BY_SIDE = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""Environment of all servers: SGLang ends one of several GPUs that another fills at that moment, one GPU before the next."""

OF_A_RANK = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
"""Environment of a rank, on all sides: SGLang would compile its GEMMs for every number of rows before it is ready, which takes
minutes on a machine that is new; without that it compiles those that it meets, in captures and in the batch that warms up."""

APART_SECONDS = 3.0  # between two starts, as servers measure free memory then
STARTING = 480.0  # seconds that a server of a small checkpoint may take to start
HEALTH_SECONDS = 25.0
"""Of one request to /health: SGLang generates a token, looks once a second whether it is there, and gives up after twenty."""
RETRACTED = re.compile(r"(?:Retract requests|Testing retraction)\. #retracted_reqs: (\d+)")
"""What a server's log says where it takes requests back for want of room, or because a test asks for it."""
OWN_WORDS = re.compile(r"\] (nsa_backend(?:: (?!captur).*| \S+ is active: .*))(?=\n)")
"""Of a server's log, lines of this package that are about no capture."""
NEVER = 1 << 20  # tokens between two events of a stream: the first token is one, the end is the other


@dataclass(frozen=True)
class Streamed:
    """Answers of one batch, and when they came after the request was sent."""

    first_seconds: list[float]  # of each prompt, until its first token
    seconds: float  # until the last answer was complete
    answers: list[dict]
    progress: list[list[tuple[int, float]]] = field(default_factory=list)  # of each prompt: (new tokens so far, when they came)


def command(checkpoint: Path, port: int, steps: int = 3, kv: str = BF16) -> list[str]:
    """The README's command with N = `steps`, 0 for no speculation, in the names of the installed release, for both sides alike.

    It names what SGLang's own backend takes without a name on `kv`, a key of KV; ours would choose by rows on an H200.

    The last line is for a checkpoint without a tokenizer. What follows overrides it: SGLang takes the last of an option. A rank
    of `checkpoints.ranks` has no weights either, and `rank_server` draws them.
    """
    drawn = ranks.rank_in(checkpoint) is not None
    return [
        sys.executable, "-m", RANK_SERVER if drawn else "sglang.launch_server", "--model-path", str(checkpoint),
        *(("--load-format", "dummy") if drawn else ()),
        *server_options.implementations(KV[kv]), "--kv-cache-dtype", kv,
        *server_options.speculation(steps), "--port", str(port),
        "--skip-tokenizer-init", "--grammar-backend", "none", "--mem-fraction-static", "0.3", "--max-running-requests", "32",
    ]  # fmt: skip


def call(port: int, path: str, body: dict | None = None, timeout: float = 300) -> Any:
    """GET `path`, or POST `body` to it, and return what came back, as JSON where it is JSON."""
    with _open(port, path, body, timeout) as response:
        text = response.read()
        return json.loads(text) if response.headers.get_content_type() == "application/json" and text else text


def _open(port: int, path: str, body: dict | None, timeout: float) -> HTTPResponse:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=timeout)


def own_words(log: str) -> list[str]:
    """What this package says in a server's log of what it serves, once each, whatever the rank."""
    return list(dict.fromkeys(OWN_WORDS.findall(log)))


def retracted(log: str) -> int:
    """Requests that a server took back, by its log."""
    return sum(map(int, RETRACTED.findall(log)))


def greedy(tokens: int) -> dict:
    """Sampling parameters of exactly `tokens` new tokens."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def wait_until_ready(port: int, server: subprocess.Popen | None, seconds: float = STARTING) -> None:
    """Return when the server answers; raises RuntimeError where it ends first, TimeoutError where it takes too long.

    `server` is None where somebody else looks whether it ends.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server is not None and server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            call(port, "/health", timeout=max(0.1, min(HEALTH_SECONDS, deadline - time.monotonic())))
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError("the server did not become ready")


class Server:
    """A running server; leaving the `with` block ends it."""

    def __init__(
        self,
        backend: str,
        checkpoint: Path,
        port: int,
        steps: int,
        log: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        kv: str = BF16,
    ):
        """Start `backend` (a key of ENVIRONMENTS); `options` follow the README's command. Does not wait."""
        self.port, self.log = port, log
        self._stream = log.open("w")
        of_rank = OF_A_RANK if ranks.rank_in(checkpoint) is not None else {}
        own = OPTIONS[backend](KV[kv]) if backend in OPTIONS else []
        words = [*command(checkpoint, port, steps, kv), *own, *options]
        self._process = subprocess.Popen(
            words, stdout=self._stream, stderr=subprocess.STDOUT,
            env=os.environ | SIDE_BY_SIDE | of_rank | (environment or {}) | ENVIRONMENTS[backend],
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the process that all others of the server are beneath."""
        return self._process.pid

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, and wait until it has ended; one that has already is left as it is."""
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stream.close()

    def wait(self, seconds: float = STARTING) -> None:
        """Wait until it answers; an error carries the end of its log."""
        try:
            wait_until_ready(self.port, self._process, seconds)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(f"{error}; the end of {self.log}:\n{self.log.read_text(errors='replace')[-3000:]}") from error

    def generate(
        self, prompts: list[list[int]], tokens: int, body: Mapping[str, object] | None = None, **others: object
    ) -> tuple[float, list[dict]]:
        """(seconds, answers) of one batch, greedy, exactly `tokens` new tokens each.

        `body` has more fields of the request, and `others` are sampling parameters that replace those of `greedy`.
        """
        started = time.perf_counter()
        asked = {"input_ids": prompts, "sampling_params": greedy(tokens) | others} | (body or {})
        answers = call(self.port, "/generate", asked)
        return time.perf_counter() - started, answers

    def streamed(
        self, prompts: list[list[int]], tokens: int, body: Mapping[str, object] | None = None, **others: object
    ) -> Streamed:
        """The same as a stream, which says when each prompt has its first token and nothing more until the end.

        With a `stream_interval` among `others` it says more.
        """
        sampling = greedy(tokens) | {"stream_interval": NEVER} | others
        asked = {"input_ids": prompts, "sampling_params": sampling, "stream": True} | (body or {})
        progress, answers = defaultdict(list), {}
        started = time.perf_counter()
        with _open(self.port, "/generate", asked, 300) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                now, event = time.perf_counter() - started, json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RuntimeError(f"the server refused a batch: {event['error']}")
                index = event.get("index", 0)
                progress[index].append((event.get("meta_info", {}).get("completion_tokens", 0), now))
                answers[index] = event
        if len(answers) != len(prompts):
            raise RuntimeError(f"the server answered {len(answers)} of {len(prompts)} prompts: its log says why")
        order = range(len(prompts))
        return Streamed([progress[i][0][1] for i in order], now, [answers[i] for i in order], [progress[i] for i in order])

    def pool_tokens(self) -> int:
        """Tokens that the KV pool holds for requests, of all ranks that divide their KV together; of one rank of DP attention.

        SGLang's scheduler has multiplied a rank's rows by the ranks that divide KV before it tells them; tensor parallel keeps
        every token on every rank. So the number is what requests may have, under both.
        """
        return call(self.port, "/server_info")["max_total_num_tokens"]

    def forget(self) -> None:
        """Drop the KV of all prompts that it keeps; raises HTTPError while one is served."""
        call(self.port, "/flush_cache?timeout=10", {})

    def profiled(self, folder: Path, prompts: list[list[int]], tokens: int) -> list[dict]:
        """Answers of one batch, with a trace of it in `folder`.

        Without Python's calls and shapes, which SGLang adds unless told: they slow the host that the trace is to show, and the
        trace takes long to write.
        """
        asked = {"activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False}
        call(self.port, "/start_profile", {"output_dir": str(folder)} | asked)
        answers = self.generate(prompts, tokens)[1]
        call(self.port, "/stop_profile", {})
        return answers
