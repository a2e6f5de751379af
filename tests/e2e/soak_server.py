"""The servers of a soak run: their commands, a side's environment, the memory that they take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from engines import NCCL_PORT, spelled
from pd_servers import BOOTSTRAP, DECODE
from soak_pair import PairClient
from soak_traffic import LONGEST_OUTPUT, Client

from nsa_backend.benchmarks.servers import server
from nsa_backend.benchmarks.servers.gpu_memory import by_process_mib
from nsa_backend.benchmarks.servers.pairs import role
from nsa_backend.benchmarks.servers.parallel import Parallel
from nsa_backend.releases import ROUND_GRAPHS

BUILTIN = "builtin"
SIDES = {
    side: environment | ({} if side == BUILTIN else {"NSA_BACKEND_REQUIRED": "1"})
    for side, environment in server.ENVIRONMENTS.items()
}
"""All sides there are, to the environment of their servers: ours must serve where it is asked."""

ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Each new record of the indexer's scores would take a segment of its own beside all the smaller ones."""

RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "499"}
"""SGLang's own switch: every so many forwards a request is taken back, where there are two. 0.5.23 answers this load before the
pool is full, so that without it nothing ever was."""

DIVIDED = Parallel(dcp=2)
"""Two ranks that divide the KV of every request between them."""

POOL_TOKENS = 57344
"""Less than what 64 random requests need (60000 to 90000 tokens, by the seed), so that SGLang admits more than fit and takes
some back; it still holds 30 to 50 requests at once, and four of the longest."""


def command(checkpoint: Path, port: int) -> list[str]:
    """The README's command with a small pool, small chunks, and graphs up to 64 requests.

    SGLang's indexer keeps a float32 score of every new token with every token of its batch: 448 MiB for chunks of 2048 over
    this pool, 112 MiB for chunks of 512. The largest comes late in a run, and would look like growth. A stream says its first
    token at once and the rest at its end, which leaves the clients time to be punctual. Where its ranks meet is told: by itself
    SGLang takes some free port, half a minute later, when the server beside it may have it.
    """
    return spelled([
        *server.command(checkpoint, port), "--max-running-requests", "64", "--max-total-tokens", str(POOL_TOKENS),
        "--context-length", "16384", "--chunked-prefill-size", "512", "--cuda-graph-bs", "1", "2", "4", "8", "16", "32", "64",
        "--stream-interval", str(LONGEST_OUTPUT + 1), "--log-level-http", "warning", "--nccl-port", str(port + NCCL_PORT),
    ])  # fmt: skip


def pair_commands(
    checkpoint: Path, port: int, of_one: Callable[[Path, int], list[str]] = command, decode_gpu: int = 1
) -> list[list[str]]:
    """A prefill server from the first GPU on and a decode server from another, which takes requests back.

    SGLang's decode server holds back 512 tokens for each request unless told otherwise, the longest output here: none would
    ever have to go. `of_one` makes the command of a server that does both.
    """
    prefill = [*of_one(checkpoint, port), *role("prefill", port + BOOTSTRAP, 0)]
    decode = [*of_one(checkpoint, port + DECODE), *role("decode", port + BOOTSTRAP, decode_gpu)]
    return [prefill, [*decode, "--num-reserved-decode-tokens", "64"]]


def ranks_command(checkpoint: Path, port: int) -> list[str]:
    """Two ranks of DP attention, each with half of the requests and of the pool, on two GPUs."""
    pool = ["--max-total-tokens", str(POOL_TOKENS // 2)]
    return [*command(checkpoint, port), *Parallel(dp=2).options(), *pool]  # SGLang halves --max-running-requests by itself


@dataclass(frozen=True)
class Topology:
    """What serves one side. The bounds on growth during the load are of all servers together, in MiB."""

    commands: Callable[[Path, int], list[list[str]]]
    client: Callable[[int], Client]
    servers: tuple[str, ...]  # what a report calls them, in the order of their commands
    environment: dict[str, str]
    gpus: int = 1  # of a side
    ranks: int = 1  # of each server; every one says in the log that the backend is active
    counting: int = 1  # DP ranks of all servers whose /server_info counts whole rounds,
    one_graph: tuple[str, ...] = ("0.5.23",)  # on these releases, unless they are not to,
    by_default: bool = True  # or only where they are asked to
    growth: dict[str, int] = field(default_factory=lambda: {"gpu_mib": 256, "host_mib": 256})
    builtin: bool = True  # whether SGLang's own backend can serve it on Hopper


two_ranks = partial(
    Topology,
    client=Client,
    servers=("server",),
    environment=ALLOCATOR | RETRACTING,
    gpus=2,
    ranks=2,
    growth={"gpu_mib": 512, "host_mib": 512},
)
"""One server on two GPUs."""

TOPOLOGIES = {
    "one": Topology(
        lambda checkpoint, port: [command(checkpoint, port)],
        Client,
        ("server",),
        ALLOCATOR | RETRACTING,
        one_graph=ROUND_GRAPHS,
    ),
    # A transfer engine cannot hand memory in expandable segments to another process, so there are none, and what the allocator
    # keeps is more.
    "pd": Topology(pair_commands, PairClient, ("prefill", "decode"), {}, gpus=2, growth={"gpu_mib": 1024, "host_mib": 512}),
    "dp": two_ranks(lambda checkpoint, port: [ranks_command(checkpoint, port)], counting=2),
    "dcp": two_ranks(
        lambda checkpoint, port: [[*command(checkpoint, port), *DIVIDED.options()]], builtin=DIVIDED.serves(BUILTIN)
    ),
    # Both servers on both GPUs.
    "pd-dp": Topology(
        partial(pair_commands, of_one=ranks_command, decode_gpu=0),
        PairClient,
        ("prefill", "decode"),
        RETRACTING,
        gpus=2,
        ranks=2,
        counting=2,
        by_default=False,
        growth={"gpu_mib": 2048, "host_mib": 1024},
    ),
}
"""During the load torch's allocator keeps what the largest prefill so far needed, indexer scores of up to 112 MiB."""


def processes(pid: int) -> list[psutil.Process]:
    """A server and all that it started, as far as they live."""
    found = []
    with suppress(psutil.Error):
        found += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return found


def memory(pids: dict[str, int]) -> dict:
    """MiB that the servers of these names hold together, and `by_server` each of them; None where nobody tells.

    `by_process` has those that hold some of a GPU, by server and title; alike ones are added up.
    `gpu_mib` is on their GPUs, whatever runs beside them. `host_mib` is resident; a page that processes share counts in each.
    """
    on_gpus, by_server, by_process = by_process_mib(seconds=10), {}, {}
    for name, pid in pids.items():
        tree = processes(pid)
        by_server[name] = {"gpu_mib": on_gpu_mib(tree, on_gpus), "host_mib": resident_mib(tree)}
        alike = defaultdict(list)
        for process in tree:
            if on_gpu_mib([process], on_gpus):
                alike[f"{name}, {title(process)}"].append(process)
        by_process |= {key: {"gpu_mib": on_gpu_mib(of, on_gpus), "host_mib": resident_mib(of)} for key, of in alike.items()}
    total = {}
    for key in ("gpu_mib", "host_mib"):
        known = [of_one[key] for of_one in by_server.values() if of_one[key] is not None]
        total[key] = round(sum(known), 1) if known else None
    return total | {"by_server": by_server, "by_process": by_process}


def on_gpu_mib(tree: list[psutil.Process], on_gpus: dict[int, int] | None) -> int | None:
    return None if on_gpus is None else sum(on_gpus.get(process.pid, 0) for process in tree)


def title(process: psutil.Process) -> str:
    """What a process calls itself: SGLang names its schedulers, with their ranks where there are several."""
    with suppress(psutil.Error):
        return next(iter(process.cmdline()), process.name())
    return str(process.pid)


def resident_mib(tree: list[psutil.Process]) -> float | None:
    total = 0
    for process in tree:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return round(total / 2**20, 1) if total else None
