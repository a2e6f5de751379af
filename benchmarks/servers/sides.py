"""The servers of a comparison: which sides there are, on which checkpoint, with which options, running at the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from nsa_backend.benchmarks.checkpoints import faithful, ranks
from nsa_backend.benchmarks.servers import server_options
from nsa_backend.benchmarks.servers.gpu_memory import weighed
from nsa_backend.benchmarks.servers.pairs import Pair, started
from nsa_backend.benchmarks.servers.parallel import NCCL, ONE_GPU, Parallel
from nsa_backend.benchmarks.servers.server import APART_SECONDS, BACKENDS, ENVIRONMENTS, WITH_DRAFTS, Server
from nsa_backend.kernels.plan import PAGE_SIZE

SIZES = [*server_options.decode_graphs(), "--max-total-tokens", "65536", "--disable-radix-cache"]
"""Graphs for the batches that are measured, a small pool, and no cache, so that every prefill is the same."""

PORTS_APART = 50  # between the servers of two sides


class Servers:
    """The sides of a comparison on one checkpoint, kept running until another checkpoint, N or other GPUs are asked for."""

    def __init__(
        self,
        folder: Path,
        port: int,
        shapes: Sequence[tuple[int, int]],
        new_tokens: int,
        sides: Sequence[str] | None = None,
    ):
        """Checkpoints and logs go to `folder`; servers listen 50 ports apart, and have room and graphs for `shapes`.

        SGLang takes further ports from 100 above a server's on for DP attention.

        Args:
            folder: of this run alone.
            port: of the first server.
            shapes: (requests, prompt tokens) of all that will be asked.
            new_tokens: a request.
            sides: keys of servers.ENVIRONMENTS, in the order in which servers start and answer; those of BACKENDS if None.
        """
        self._sides = sides_of(sides)
        self._folder, self._port = folder, port
        self._shapes, self._new_tokens = shapes, new_tokens
        self._open, self._key = ExitStack(), None
        self._found: dict[str, Server | Pair] = {}
        self.memory: dict[str, list[float]] = {}
        """GiB on each GPU of the servers that run, by name: empty lists, which are filled when the servers end."""

    def of(self, checkpoint: str, steps: int, parallel: Parallel = ONE_GPU) -> dict[str, Server | Pair]:
        """Servers by side, ready; without drafts there are no rounds, in three graphs or in one.

        `checkpoint` is a name in faithful.SHAPES or a folder.
        """
        if self._key != (checkpoint, steps, parallel):
            self.close()
            path = checkpoint_of(checkpoint, self._folder)
            options = options_for(self._shapes, self._new_tokens, parallel)
            sides = serving(self._sides, steps, parallel)
            for number, side in enumerate(sides):
                time.sleep(APART_SECONDS * (number > 0))
                log = self._folder / f"{path.name}-{parallel}-n{steps}-{side}.log"
                server = started(parallel, side, path, self._port + PORTS_APART * number, steps, log, *options)
                self.memory[side] = []
                self._found[side] = self._open.enter_context(weighed(server, self.memory[side]))
            for server in self._found.values():
                server.wait()
            self._key = checkpoint, steps, parallel
        return self._found

    def close(self) -> None:
        """End what runs."""
        self._open.close()
        self._found, self._key, self.memory = {}, None, {}


def sides_of(named: Sequence[str] | None) -> tuple[str, ...]:
    """The sides that --sides names; SystemExit for one that there is not."""
    for side in named or ():
        if side not in ENVIRONMENTS:
            raise SystemExit(f"--sides {side} is none: there are {', '.join(ENVIRONMENTS)}")
    return tuple(named or BACKENDS)


def serving(sides: Sequence[str], steps: int, parallel: Parallel) -> list[str]:
    """Those of `sides` that a comparison with N = `steps` has; some are with drafts alone."""
    return [side for side in sides if (steps or side not in WITH_DRAFTS) and parallel.serves(side)]


def check_sides(sides: Sequence[str], asked: Sequence[Parallel]) -> None:
    """End where a deployment is asked for that none of `sides` serves.

    Raises:
        SystemExit: with the side to add.
    """
    for parallel in asked:
        if not any(map(parallel.serves, sides)):
            raise SystemExit(
                f"--parallel {parallel} is nothing that {' or '.join(sides)} serves: SGLang's built-in backend does not divide "
                "KV on Hopper; name ours in --sides too"
            )


def options_for(
    shapes: Sequence[tuple[int, int]],
    new_tokens: int,
    parallel: Parallel = ONE_GPU,
    *,
    bounded: bool = True,
    cached: int = 0,
    all_reduce: str = NCCL,
) -> list[str]:
    """A server's options beyond the README's command: graphs and a pool for `shapes`, prefill as a default server runs it.

    A pool that is not `bounded` takes the share of memory that options behind these name. `cached` tokens before each prompt
    have room beside it, and are kept.
    """
    of_rank = parallel.of_a_rank(shapes)
    batches = {batch for batch, _ in of_rank}
    # With drafts SGLang keeps a page less.
    longer = [(batch, length + PAGE_SIZE) for batch, length in of_rank] if cached else []
    return [
        *server_options.decode_graphs({*server_options.MEASURED_BATCHES, *batches}),
        *server_options.prefill_graphs(of_rank + longer, parallel.dp),
        *server_options.pool(
            [(batch, cached + length) for batch, length in of_rank], new_tokens, parallel.dp, bounded=bounded, keeps=cached > 0
        ),
        *parallel.options(all_reduce),
    ]


def checkpoint_of(name: str, folder: Path, count: int = 1) -> Path:
    """The checkpoint called `name`, made up or `count` ranks, written into `folder` if it is not there; or a path."""
    known, of_rank = (*faithful.ALL_SHAPES, *ranks.RANKS), ranks.named(name) is not None
    if name not in known and not of_rank:
        if not (Path(name) / "config.json").exists():
            raise SystemExit(f"--checkpoint {name} is neither {' or '.join(known)} nor a folder with a config.json")
        return Path(name)
    out = folder / (name if count == 1 else f"{count}-of-{name}")
    if not (out / "config.json").exists():
        if of_rank:
            return ranks.write(out, name, count)
        faithful.write(out, shape=faithful.ALL_SHAPES[name])
    return out
