"""`serve` and `profile` of a rank of a released model: one server a GPU, since two do not fit, and every side in both orders.

On one GPU the sides follow one another, then once more in the opposite order; on two each has one, then the other. So no side
always has the cooler GPU or the emptier machine, and two processes of a side tell how much a process matters. Rows are of one
side and turn. Drafts of random weights are not accepted: rounds are compared, and a round over the accept length of a trained
model is its time a token.

With --cached a prompt is a chat's next turn: so many tokens before it are those of every sample, and the server keeps their KV.
Of several numbers every shape is measured behind each, on the same servers.

With --parallel a server has as many ranks as GPUs, and one server runs at a time: sides of the first deployment, then of the
next, every other turn in reverse. Its KV pool takes the memory that is left, so that deployments compare in tokens too."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from nsa_backend.benchmarks.checkpoints import ranks
from nsa_backend.benchmarks.reports import parts, traces
from nsa_backend.benchmarks.reports.captures import captures
from nsa_backend.benchmarks.reports.cells import Cell, Prepared
from nsa_backend.benchmarks.reports.rank_rows import shape_of, title_of
from nsa_backend.benchmarks.servers import server_options
from nsa_backend.benchmarks.servers.generation import in_turns, of_turns, summary, turns
from nsa_backend.benchmarks.servers.pairs import meeting
from nsa_backend.benchmarks.servers.parallel import ALL_REDUCE, NCCL, ONE_GPU, Parallel, parsed
from nsa_backend.benchmarks.servers.server import APART_SECONDS, BF16, KV, Server, own_words
from nsa_backend.benchmarks.servers.sides import PORTS_APART, check_sides, checkpoint_of, options_for, serving, sides_of
from nsa_backend.benchmarks.servers.stages import TURNS, Stage, stages

TOKENS, PROFILED_TOKENS, PORT = 128, 32, 25000
STEPS, LENGTHS, LONG = (0, 3, 1, 5), (300, 4096, 32768, 131072), 65536
PROFILED = (98, 99)
"""Numbers of the turns before a profile and in it, which no sample has."""
CONTEXT = 163840
"""Tokens of a request that every server has tables for; GLM-5.2 would have them for a million otherwise."""
BESIDE_POOL = 11 * ranks.GIB
"""Of a GPU, for what is neither weights nor pool: activations of a prefill chunk, graphs, libraries."""
BESIDE_A_CONTEXT_RANK = 5 * ranks.GIB // 8
"""The same for each other rank that divides a context: its heads' queries and parts of a chunk of 8192 tokens. With two ranks
2.5 GiB of an H200 were left over."""
STARTING = 900.0
"""Seconds that a first start may take: 190 on an H200, of which most compile kernels for one prefill."""


def bytes_there() -> int:
    """Memory of the first GPU that this process sees."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory


def alone(there: int, context_ranks: int = 1) -> tuple[str, ...]:
    """Options of a server that has a GPU of `there` bytes to itself, or each of its `context_ranks`."""
    beside = BESIDE_POOL + BESIDE_A_CONTEXT_RANK * (context_ranks - 1)
    return "--mem-fraction-static", f"{1 - beside / there:.2f}", "--context-length", str(CONTEXT)


def needed_bytes(name: str, parallel: Parallel, shape: tuple[int, int], cached: int = 0) -> int:
    """Memory of each GPU of a server that has room for `shape` behind `cached` tokens of each prompt."""
    ((batch, length),) = parallel.of_a_rank([shape])
    return ranks.needed_bytes(name, server_options.pool_tokens([(batch, cached + length)], TOKENS), parallel.dcp)


@dataclass
class RankServers:
    """The servers of one rank, N and stage, kept running until others are asked for."""

    folder: Path
    port: int
    shapes: dict[tuple[str, Parallel], list[tuple[int, int]]]  # by rank and deployment, all that fit
    kv: str
    there: int  # bytes of a GPU
    most_cached: int = 0  # tokens before a prompt, which they keep; 0: they keep none
    more: tuple[str, ...] = ()  # options behind ours
    all_reduce: str = NCCL  # one of parallel.ALL_REDUCE, between ranks of one server
    _open: ExitStack = field(default_factory=ExitStack)
    _found: dict[str, Server] = field(default_factory=dict)
    prepared: Prepared = field(default_factory=Prepared)
    ready: dict[str, float] = field(default_factory=dict)
    """Seconds from the start of each side's server until it answered; with two at once each waits for the other too."""
    captured: dict[str, list[dict]] = field(default_factory=dict)
    """What each side's server has captured until then, until its first rows take it."""
    _said: dict[str, list[str]] = field(default_factory=dict)
    """What each side's log has said so far of what it serves, as rows have it."""

    def of(self, name: str, steps: int, turn: int, stage: Stage) -> dict[str, Server]:
        """Servers by side, ready."""
        if self.prepared.key != (name, steps, turn, stage):
            asked = time.perf_counter()
            self.close()
            parallel, one_gpu = stage.parallel, stage.parallel == ONE_GPU
            path = checkpoint_of(name, self.folder, parallel.gpus)
            options = options_for(
                self.shapes[name, parallel], TOKENS, parallel,
                bounded=one_gpu, cached=self.most_cached, all_reduce=self.all_reduce,
            )  # fmt: skip
            options += (*alone(self.there, parallel.dcp), *self.more)
            began = {}
            for number, (side, gpus) in enumerate(stage.servers):
                time.sleep(APART_SECONDS * (number > 0))
                log = self.folder / f"{name}-{parallel}-n{steps}-{turn}-{side}.log"
                port, began[side] = self.port + PORTS_APART * number, time.perf_counter()
                own = [*options, *(() if one_gpu else meeting(port))]
                server = Server(side, path, port, steps, log, *own, environment={"CUDA_VISIBLE_DEVICES": gpus}, kv=self.kv)
                self._found[side] = self._open.enter_context(server)
            for side, server in self._found.items():
                server.wait(STARTING)
                self.ready[side] = round(time.perf_counter() - began[side], 1)
                self.captured[side] = captures(server.log.read_text(errors="replace"))
            self.prepared.key = name, steps, turn, stage
            self.prepared.seconds += time.perf_counter() - asked
        return self._found

    def news(self, side: str) -> list[str]:
        """What the log of a side's server has said of what it serves since it was asked last: printed too.

        A side whose name promises what its log does not say is another side.
        """
        said = own_words(self._found[side].log.read_text(errors="replace"))
        new = [words for words in said if words not in self._said.get(side, [])]
        self._said[side] = said
        for words in new:
            print(f"{side}: {words}", flush=True)
        return new

    def close(self) -> None:
        """End what runs."""
        self._open.close()
        self._found, self._said, self.prepared.key = {}, {}, None


Measure = Callable[[RankServers, str, int, int, Stage, int, int, int], list[dict]]
"""Rows of (servers, rank, N, turn, stage, requests, prompt tokens, tokens cached before each)."""


def cells(
    names: Sequence[str], options: argparse.Namespace, resources: ExitStack, measure: Measure, turns: int = TURNS
) -> list[Cell]:
    """One cell a rank, N, stage, batch and length; what does not fit is told in the section `left_out`.

    Raises:
        SystemExit: not even the smallest of the shapes fits the GPUs, or a deployment has no side.
    """
    import torch

    there = bytes_there()
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    asked = list(map(parsed, getattr(options, "parallel", None) or [str(ONE_GPU)]))
    sides = sides_of(options.sides)
    check_sides(sides, asked)
    wanted, cached = {name: shapes(name, options) for name in names}, sorted(getattr(options, "cached", None) or [0])
    most_cached = cached[-1]
    fitting = {
        (name, parallel): [shape for shape in wanted[name] if needed_bytes(name, parallel, shape, most_cached) <= there]
        for name in names
        for parallel in asked
    }
    for name in names:
        if not any(fitting[name, parallel] for parallel in asked):
            most = max(parallel.dcp for parallel in asked)
            batch, length = min(shape for parallel in asked for shape in parallel.of_a_rank(wanted[name][:1]))
            ranks.check_fits(name, server_options.pool_tokens([(batch, most_cached + length)], TOKENS), there, most)
    folder = Path(resources.enter_context(TemporaryDirectory(prefix="nsa-bench-")))
    more = tuple(shlex.split(getattr(options, "server", None) or ""))
    kv, all_reduce = kv_of(options), all_reduce_of(options, asked)
    servers = RankServers(folder, options.port or PORT, fitting, kv, there, most_cached, more, all_reduce)
    resources.callback(servers.close)
    found = []
    for name in names:
        for steps in STEPS[:2] if options.steps is None else options.steps:
            of_steps = [(parallel, serving(sides, steps, parallel)) for parallel in asked]
            for turn, stage in stages(of_steps, gpus, 1 if options.quick else turns):
                title = title_of(name, stage.parallel, servers.kv, servers.all_reduce)
                head, fits = f"{title}, N = {steps}", fitting[name, stage.parallel]
                standing = {"prepared": servers.prepared, "key": (name, steps, turn, stage)}
                for (batch, length), before in product(fits, cached):
                    measured = partial(measure, servers, name, steps, turn, stage, batch, length, before)
                    found.append(Cell(f"{head}, {shape_of(batch, length, before)}, {stage}", measured, **standing))
                for (batch, length), before in product(fits, cached):
                    if batch in (getattr(options, "parts", None) or ()):
                        measured = partial(by_part, servers, name, steps, turn, stage, batch, length, before)
                        title = f"{head}, {shape_of(batch, length, before)} by part, {stage}"
                        found.append(Cell(title, measured, **standing, kind="by part"))
        for parallel in asked:
            for batch, length in (shape for shape in wanted[name] if shape not in fitting[name, parallel]):
                row = {"checkpoint": name, "parallel": str(parallel), "batch": batch, "length": length}
                row |= {"gpu_gib": round(there / ranks.GIB, 1)}
                row |= {"needs_gib": round(needed_bytes(name, parallel, (batch, length), most_cached) / ranks.GIB, 1)}
                title = f"{title_of(name, parallel)}, {shape_of(batch, length, most_cached)} does not fit"
                found.append(Cell(title, partial(list, [row]), "left_out"))
    return found


def check_alone(options: argparse.Namespace, names: Sequence[str]) -> None:
    """End where ranks are asked for with what is no rank, on GPUs that make no ranks, or of a release that cannot run them.

    Raises:
        SystemExit: with what to change.
    """
    others = [name for name in options.checkpoint if name not in names]
    if others:
        raise SystemExit(f"--checkpoint {names[0]} fills a GPU and {others[0]} shares one: measure them in two runs")
    for name in names:
        for word in getattr(options, "parallel", None) or ():
            check_ranks_of(name, word)
        ranks.check_release(name)


def kv_of(options: argparse.Namespace) -> str:
    """The KV cache that --kv names; SystemExit for one that there is not."""
    named = getattr(options, "kv", None) or BF16
    if named not in KV:
        raise SystemExit(f"--kv {named} is none: there are {', '.join(KV)}")
    return named


def all_reduce_of(options: argparse.Namespace, asked: Sequence[Parallel]) -> str:
    """How ranks of one server sum up; SystemExit for a way that there is not, or where no server has several."""
    named = getattr(options, "all_reduce", None)
    if named not in (None, *ALL_REDUCE):
        raise SystemExit(f"--all-reduce {named} is none: there are {', '.join(ALL_REDUCE)}")
    if named and all(parallel == ONE_GPU for parallel in asked):
        raise SystemExit(f"--all-reduce {named} is between ranks of one server, and each has one: pass --parallel tp8 too")
    return named or NCCL


def check_no_rank(options: argparse.Namespace) -> None:
    """End where an option is given that only ranks have, and no rank is asked for.

    Raises:
        SystemExit: with what to change.
    """
    for option in ("kv", "cached", "server", "all-reduce"):
        if getattr(options, option.replace("-", "_"), None):
            names, others = ", ".join(ranks.RANKS), " and for --model" if option == "server" else ""
            raise SystemExit(
                f"--{option} is for ranks of released models{others}: name one of {names}, or leave --{option} out"
            )


def check_ranks_of(name: str, word: str) -> None:
    """End where --parallel `word` would have a GPU do other work than a rank of the released model.

    Raises:
        SystemExit: with the words that there are.
    """
    words = ranks.named(name).deployments
    if word not in words:
        raise SystemExit(
            f"--parallel {word} is no part of the {ranks.RANKS_OF_A_MODEL} ranks that --checkpoint {name} is one of: "
            f"write {', '.join(words)}, or leave --parallel out"
        )


def check_room(name: str, wanted: Sequence[tuple[int, int]]) -> None:
    """End before any weight is made where the release or the GPU cannot hold the largest of these shapes.

    Raises:
        SystemExit: with what the rank needs and what there is.
    """
    ranks.check_release(name)
    ranks.check_fits(name, server_options.pool_tokens(wanted, TOKENS), bytes_there())


def shapes(name: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    """(requests, prompt tokens) that are asked for, the fewest tokens first; a single request of the longest prompt."""
    lengths = options.length or (LENGTHS[:1] if options.quick else LENGTHS)
    batches = options.batch or ranks.named(name).batches
    found = {(1 if length > LONG and not options.batch else batch, length) for length in lengths for batch in batches}
    most = getattr(options, "prompt_tokens", None)
    return sorted((s for s in found if not most or s[0] * s[1] <= most), key=lambda s: (s[0] * s[1], s))


FIRST_SAMPLES = 9
"""Of first tokens, at least, of batches of at most FEW_TOKENS: of two requests a scheduler may take up one first, or both, so
the two samples of a side were 67 and 92 ms, and of the other 63 and 66."""
FEW_TOKENS = 2048


def samples_of(batch: int, length: int) -> int:
    """Samples a side: first tokens of a short prompt wander by half, and long batches prefill for half a minute."""
    tokens = batch * length
    return next(samples for most, samples in ((512, 9), (1 << 17, 3), (float("inf"), 2)) if tokens <= most)


def times(
    servers: RankServers,
    name: str,
    steps: int,
    turn: int,
    stage: Stage,
    batch: int,
    length: int,
    cached: int,
    *,
    samples: int | None = None,
) -> list[dict]:
    """A row a side: milliseconds of a round and a token, time to first token, tokens a second, tokens that its KV pool holds.

    There are `samples` of each, or as many as `samples_of` says, and of first tokens perhaps more: see FIRST_SAMPLES. The first
    rows of a server have what it has captured too, and every row has what the server's log said for the first time until then.
    Where a pool is too small for the batch, of which requests would wait, rows have `needs_tokens` and no times.
    """
    running = servers.of(name, steps, turn, stage)
    samples = samples or samples_of(batch, length)
    pools, needed = {side: server.pool_tokens() for side, server in running.items()}, pool_needed(stage, batch, length, cached)
    fits = min(pools.values()) >= needed
    kept = {"cached": cached, "keeps": servers.most_cached > 0}
    found = in_turns(running, batch, length, TOKENS, samples, **kept) if fits else {}
    # the turn behind the last one has warmed the servers up
    more = range(samples + 1, FIRST_SAMPLES + 1) if fits and batch * length <= FEW_TOKENS else ()
    firsts = of_turns(running, batch, length, 1, more, **kept)
    cell = of_cell(servers, name, stage, steps, batch, length, cached) | {"tokens": TOKENS, "samples": samples}
    cell |= {"first_samples": samples + len(more)} if more else {}
    return [
        cell
        | {"side": side, "turn": turn, "gpu": gpus, "seconds_to_ready": servers.ready[side], "pool_tokens": pools[side]}
        | ({"captures": servers.captured.pop(side)} if side in servers.captured else {})
        | ({"says": news} if (news := servers.news(side)) else {})
        | (summary(found[side], firsts[side]) if fits else {"needs_tokens": needed})
        for side, gpus in stage.servers
    ]


def pool_needed(stage: Stage, batch: int, length: int, cached: int) -> int:
    """Tokens of a rank's pool, at least, for its prompts of `length` tokens behind `cached` and their answers."""
    ((requests, _),) = stage.parallel.of_a_rank([(batch, length)])
    return requests * (cached + length + TOKENS)


def of_cell(servers: RankServers, name: str, stage: Stage, steps: int, batch: int, length: int, cached: int) -> dict:
    """What all rows of one cell have."""
    served = {"checkpoint": name, "parallel": str(stage.parallel), "kv": servers.kv}
    if servers.all_reduce != NCCL and stage.parallel != ONE_GPU:
        served["all_reduce"] = servers.all_reduce
    return served | {"steps": steps, "batch": batch, "length": length} | ({"cached": cached} if cached else {})


def by_part(
    servers: RankServers, name: str, steps: int, turn: int, stage: Stage, batch: int, length: int, cached: int
) -> list[dict]:
    """A row a side: a round's kernels by part, launches a layer, idle time of the GPU, time of the host in graph launches.

    `before_rounds` has what the GPU did and for what it waited until the first round began.

    Of several GPUs they are the first rank's, and `exchange_a_layer` has launches and microseconds of the part `exchange` over
    the target's layers: in decode context parallel drafts divide no KV. Gathered logits count, which tensor parallel has too.
    """
    rows = []
    for side, server in servers.of(name, steps, turn, stage).items():
        if server.pool_tokens() < pool_needed(stage, batch, length, cached):
            continue
        folder = servers.folder / f"parts-{name}-{stage.parallel}-{steps}-{batch}-{length}-{cached}-{side}-{turn}"
        warm, asked = (turns(batch, length, cached, number) for number in PROFILED)
        server.generate(warm, PROFILED_TOKENS)
        if servers.most_cached and not cached:
            server.forget()
        server.profiled(folder, asked, PROFILED_TOKENS)
        of_target = ranks.named(name).config["num_hidden_layers"]
        events = traces.read_events(folder)
        found = parts.of_rounds(events, of_target + steps) | {"before_rounds": parts.before_rounds(events)}
        if stage.parallel != ONE_GPU:
            found["exchange_a_layer"] = [round(value / of_target, 2) for value in found["parts"][parts.EXCHANGE]]
        rows.append(of_cell(servers, name, stage, steps, batch, length, cached) | {"side": side} | found)
    return rows
