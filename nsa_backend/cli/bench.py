"""Measure on this machine's GPU, beside SGLang's built-in backend in the same run.

  metadata   what the metadata of one replay costs, beside three generations of SGLang's path
  attention  every implementation this GPU runs: time, distance from the floor, error, cost of our wrapper
  draft      a speculative round of real servers: time, time outside CUDA graphs, launches
  serve      real servers over HTTP: tokens per second, time to first token and per token, accept length, by N, batch and length
  profile    the kernels of one layer and of one forward of real servers: decode, verify, draft, draft-extend, prefill
  capture    servers alone on the GPU: time until they answer, time and memory of each capture, of rounds in one graph too
  memory     device memory of captured metadata

Exits with 0 where everything was measured, 1 where something was left out (the report says what), 2 on bad arguments,
143 after a SIGTERM, which ends the servers too.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

from nsa_backend.benchmarks.servers.server import OPTIONS as IMPLEMENTATIONS
from nsa_backend.benchmarks.servers.server import VARIANTS

EXAMPLE = "python -m nsa_backend bench metadata --quick --out metadata.json"

BENCHES = {
    "metadata": ("--steps", "--batch", "--length"),
    "attention": ("--batch", "--heads", "--section"),
    "draft": ("--checkpoint", "--steps", "--batch", "--length", "--sides", "--port"),
    "serve": (
        "--checkpoint",
        "--steps",
        "--batch",
        "--length",
        "--prompt-tokens",
        "--parallel",
        "--samples",
        "--parts",
        "--kv",
        "--cached",
        "--all-reduce",
        "--temperature",
        "--top-p",
        "--sides",
        "--port",
        "--model",
        "--prompts",
        "--tokens",
        "--server",
    ),
    "profile": ("--checkpoint", "--steps", "--batch", "--length", "--kv", "--sides", "--port"),
    "capture": ("--checkpoint", "--steps", "--batch", "--sides", "--port"),
    "memory": (),
}
"""What to measure, and which of OPTIONS it takes; each is a module nsa_backend.benchmarks.commands.NAME."""


def _sides_of_ours() -> str:
    """Every one, with the variables that it sets, by what follows NSA_BACKEND_, and the implementation that it names."""

    def told(side: str, variables: dict[str, str]) -> str:
        sets = [f"{name.removeprefix('NSA_BACKEND_')}={value}" for name, value in variables.items()]
        return f"{side} ({', '.join(sets + ['an implementation'] * (side in IMPLEMENTATIONS))})"

    return ", ".join(told(side, variables) for side, variables in VARIANTS.items())


OPTIONS = {
    "--steps": "draft steps N (0 in serve, profile and capture: no speculation)",
    "--batch": "requests; query rows in attention; in capture the most that run at once",
    "--length": "tokens of a request; of a prompt where there are servers",
    "--heads": "query heads on this GPU",
    "--section": "sections of the report: decode, wrapper, by_rows, layer_front, whole_front",
    "--checkpoint": "faithful, wide, deep (61 small layers), or a folder that fits twice on the GPU; in serve, profile and "
    "capture also v3.2-tp8, v3.2-dp8, glm-5.1-tp8, glm-5.1-dp8, glm-5.2-tp8: one rank of a released model, all layers or 36 "
    "(v3.2-tp8-36-layers), random weights",
    "--prompt-tokens": "most prompt tokens of a batch: a million take half a minute a sample",
    "--parallel": "GPUs of a server: tp4, dp4 (DP attention), dp2-tp2 (DP attention 2 of two GPUs each), tp4-ep (experts "
    "divided), cp2 (prefill context parallel), pp2, pd (a prefill and a decode server); one GPU unless told. With a rank of "
    "tensor parallel 8: tp2, tp4, tp8, dcp2, dcp4, dcp8 serve as many of its ranks as one server, one side at a time",
    "--samples": "samples of a side and cell; unless told 7, 5 or 3, the fewer the more prompt tokens, and 9, 3 or 2 of a rank",
    "--parts": "batches of a rank whose rounds are told by part too, from the servers that were timed",
    "--kv": "bfloat16 or fp8_e4m3: the KV cache of a rank's servers; bfloat16 unless told",
    "--cached": "tokens cached before each prompt of a rank, a chat so far; --length is what is new; several one after another",
    "--all-reduce": "how ranks of one server sum up: nccl alone, unless told, or sglang, whatever SGLang takes by itself",
    "--temperature": "of every request; 0, which is greedy, unless told",
    "--top-p": "of every request that samples; 1 unless told",
    "--sides": f"whose servers, in the order in which they start: ours, builtin, or ours otherwise: {_sides_of_ours()}",
    "--model": "folder of a checkpoint of your own, served by one side after the other; needs --prompts",
    "--prompts": "your prompts: a .jsonl file with text, messages or input_ids a line, or a text file with one a line",
    "--tokens": "most new tokens of an answer to one of --prompts",
    "--server": "more options of the servers of --model or of a rank, in one word: '--tp-size 8', or one without a value as "
    "--server=--disable-radix-cache",
    "--port": "of the first server; runs at the same time need ports 2000 apart",
}

FRACTIONS = ("--temperature", "--top-p")
"""Those that are no whole numbers."""

SINGLE = (
    "--port",
    "--prompt-tokens",
    "--samples",
    "--kv",
    "--all-reduce",
    "--model",
    "--prompts",
    "--tokens",
    "--server",
    *FRACTIONS,
)
"""Those that take one value."""

TEXTS = ("--checkpoint", "--parallel", "--kv", "--all-reduce", "--section", "--sides", "--model", "--prompts", "--server")
"""Those that are no numbers."""

OWN = ("--prompts", "--tokens", "--server")
NOT_OWN = dict.fromkeys(
    ("--checkpoint", "--length", "--prompt-tokens", "--samples", "--parts", "--cached", "--quick"),
    "whose prompts come from --prompts",
) | {
    "--parallel": "whose GPUs --server names: '--tp-size 8'",
    "--kv": "whose KV cache --server names: '--kv-cache-dtype fp8_e4m3'",
    "--all-reduce": "whose servers have SGLang's own unless --server says otherwise",
}
"""What goes with --model alone, and what does not go with it, with the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=BENCHES, metavar="{" + ",".join(BENCHES) + "}", help="see above")
    parser.add_argument("--quick", action="store_true", help="fewer cells and samples: a minute or two")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.add_argument("--out", type=Path, help="write the report to this file, after every cell and at the end")
    parser.add_argument("--minutes", type=_positive, default=15.0, help="bound on the run time; what does not fit is left out")
    for option, text in OPTIONS.items():
        takers = ", ".join(name for name, taken in BENCHES.items() if option in taken)
        kind = str if option in TEXTS else float if option in FRACTIONS else _count
        parser.add_argument(option, type=kind, nargs=None if option in SINGLE else "+", help=f"{text} ({takers})")


def run(args: argparse.Namespace) -> int:
    for option in OPTIONS:
        if getattr(args, option[2:].replace("-", "_")) is not None and option not in BENCHES[args.what]:
            _fail(
                f"bench {args.what} does not take {option}: it takes {' '.join(BENCHES[args.what]) or 'none of these options'}"
            )
    _check_model(args)
    if args.top_p is not None and not args.temperature:
        _fail("--top-p is for requests that sample: pass --temperature above 0 too")
    import torch

    if not torch.cuda.is_available():
        _fail("bench needs an NVIDIA GPU, and torch sees none: run it where you serve, or try `demo`, which needs no GPU")
    from nsa_backend.benchmarks.reports.cells import run_cells
    from nsa_backend.benchmarks.reports.report import dumped, environment, write_report

    bench = import_module(f"nsa_backend.benchmarks.commands.{args.what}")
    gpus = _gpus(args.parallel, torch.cuda.device_count()) if args.parallel else 1
    head = {"environment": environment(gpus), "command": shlex.join(["python", "-m", "nsa_backend", *args.argv])}

    def keep(report: dict) -> None:
        if args.out:
            write_report(args.out, head | report)

    with _ended_by_sigterm(), ExitStack() as resources:
        report = head | run_cells(bench.cells(args, resources), 60 * args.minutes, keep)
    keep(report)
    if args.json:
        print(dumped(report))  # noqa: T201 (the command's output)
    else:
        print(report["environment"])  # noqa: T201
        bench.show(report)
    for name in report["not_measured"]:
        print(f"not measured within {args.minutes:g} minutes: {name}", file=sys.stderr)  # noqa: T201
    for lost in report.get("lost", []):
        print(f"lost: {lost}", file=sys.stderr)  # noqa: T201
    return 1 if report["not_measured"] or report.get("lost") else 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A SIGTERM leaves as Ctrl-C does; by itself it would end this process alone, and servers would keep the GPU."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_model(args: argparse.Namespace) -> None:
    given = [option for option in (*OWN, *NOT_OWN) if getattr(args, option[2:].replace("-", "_")) not in (None, False)]
    if args.model is None:
        if alone := [option for option in given if option in OWN and option != "--server"]:
            _fail(f"{alone[0]} says how --model is measured: pass --model FOLDER too")
        return
    if args.prompts is None:
        _fail("--model needs --prompts FILE: what a draft is worth depends on the text")
    if wrong := [option for option in given if option in NOT_OWN]:
        _fail(f"{wrong[0]} does not go with --model, {NOT_OWN[wrong[0]]}")


def _gpus(parallel: list[str], there: int) -> int:
    """GPUs of the largest deployment of --parallel; ends where there are fewer, or where a pair could not hand over KV."""
    from nsa_backend.benchmarks.servers.pairs import engine_problem
    from nsa_backend.benchmarks.servers.parallel import parsed

    asked = list(map(parsed, parallel))
    largest = max(asked, key=lambda one: one.gpus)
    if largest.gpus > there:
        _fail(f"--parallel {largest} takes {largest.gpus} GPUs, and torch sees {there}")
    if any(one.pd for one in asked) and (problem := engine_problem()):
        _fail(problem)
    return largest.gpus


def _fail(sentence: str) -> None:
    print(f"python -m nsa_backend bench: {sentence}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return value
