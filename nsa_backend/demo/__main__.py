"""python -m nsa_backend.demo: decode speculatively on the CPU, with the right draft lengths and with SGLang's.

Exits with 1 where the tokens differ from plain greedy decoding or a draft of the per-step run is rejected.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from nsa_backend.demo.cpu_host import prepare_process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nsa_backend.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="draft steps N (speculative_num_steps), at least 2")
    parser.add_argument("--requests", type=int, default=4, help="requests in the batch")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a request")
    args = parser.parse_args()
    if args.steps < 2 or args.requests < 1 or args.tokens < 1:
        parser.error("--steps must be at least 2, --requests and --tokens at least 1")
    prepare_process()
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


def _histogram(num_steps: int, runs: dict[str, list[int]]):
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


if __name__ == "__main__":
    sys.exit(main())
