"""Rows of random choices in blocks by expert, as SGLang orders them."""

from __future__ import annotations

import torch
from fp8_rows import NAN

GROUP = 128
EXPERTS, WIDTH, CHOICES = 4, 256, 8
"""Of a second product."""


def in_blocks(chosen: torch.Tensor, experts: int, block: int, padding: int) -> tuple[list[int], list[int]]:
    """(choices by row, experts by block).

    Args:
        chosen: int64 [choices], the expert of each; -1 is one of another GPU.
        experts: of this GPU.
        block: rows.
        padding: what rows of padding have for a choice.
    """
    order, of_blocks = [], []
    for expert in range(-1, experts):
        rows = (chosen == expert).nonzero().flatten().tolist()
        rows += [padding] * (-len(rows) % block)
        order += rows
        of_blocks += [expert] * (len(rows) // block)
    return order, of_blocks


def with_more(chosen: torch.Tensor, experts: int, block: int, padding: int) -> dict[str, torch.Tensor]:
    """The same as a launch takes it, with one block more: whatever lies behind the last one."""
    order, of_blocks = in_blocks(chosen, experts, block, padding)
    return {
        "sorted_ids": torch.tensor(order + [1] * block, dtype=torch.int32),
        "expert_ids": torch.tensor([*of_blocks, experts + 7], dtype=torch.int32),
        "padded": torch.tensor([len(order)], dtype=torch.int32),
    }


def of_second_product(tokens: int, hidden: int, block: int, device: str, others: float = 0.0) -> dict[str, torch.Tensor]:
    """What `down_rows` takes, by name; with `others` so many choices are of other GPUs. What nobody may use is NaN."""
    generator = torch.Generator().manual_seed(tokens + block)
    chosen = torch.randint(0, EXPERTS, (tokens * CHOICES,), generator=generator)
    chosen[torch.rand(len(chosen), generator=generator) < others] = -1
    order = with_more(chosen, EXPERTS, block, len(chosen))
    rows, padded = len(order["sorted_ids"]), int(order["padded"])
    there = order["sorted_ids"] < len(chosen)
    there[padded:] = False
    values = torch.randn(rows, WIDTH, generator=generator).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[~there] = NAN
    given = {
        "values": values,
        "scales": torch.rand(rows, WIDTH // GROUP, generator=generator),
        "second": torch.randn(EXPERTS, hidden, WIDTH, generator=generator).to(torch.float8_e4m3fn),
        "second_scales": torch.rand(EXPERTS, hidden // GROUP, WIDTH // GROUP, generator=generator),
        "shares": torch.rand(tokens, CHOICES, generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in (given | order).items()}
