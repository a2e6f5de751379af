"""A prefill and a decode server that are measured as one (PD disaggregation), asked as SGLang's router asks them."""

from __future__ import annotations

import random
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from nsa_backend.benchmarks.servers.parallel import Parallel
from nsa_backend.benchmarks.servers.server import APART_SECONDS, STARTING, Server, Streamed

ENGINE = "nixl"
"""What carries the KV: it installs from PyPI and needs no RDMA."""
PACKAGES = ("nixl", "nixl-cu13")
BOOTSTRAP, DECODE = 5, 10
"""Above the prefill server's port: where it tells the decode server of its requests, and where that one listens."""
NCCL_PORT = 25
"""Above a server's port, where its ranks meet. Unless told, SGLang looks for a free port and takes it half a minute later, when
the server beside it may have it."""
ROOMS = 2**62


def engine_problem() -> str | None:
    """Why no pair can start here, or None."""
    if find_spec(ENGINE) is not None:
        return None
    return f"a prefill and a decode server need {ENGINE} to hand over KV: pip install {' '.join(PACKAGES)}"


def role(mode: str, bootstrap_port: int, first_gpu: int) -> list[str]:
    """Options of the server of `mode` (prefill or decode). Both see all GPUs, so that KV is copied from one to another."""
    return [
        "--disaggregation-mode", mode, "--disaggregation-transfer-backend", ENGINE,
        "--disaggregation-bootstrap-port", str(bootstrap_port), "--base-gpu-id", str(first_gpu),
    ]  # fmt: skip


def rooms(count: int, port: int) -> dict[str, list]:
    """What SGLang's router adds to a batch of `count` requests: where the prefill server tells its peers of each of them.

    Ranks of DP attention take the rooms in turns, so rooms that follow one another give each rank its share.
    """
    first = random.randrange(ROOMS)
    return {
        "bootstrap_host": ["127.0.0.1"] * count,
        "bootstrap_port": [port] * count,
        "bootstrap_room": [*range(first, first + count)],
    }


def meeting(port: int) -> tuple[str, str]:
    """Options of a server on `port`, whose ranks meet above it."""
    return "--nccl-port", str(port + NCCL_PORT)


class Pair:
    """Two running servers; leaving the `with` block ends both."""

    def __init__(self, parallel: Parallel, backend: str, checkpoint: Path, port: int, steps: int, log: Path, *options: str):
        """Start them as `servers.Server` is started, the prefill server on `port` and on the first GPUs. Does not wait."""
        self._bootstrap = port + BOOTSTRAP
        servers = []
        with ExitStack() as starting:
            for mode, above, gpu in (("prefill", 0, 0), ("decode", DECODE, parallel.gpus_of_a_server)):
                time.sleep(APART_SECONDS * bool(servers))
                own = (*meeting(port + above), *role(mode, self._bootstrap, gpu))
                place = log.with_suffix(f".{mode}.log")
                server = Server(backend, checkpoint, port + above, steps, place, *options, *own)
                servers.append(starting.enter_context(server))
            self._open = starting.pop_all()
        self.prefill, self.decode = servers

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def wait(self, seconds: float = STARTING) -> None:
        """Wait until both answer; an error carries the end of a log."""
        for server in (self.prefill, self.decode):
            server.wait(seconds)

    def streamed(self, prompts: list[list[int]], tokens: int, **others: object) -> Streamed:
        """The decode server's stream of one batch, as `Server.streamed`: a first token has crossed from one to the other."""
        where = rooms(len(prompts), self._bootstrap)
        pool = ThreadPoolExecutor(2)
        try:
            asked = [
                pool.submit(ask, prompts, tokens, where, **others) for ask in (self.decode.streamed, self.prefill.generate)
            ]
            wait(asked, return_when=FIRST_EXCEPTION)
            for one in asked:
                if one.done():
                    one.result()  # raises what went wrong first; the other server waits for minutes then
            return asked[0].result()
        finally:
            pool.shutdown(wait=False)


def started(
    parallel: Parallel, backend: str, checkpoint: Path, port: int, steps: int, log: Path, *options: str
) -> Server | Pair:
    """What serves `backend` (a key of servers.ENVIRONMENTS) as `parallel` says, on ports from `port` up. Does not wait."""
    if parallel.pd:
        return Pair(parallel, backend, checkpoint, port, steps, log, *options)
    environment = parallel.environment()
    return Server(backend, checkpoint, port, steps, log, *options, *meeting(port), environment=environment)
