"""A prefill and a decode server on GPUs of one machine, asked as SGLang's router asks them, or through it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from engines import NCCL_PORT, PORTS_APART
from waves import RANK, generate

from nsa_backend.benchmarks.servers.pairs import rooms
from nsa_backend.benchmarks.servers.process_trees import end_all
from nsa_backend.benchmarks.servers.server import APART_SECONDS, STARTING, call, wait_until_ready

DECODE, ALONE = PORTS_APART, 2 * PORTS_APART
ROUTER, BOOTSTRAP = 4, 8
"""Ports of a case, above the prefill server's. Servers are as far apart as engines: each may count ports up from its own."""


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


def roles(
    arguments: dict[str, Any], engine: str, gpus: int = 2, of_prefill: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of (prefill, decode) server on so many GPUs, `engine` between them; those of `of_prefill` are the first one's.

    The prefill server is on the first GPUs and the decode server on the next, or on the same ones where there are no more:
    rank i of either is on GPU i then, so that no NCCL communicator has two ranks on one GPU. Both see all GPUs: an engine that
    copies from GPU to GPU has to see the other one.
    """
    port = arguments["port"]
    common = arguments | {"disaggregation_transfer_backend": engine, "disaggregation_bootstrap_port": port + BOOTSTRAP}
    tp = arguments.get("tp_size", 1)
    assert gpus in (tp, 2 * tp), f"servers of {tp} GPUs each take {tp} or {2 * tp}, not {gpus}"
    return (
        common | (of_prefill or {}) | {"disaggregation_mode": "prefill", "base_gpu_id": 0} | meeting(port),
        common | {"disaggregation_mode": "decode", "base_gpu_id": gpus - tp} | meeting(port + DECODE),
    )


def meeting(port: int) -> dict[str, int]:
    """Arguments of a server on `port`, whose ranks meet above it."""
    return {"port": port, "nccl_port": port + NCCL_PORT}


def in_rooms(body: dict, port: int) -> dict:
    """A request of /generate, or a batch of them, with its rooms."""
    prompts = body["input_ids"]
    if isinstance(prompts[0], list):
        return body | rooms(len(prompts), port)
    return body | {name: value for name, (value,) in rooms(1, port).items()}


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

    def generate(self, wave: list[list[int]], sampling: dict | list[dict], ranks: list[int] | None = None) -> list[dict]:
        """Answers of one batch, or where its requests choose their DP ranks, of requests that are sent at once."""
        return generate(partial(call, self.port, "/generate"), wave, sampling, ranks)


class Pair:
    """A prefill and a decode server, and SGLang's router where it is asked for."""

    def __init__(
        self,
        arguments: dict[str, Any],
        engine: str,
        *,
        gpus: int = 2,
        of_prefill: dict[str, Any] | None = None,
        router: bool = False,
    ):
        """Start them on so many GPUs.

        Args:
            arguments: of one server; `port` is the prefill server's, and some above it are taken too.
            engine: SGLang's name of what carries the KV.
            gpus: of both servers: as many as one has, or twice as many.
            of_prefill: arguments of the prefill server alone.
            router: whether to start SGLang's router too, and to ask it.
        """
        self._bootstrap, self._router = arguments["port"] + BOOTSTRAP, None
        prefill, decode = roles(arguments, engine, gpus, of_prefill)
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

    def generate(self, wave: list[list[int]], sampling: dict | list[dict], ranks: list[int] | None = None) -> list[dict]:
        """Answers of one batch, or of requests that choose their DP ranks: those of the decode server."""
        if self._router is not None:
            assert ranks is None, "the router sends both servers the same, and a prefill server goes by the room"
            return self._router.generate(wave, sampling)
        return generate(self._ask, wave, sampling, ranks)

    def _ask(self, body: dict) -> Any:
        """What the decode server answers, once the prefill server has said that its part is done.

        A rank that a request chooses is one of the decode server's, whose rounds it is about. The prefill server goes by the
        room, and refuses a request that chooses another rank; by the room the decode server knows where its KV is.
        """
        of_decode = in_rooms(body, self._bootstrap)
        of_prefill = {name: value for name, value in of_decode.items() if name != RANK}
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(call, server.port, "/generate", its_own)
                for server, its_own in ((self.prefill, of_prefill), (self.decode, of_decode))
            ]
            return [one.result() for one in asked][1]


def router_command(port: int) -> list[str]:
    """SGLang's small router in Python, which comes with sglang-router; `port` is the prefill server's."""
    return [
        sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--mini-lb",
        "--prefill", f"http://127.0.0.1:{port}", str(port + BOOTSTRAP), "--decode", f"http://127.0.0.1:{port + DECODE}",
        "--host", "127.0.0.1", "--port", str(port + ROUTER),
    ]  # fmt: skip
