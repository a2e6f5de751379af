"""Real servers over HTTP, ours and SGLang's built-in: tokens per second, time to first token, time per token, accept length.

Same checkpoint, same prompts, greedy; N draft steps, batches from 1 to 32, prompts from 300 to 131072 tokens. Both servers of a
comparison live on the same GPU, or with --parallel on the same GPUs, and answer in turns; a side that cannot serve a deployment
has no server there. Two checkpoints are made up on the spot, both with an MTP layer that equals the target, so that every draft
is right if it attends to the right tokens: `faithful`, two layers of 64 heads, shows what the host and the backend cost;
`wide`, twelve layers of 128 heads with 64 experts, 8 a token, gives the GPU work to do.

Every sample is one streamed batch. Time to first token ends with the first token of the request that gets it last, so it holds
the prefill of the whole batch; time per token and the time of a round are taken from there to the last answer.

Requests are greedy; with --temperature they sample. The made-up checkpoints then choose among many tokens, and few drafts are
right: compare rounds. With --model and --prompts it serves a checkpoint and prompts of one's own: `own_model`. A
rank of a released model, as `v3.2-tp8`, fills a GPU, and is measured as `rank_serve` says.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from nsa_backend.benchmarks.checkpoints import faithful
from nsa_backend.benchmarks.checkpoints.ranks import named
from nsa_backend.benchmarks.commands import own_model, rank_serve
from nsa_backend.benchmarks.reports import rank_show
from nsa_backend.benchmarks.reports.cells import Cell
from nsa_backend.benchmarks.reports.report import print_table
from nsa_backend.benchmarks.servers.generation import compared, in_turns, sampling_of, summary
from nsa_backend.benchmarks.servers.parallel import ONE_GPU, Parallel, parsed
from nsa_backend.benchmarks.servers.server import ENVIRONMENTS, VARIANTS
from nsa_backend.benchmarks.servers.sides import Servers, check_sides, sides_of

TOKENS, PORT = 256, 25000
STEPS, BATCHES, LENGTHS = (0, 3), (1, 8, 32), (300, 4096, 32768, 131072)
QUICK_STEPS, QUICK_BATCHES, QUICK_LENGTHS = (0, 3), (1, 8), (300,)
LONG = 65536  # tokens of a prompt above which, unless batches are named, one request is measured alone


def cells(options: argparse.Namespace, resources: ExitStack) -> list[Cell]:
    """One cell a checkpoint, parallelism, N, length and batch; servers stay for all lengths and batches."""
    if options.model:
        return own_model.cells(options, resources)
    if of_ranks := [name for name in options.checkpoint or () if named(name) is not None]:
        rank_serve.check_alone(options, of_ranks)
        return rank_serve.cells(of_ranks, options, resources, partial(rank_serve.times, samples=options.samples))
    rank_serve.check_no_rank(options)
    deployments = list(map(parsed, options.parallel)) if options.parallel else [ONE_GPU]
    check_sides(sides_of(options.sides), deployments)
    wanted = shapes(options)
    folder = Path(resources.enter_context(TemporaryDirectory(prefix="nsa-bench-")))
    servers = Servers(folder, options.port or PORT, wanted, TOKENS, options.sides)
    resources.callback(servers.close)
    return [
        Cell(
            f"{name}, {parallel}, N = {n}, {batch} x {length}",
            partial(
                measure,
                servers,
                name,
                parallel,
                n,
                batch,
                length,
                options.samples or repeats(batch, length, options.quick),
                sampling_of(options),
            ),
        )
        for name in options.checkpoint or (["faithful"] if options.quick else list(faithful.SHAPES))
        for parallel in deployments
        for n in options.steps or (QUICK_STEPS if options.quick else STEPS)
        for batch, length in wanted
    ]


def shapes(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(requests, prompt tokens), the fewest prompt tokens first: a run that is cut lacks the longest."""
    lengths = options.length or (QUICK_LENGTHS if options.quick else LENGTHS)
    batches = QUICK_BATCHES if options.quick else BATCHES
    found = [(batch, length) for length in lengths for batch in options.batch or (batches if length < LONG else (1,))]
    if options.prompt_tokens:
        found = [(batch, length) for batch, length in found if batch * length <= options.prompt_tokens]
    return sorted(found, key=lambda shape: (shape[0] * shape[1], shape))


def repeats(batch: int, length: int, quick: bool) -> int:
    """Samples a side; a million prompt tokens take half a minute to prefill."""
    if quick:
        return 2
    return next(times for most, times in ((16_384, 7), (131_072, 5), (float("inf"), 3)) if batch * length <= most)


def measure(
    servers: Servers,
    checkpoint: str,
    parallel: Parallel,
    steps: int,
    batch: int,
    length: int,
    samples: int,
    sampling: dict[str, float],
) -> list[dict]:
    """One row; what the servers hold of each GPU comes into it when they end."""
    row = {"checkpoint": Path(checkpoint).name, "parallel": str(parallel), "steps": steps, "batch": batch, "length": length}
    row |= {"tokens": TOKENS, "samples": samples} | sampling
    found = in_turns(servers.of(checkpoint, steps, parallel), batch, length, TOKENS, samples, **sampling)
    sides = {side: summary(of_one) | {"memory_gib": servers.memory[side]} for side, of_one in found.items()}
    return [row | sides | compared(found)]


def show(report: dict) -> None:
    """Medians with the least and the most of the samples, memory of the GPU with the most, and ours over the built-in's."""
    if report["rows"] and "side" in report["rows"][0]:
        rank_show.show(report["rows"])
        return
    quantities = {"tokens/s": "tokens_per_s", "first token ms": "ttft_ms", "ms per token": "tpot_ms", "round ms": "round_ms"}
    table = []
    for r in report["rows"]:
        for backend in filter(r.__contains__, ENVIRONMENTS):
            side = r[backend]
            shown = [
                "{} ({}-{})".format(*(f"{v:.5g}" for v in (side[key]["median"], *side[key]["min_max"])))
                for key in quantities.values()
            ]
            cell = (r["checkpoint"], r.get("parallel"), r["steps"], f"{r['batch']} x {r['length']}")
            table.append((*cell, backend, *shown, f"{side['accept']:.2f}", max(side.get("memory_gib") or [None])))
        ratios = {"ours / builtin": r} | {f"{side} / ours": r.get(f"{side}_over_ours", {}) for side in VARIANTS}
        for name, over in ratios.items():
            if "ratio" in over:
                found = (over["speedup"], *over["ratio"].values())
                table.append((None, None, None, None, name, *(f"{ratio:.3f}" for ratio in found), None, None))
    print_table(("checkpoint", "parallel", "N", "prompts", "backend", *quantities, "accept", "GiB a GPU"), table)
