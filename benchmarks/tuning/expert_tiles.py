"""Our launches of a prefill's experts, each by itself: what it takes beside what its bytes and its products would.

    python benchmarks/tuning/expert_tiles.py OUT.json [--ranks v3.2-tp8 glm-5-tp8] [--tokens 1024 2048 4096 8192]

It needs no SGLang, so a bare GPU machine runs it; `experts.py --many` times whole layers beside SGLang's. Tokens choose experts
at random. Both products are compared with PyTorch's in float32, over the experts of some blocks, before they are timed.
OUT.json is written after every cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from nsa_backend.benchmarks.calls.timing import captured_graph, interleaved, right_ones
from nsa_backend.benchmarks.reports.report import environment, write_report
from nsa_backend.kernels.choice_sums import choice_sums
from nsa_backend.kernels.down_blocks import down_blocks
from nsa_backend.kernels.down_rows import down_rows
from nsa_backend.kernels.expert_activation import activate
from nsa_backend.kernels.expert_tiles import BLOCK, WIDTH
from nsa_backend.kernels.gate_up_rows import gate_up_rows
from nsa_backend.kernels.layer_front_weights import GROUP

RANKS = {"v3.2-tp8": (256, 7168, 8), "glm-5-tp8": (257, 6144, 9)}
"""Experts, hidden and choices of a token; GLM-5's shared expert is the last one, which every token has."""
TOKENS = (1024, 2048, 4096, 8192)
REPEATS, SAMPLES = 4, 7
CHECKED = 8
"""Blocks that are compared."""
TOO_FAR = 1e-2
BYTES_PER_US, OPERATIONS_PER_US = 4.0e6, 1.3e9
"""What an H200 copies, and about what it multiplies in FP8 where sums of 128 products are scaled."""


def random_weights(experts: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 [experts, rows, columns], and scales of its blocks."""
    of_bytes = torch.randint(0x20, 0x40, (experts, rows, columns), device="cuda", dtype=torch.uint8)  # 0.06 to 1.9
    of_bytes = (of_bytes | torch.randint_like(of_bytes, 2) << 7).view(torch.float8_e4m3fn)
    return of_bytes, torch.rand(experts, rows // GROUP, columns // GROUP, device="cuda") * 1e-3


def in_blocks(chosen: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices [tokens, choices] as SGLang orders them: by row, experts by block, rows of all blocks."""
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    taken = (counts + block - 1) // block
    begins, ends = (taken.cumsum(0) - taken) * block, counts.cumsum(0)
    order = torch.sort(chosen.flatten(), stable=True).indices
    expert = chosen.flatten()[order].long()
    rows = (chosen.numel() + experts * (block - 1)) // block * block
    by_row = torch.full((rows,), chosen.numel(), dtype=torch.int32, device="cuda")
    within = torch.arange(chosen.numel(), device="cuda") - (ends - counts)[expert]
    by_row[begins[expert] + within] = order.int()
    by_block = torch.full((rows // block,), -1, dtype=torch.int32, device="cuda")
    by_block[: int(taken.sum())] = torch.repeat_interleave(torch.arange(experts, device="cuda"), taken).int()
    return by_row, by_block, (taken.sum() * block).int().view(1)


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 of FP8 [rows, columns] with scales of its groups or blocks."""
    return values.float() * scales.repeat_interleave(len(values) // len(scales), 0).repeat_interleave(GROUP, 1)


def cell(name: str, tokens: int) -> dict:
    experts, hidden, choices = RANKS[name]
    routed = experts - (choices - 8)
    chosen = torch.rand(tokens, routed, device="cuda").topk(8).indices
    chosen = torch.cat([chosen, *(torch.full((tokens, 1), e, device="cuda") for e in range(routed, experts))], 1)
    shares = torch.rand(tokens, choices, device="cuda")
    x = torch.randn(tokens, hidden, device="cuda").to(torch.float8_e4m3fn)
    x_scales = torch.rand(hidden // GROUP, tokens, device="cuda").T  # as SGLang lays them
    first, second = random_weights(experts, 2 * WIDTH, hidden), random_weights(experts, hidden, WIDTH)
    order = in_blocks(chosen, experts, BLOCK)
    rows = len(order[0])
    given = torch.empty(tokens, choices, hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    both = torch.randn(rows, 2 * WIDTH, device="cuda").bfloat16()

    def product() -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up_rows(x, x_scales, *first, choices, *order, rows)

    inner = product()

    of_second = *inner, *second, shares, *order
    calls: dict[str, Callable] = {
        "gate_up_rows": product,
        "down_rows": lambda: down_rows(*of_second, BLOCK, given),
        "down_blocks": lambda: down_blocks(*of_second, given),
    }
    far = wrong_of(x, x_scales, first, second, shares, choices, order, inner)
    calls, wrong = right_ones(calls, lambda call: far(call()), TOO_FAR, "PyTorch's")
    calls["activate, of SGLang's first product"] = lambda: activate(both, chosen.int(), *order[1:], BLOCK, order[0])
    calls["choice_sums"] = lambda: choice_sums(given, 1.0, None, out)
    graphs = {way: captured_graph(lambda call=call: [call() for _ in range(REPEATS)]) for way, call in calls.items()}
    times = interleaved({way: graph.replay for way, graph in graphs.items()}, REPEATS, SAMPLES)
    operations = 2 * tokens * choices * WIDTH * hidden
    floors = {
        "gate_up_rows": max(first[0].numel() / BYTES_PER_US, 2 * operations / OPERATIONS_PER_US),
        "second product": max((second[0].numel() + 2 * given.numel()) / BYTES_PER_US, operations / OPERATIONS_PER_US),
        "choice_sums": 2 * (given.numel() + out.numel()) / BYTES_PER_US,
    }
    return {
        "rank": name, "tokens": tokens, "rows": int(order[2]),
        "us": {way: round(us, 2) for way, (us, _) in times.items()},
        "floor_us": {way: round(us, 2) for way, us in floors.items()}, "wrong": wrong,
    }  # fmt: skip


def wrong_of(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    shares: torch.Tensor,
    of_token: int,
    order: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inner: tuple[torch.Tensor, torch.Tensor],
) -> Callable:
    """Relative distance of what either product gives from PyTorch's, over the first and the last blocks."""
    by_row, by_block, padded = order
    count, block = int(padded) // BLOCK, BLOCK
    blocks = sorted({*range(min(CHECKED, count)), *range(max(0, count - CHECKED), count)})

    def distance(found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> float:
        ours, wanted = [], []
        for at in blocks:
            rows, expert = slice(at * block, (at + 1) * block), int(by_block[at])
            row = by_row[rows].long()
            there = row < shares.numel()
            row = row[there]
            if isinstance(found, tuple):
                states = dequantised(x[row // of_token], x_scales[row // of_token])
                gate, up = (states @ dequantised(first[0][expert], first[1][expert]).T).chunk(2, 1)
                ours.append(dequantised(found[0][rows][there], found[1][rows][there]))
                wanted.append(torch.nn.functional.silu(gate) * up)
            else:
                states = dequantised(inner[0][rows][there], inner[1][rows][there])
                ours.append(found.view(shares.numel(), -1)[row].float())
                wanted.append(states @ dequantised(second[0][expert], second[1][expert]).T * shares.view(-1, 1)[row])
        apart = torch.cat(ours) - torch.cat(wanted)
        bound = 4.0 if isinstance(found, tuple) else 1.0  # FP8 keeps three bits
        return float(apart.norm() / torch.cat(wanted).norm()) / bound

    return distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict] = []
    for name in options.ranks:
        for tokens in options.tokens:
            rows.append(cell(name, tokens))
            print(name, tokens, "tokens,", rows[-1]["rows"], "rows, floors", rows[-1]["floor_us"], rows[-1]["wrong"] or "")
            print("\n".join(f"{us:9.1f} us  {way}" for way, us in rows[-1]["us"].items()), flush=True)
            write_report(options.out, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
