"""A prefill and a decode server on two GPUs of one machine, asked as SGLang's router asks them, or through it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engines import NCCL_PORT, PORTS_APART

from nsa_backend.benchmarks.process_trees import end_all
from nsa_backend.benchmarks.servers import STARTING, call, wait_until_ready

DECODE, ALONE = PORTS_APART, 2 * PORTS_APART
ROUTER, BOOTSTRAP = 4, 8
"""Ports of a case, above the prefill server's. Servers are as far apart as engines: each may count ports up from its own."""

APART_SECONDS = 3.0  # between two starts, as servers measure free memory then
ROOMS = 2**63


def command(arguments: dict[str, Any]) -> list[str]:
    """The server that sglang.Engine would be with these arguments."""
    words = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [option] if value else []
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return words


def roles(arguments: dict[str, Any], engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of (prefill, decode) server, the first on the first GPU, with `engine` between them.

    Both see both GPUs: an engine that copies from GPU to GPU has to see the other one.
    """
    port = arguments["port"]
    common = arguments | {"disaggregation_transfer_backend": engine, "disaggregation_bootstrap_port": port + BOOTSTRAP}
    tp = arguments.get("tp_size", 1)
    return (
        common | {"disaggregation_mode": "prefill", "base_gpu_id": 0} | meeting(port),
        common | {"disaggregation_mode": "decode", "base_gpu_id": tp} | meeting(port + DECODE),
    )


def meeting(port: int) -> dict[str, int]:
    """Arguments of a server on `port`, whose ranks meet above it."""
    return {"port": port, "nccl_port": port + NCCL_PORT}


def rooms(count: int, port: int) -> dict[str, list]:
    """What SGLang's router adds to a batch of `count` requests: where the prefill server tells its peers of each of them."""
    return {
        "bootstrap_host": ["127.0.0.1"] * count,
        "bootstrap_port": [port] * count,
        "bootstrap_room": [random.randrange(ROOMS) for _ in range(count)],
    }


class ServerProcess:
    """A server of its own; leaving the `with` block ends it and all that it started. Its log is that of this process."""

    def __init__(self, arguments: dict[str, Any], words: list[str] | None = None):
        """Start it; `words` replace the command that `arguments` make. Does not wait."""
        self.port = arguments["port"]
        self.process = subprocess.Popen(words or command(arguments), start_new_session=True, env=dict(os.environ))
        time.sleep(APART_SECONDS)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        end_all(self.process)

    def wait(self, seconds: float = STARTING) -> None:
        wait_until_ready(self.port, self.process, seconds)

    def generate(self, wave: list[list[int]], sampling: dict, ranks: list[int] | None = None) -> list[dict]:
        """Answers of one batch, whose requests choose no DP rank."""
        assert ranks is None
        return call(self.port, "/generate", {"input_ids": wave, "sampling_params": sampling})


class Pair:
    """A prefill and a decode server, and SGLang's router where it is asked for."""

    def __init__(self, arguments: dict[str, Any], engine: str, *, router: bool = False):
        """Start them on `arguments["port"]` and some above; `engine` is SGLang's name of what carries the KV."""
        self._bootstrap, self._router = arguments["port"] + BOOTSTRAP, None
        prefill, decode = roles(arguments, engine)
        self.prefill, self.decode = ServerProcess(prefill), ServerProcess(decode)
        if router:
            self._router = ServerProcess({"port": arguments["port"] + ROUTER}, router_command(arguments["port"]))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        for server in filter(None, (self._router, self.decode, self.prefill)):
            server.__exit__(*exception)

    def wait(self, seconds: float = STARTING) -> None:
        for server in filter(None, (self.prefill, self.decode, self._router)):
            server.wait(seconds)

    def generate(self, wave: list[list[int]], sampling: dict, ranks: list[int] | None = None) -> list[dict]:
        """Answers of one batch: the decode server's, once the prefill server has said that its part is done."""
        if self._router is not None:
            return self._router.generate(wave, sampling, ranks)
        assert ranks is None
        body = {"input_ids": wave, "sampling_params": sampling, **rooms(len(wave), self._bootstrap)}
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(call, server.port, "/generate", body) for server in (self.prefill, self.decode)]
            return [one.result() for one in asked][1]


def router_command(port: int) -> list[str]:
    """SGLang's small router in Python, which comes with sglang-router; `port` is the prefill server's."""
    return [
        sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--mini-lb",
        "--prefill", f"http://127.0.0.1:{port}", str(port + BOOTSTRAP), "--decode", f"http://127.0.0.1:{port + DECODE}",
        "--host", "127.0.0.1", "--port", str(port + ROUTER),
    ]  # fmt: skip
