"""Decode speculatively on the CPU, with the right draft lengths and with SGLang's.

Exits with 1 where the tokens differ from plain greedy decoding or a draft of the per-step run is rejected, 2 on bad arguments.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLE = "python -m nsa_backend demo --steps 5 --requests 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_at_least(2), default=3, help="draft steps N (speculative_num_steps), at least 2")
    parser.add_argument("--requests", type=_at_least(1), default=4, help="requests in the batch")
    parser.add_argument("--tokens", type=_at_least(1), default=48, help="new tokens a request")


def run(args: argparse.Namespace) -> int:
    from nsa_backend.testing.process import start_process

    start_process()  # before torch and triton are imported below
    import torch
    from rich.console import Console

    from nsa_backend.demo.engine import Engine, decode_plain
    from nsa_backend.demo.shared_length import SharedLengthMultiStepBackend
    from nsa_backend.demo.speculative import SpeculativeDecoder

    console, started = Console(), time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    lengths = [37 + 29 * r for r in range(args.requests)]
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]
    console.print(f"{args.requests} requests of {lengths} tokens, {args.tokens} new tokens each, N = {args.steps} draft steps")
    plain = decode_plain(Engine(prompts, num_steps=args.steps), args.tokens)
    right, right_accepts = SpeculativeDecoder(Engine(prompts, num_steps=args.steps)).decode(args.tokens)
    shared, shared_accepts = SpeculativeDecoder(
        Engine(prompts, num_steps=args.steps, multi_step=SharedLengthMultiStepBackend)
    ).decode(args.tokens)
    console.print(f"tokens equal plain greedy decoding: per-step lengths {right == plain}, one shared length {shared == plain}")
    console.print(_histogram(args.steps, {"per-step lengths (ours)": right_accepts, "one shared length": shared_accepts}))
    console.print(f"{time.perf_counter() - started:.1f} s")
    all_accepted = set(right_accepts) == {args.steps + 1}
    return 0 if right == plain and shared == plain and all_accepted else 1


def _at_least(least: int):
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def _histogram(num_steps: int, runs: dict[str, list[int]]) -> Table:
    from rich.table import Table

    table = Table(title="rounds by accept length (accepted drafts and the bonus token)")
    table.add_column("draft steps attend with")
    for length in range(1, num_steps + 2):
        table.add_column(str(length), justify="right")
    table.add_column("mean", justify="right")
    for name, accepts in runs.items():
        counts = Counter(accepts)
        cells = [str(counts[length]) for length in range(1, num_steps + 2)]
        table.add_row(name, *cells, f"{sum(accepts) / len(accepts):.2f} of {num_steps + 1}")
    return table
