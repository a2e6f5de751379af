"""Servers of the trained checkpoint: ours, SGLang's built-in, and ours with one length for all draft steps."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from nsa_backend.adapters.installed import adapter
from nsa_backend.benchmarks.servers import Server, call, wait_until_ready
from nsa_backend.benchmarks.trained.shared_length import ANNOUNCEMENT

SIDES = {
    "ours": ("sglang.launch_server", "0"),
    "shared": ("nsa_backend.benchmarks.trained.shared_length", "0"),
    "builtin": ("sglang.launch_server", "1"),
}
"""Side to the module that serves it and its NSA_BACKEND_DISABLE."""

BATCHES = (1, 2, 4, 8, 16, 32)
PREFILLS = (512, 1024, 2048, 4096, 8192)
"""Tokens of the captured prefills, fewer than the release's own so that a server starts sooner."""
START_SECONDS = 420.0


def command(side: str, checkpoint: Path, port: int, steps: int) -> list[str]:
    """The same options for every side, spelled as the installed release spells them."""
    graphs = ["--cuda-graph-bs", *map(str, BATCHES)]
    if "dsa" in adapter.BACKEND_NAMES:
        graphs = ["--cuda-graph-bs-decode", *map(str, BATCHES), "--cuda-graph-bs-prefill", *map(str, PREFILLS)]
    speculative = [
        "--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(steps),
        "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(steps + 1),
    ]  # fmt: skip
    return [
        sys.executable, "-m", SIDES[side][0], "--model-path", str(checkpoint), "--port", str(port),
        "--attention-backend", adapter.BACKEND_NAMES[0],
        adapter.DECODE_OPTION, "fa3", adapter.PREFILL_OPTION, "flashmla_sparse",
        "--kv-cache-dtype", "bfloat16", *(speculative if steps else ()),
        "--skip-tokenizer-init", "--grammar-backend", "none", "--disable-radix-cache", "--random-seed", "0",
        "--mem-fraction-static", "0.5", "--max-total-tokens", "163840", "--max-running-requests", str(BATCHES[-1]),
        *graphs,
    ]  # fmt: skip


class SideServer(Server):
    """A running server of one side."""

    def __init__(self, side: str, checkpoint: Path, port: int, steps: int, log: Path):
        """Start it; does not wait."""
        self.side, self.port, self.log, self.steps = side, port, log, steps
        self._stream = log.open("w")
        self._process = subprocess.Popen(
            command(side, checkpoint, port, steps), stdout=self._stream, stderr=subprocess.STDOUT,
            env=os.environ | {"NSA_BACKEND_DISABLE": SIDES[side][1]},
        )  # fmt: skip

    def wait(self) -> None:
        """Wait until it answers; raises RuntimeError with the end of its log, or where it is not the side it should be."""
        try:
            wait_until_ready(self.port, self._process, START_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(f"{error}; the end of {self.log}:\n{self.log.read_text(errors='replace')[-3000:]}") from error
        text = self.log.read_text(errors="replace")
        for sentence, expected in (
            ("is active: decode=", self.side != "builtin"),
            (ANNOUNCEMENT, self.side == "shared" and self.steps > 1),
        ):
            if (sentence in text) != expected:
                raise RuntimeError(f"the log of {self.side} says {'nothing of' if expected else ''} {sentence!r}: {self.log}")

    def sampled(self, prompts: list[list[int]], tokens: int, temperature: float, top_p: float = 0.95) -> list[dict]:
        """Answers of one batch, exactly `tokens` new tokens each; greedy where `temperature` is 0."""
        sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        if temperature:
            sampling["top_p"] = top_p
        return call(self.port, "/generate", {"input_ids": prompts, "sampling_params": sampling}, timeout=600)

    def log_probabilities(self, prompt: list[int]) -> list[float]:
        """Log-probability of every token of `prompt` but the first, by one prefill."""
        sampling = {"temperature": 0, "max_new_tokens": 1}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        return [value for value, *_ in call(self.port, "/generate", body)["meta_info"]["input_token_logprobs"][1:]]


def started(stack: ExitStack, folder: Path, wanted: list[tuple[str, int]], port: int, logs: Path) -> list[SideServer]:
    """Servers of the run in `folder`, (side, steps) each, ready; leaving `stack` ends them."""
    checkpoint = folder / "checkpoint"
    if not (checkpoint / "config.json").exists():
        raise FileNotFoundError(f"{checkpoint} has no config.json: run train_checkpoint until it says that it is ready")
    logs.mkdir(parents=True, exist_ok=True)
    servers = []
    for number, (side, steps) in enumerate(wanted):  # ports from 100 above a server's on are SGLang's own
        time.sleep(3 * bool(number))  # each measures the free memory of the GPU when it starts
        log = logs / f"n{steps}-{side}.log"
        servers.append(stack.enter_context(SideServer(side, checkpoint, port + 24 * number, steps, log)))
    for server in servers:
        server.wait()
    return servers
