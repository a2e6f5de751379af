"""Experts of few tokens in two launches, from a layer's hidden states to the sum of what its experts give.

SGLang sorts tokens by expert, quantises, multiplies, activates, quantises again, multiplies and adds up: eight launches, whose
tensor cores take tiles of 16 rows where an expert has one. With few tokens hardly two choose the same expert, so a row for each
choice of a token reads no more than the chosen experts' weights, and needs no order. The first launch has gate and up of every
choice, and their product; the second, for some values of a token, all its choices and their sum. Both quantise their input
themselves, and values are rounded where SGLang's launches hand over to one another. A shared expert, whose weights lie
elsewhere, is one more choice of every token, and what it gives is added to the sum as SGLang adds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import power_of_two
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early, let_next_begin, wait_for_kernel_ahead
from nsa_backend.kernels.layer_front_steps import GROUP as GROUP_OF_KERNEL
from nsa_backend.kernels.layer_front_steps import quantised, rounded, scale_of_groups
from nsa_backend.kernels.layer_front_weights import GROUP, Scales

MOST_TOKENS = 16
"""Beyond these most experts have several rows, and tiles of tensor cores read them once."""
MOST_CHOICES = 31
"""Of a token."""


@dataclass(frozen=True)
class Tile:
    """How much of both products a program has."""

    values: int = 8  # of gate and of up
    step: int = 512  # of their sums over hidden states, at once
    stages: int = 3
    warps: int = 4
    sums: int = 8  # values of a token
    sum_warps: int = 4  # twice as many from sixteen choices on
    ahead: bool = False  # whether the second launch reads its weights before the first has ended, of two groups of values


class ExpertWeights(NamedTuple):
    """Of block-FP8 experts of one width; those of one expert alone are without the first dimension."""

    first: torch.Tensor  # float8_e4m3fn [experts, 2 * width, hidden], rows of gate before those of up
    first_scales: torch.Tensor  # float32 [experts, 2 * width / GROUP, hidden / GROUP]
    second: torch.Tensor  # float8_e4m3fn [experts, hidden, width]
    second_scales: torch.Tensor  # float32 [experts, hidden / GROUP, width / GROUP]
    scales: Scales = Scales.EXACT  # of the inputs of both products

    @property
    def width(self) -> int:
        return self.first.shape[-2] // 2


ONE = Tile(values=4, step=1024, ahead=True)
SOME = Tile()

LANE = tl.constexpr(16)
"""FP8 values that a thread loads at once."""


@triton.jit
def added_by_lane(products, LANE: tl.constexpr):
    """float32 [..., step] of two or three dimensions, added up over every LANE values of the last one.

    Threads so keep fewer sums, and more programs have room.
    """
    shape: tl.constexpr = products.shape
    if len(shape) == 3:
        return tl.sum(tl.reshape(products, (shape[0], shape[1], shape[2] // LANE, LANE)), axis=3)
    else:
        return tl.sum(tl.reshape(products, (shape[0], shape[1] // LANE, LANE)), axis=2)


@triton.jit
def quantised_for(x, shared, POWERS: tl.constexpr, COMPILED: tl.constexpr):
    """As `quantised`, by powers of two where both POWERS and `shared`."""
    scale, inverse = scale_of_groups(x, False, COMPILED)
    if POWERS:
        power, inverse_power = scale_of_groups(x, True, COMPILED)
        scale, inverse = tl.where(shared, power, scale), tl.where(shared, inverse_power, inverse)
    return (x * inverse).to(tl.float8e4nv), scale


@triton.jit
def gate_up_kernel(
    x_ptr,  # bfloat16 [tokens, HIDDEN]
    weight_ptr,  # FP8 [experts, 2 * WIDTH, HIDDEN], gate above up
    scales_ptr,  # float32 [experts, 2 * WIDTH / GROUP, HIDDEN / GROUP]
    chosen_ptr,  # int32 [tokens, CHOSEN], -1 where there is none
    inner_ptr,  # bfloat16 [tokens, CHOSEN + SHARED, WIDTH]: silu(gate) * up; nothing where there is none
    shared_ptr,  # FP8 [2 * WIDTH, HIDDEN], of the shared expert
    shared_scales_ptr,  # float32 [2 * WIDTH / GROUP, HIDDEN / GROUP]
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    POWERS: tl.constexpr,  # whether the shared expert's input has scales that are powers of two
    VALUES: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (choice of a token, the shared expert last, and block of values). All tensors contiguous."""
    let_next_begin(not AHEAD, COMPILED)
    wait_for_kernel_ahead(COMPILED)
    let_next_begin(AHEAD, COMPILED)  # which then finds the choices written
    row, block = tl.program_id(0), tl.program_id(1)
    token, of_token = (row // (CHOSEN + SHARED)).to(tl.int64), row % (CHOSEN + SHARED)
    expert = tl.load(chosen_ptr + token * CHOSEN + of_token, of_token < CHOSEN, 0).to(tl.int64)
    if expert >= 0:
        groups: tl.constexpr = STEP // GROUP_OF_KERNEL
        of_hidden: tl.constexpr = HIDDEN // GROUP_OF_KERNEL
        group, inside, at = tl.arange(0, groups), tl.arange(0, GROUP_OF_KERNEL), tl.arange(0, STEP)
        rows = (block * VALUES + tl.arange(0, VALUES))[:, None] * HIDDEN + at[None, :]
        weight = weight_ptr + expert * (2 * WIDTH * HIDDEN)
        scales = scales_ptr + expert * (2 * WIDTH // GROUP_OF_KERNEL * of_hidden)
        if SHARED:  # noqa: SIM102, decided when compiled
            if of_token == CHOSEN:
                weight, scales = shared_ptr, shared_scales_ptr
        gates, gate_scales = weight + rows, scales + block * VALUES // GROUP_OF_KERNEL * of_hidden + group
        x = x_ptr + token * HIDDEN + group[:, None] * GROUP_OF_KERNEL + inside[None, :]
        gate, up = tl.zeros([VALUES, STEP // LANE], tl.float32), tl.zeros([VALUES, STEP // LANE], tl.float32)
        for start in tl.range(0, HIDDEN, STEP, num_stages=STAGES):
            values, scale = quantised_for(tl.load(x + start).to(tl.float32), of_token == CHOSEN, POWERS, COMPILED)
            gate_scale = tl.load(gate_scales + start // GROUP_OF_KERNEL)[:, None] * scale
            up_scale = tl.load(gate_scales + WIDTH // GROUP_OF_KERNEL * of_hidden + start // GROUP_OF_KERNEL)[:, None] * scale
            values = values.to(tl.float32)
            of_gate = tl.load(gates + start).to(tl.float32) * tl.reshape(values * gate_scale, (1, STEP))
            of_up = tl.load(gates + WIDTH * HIDDEN + start).to(tl.float32) * tl.reshape(values * up_scale, (1, STEP))
            gate += added_by_lane(of_gate, LANE)
            up += added_by_lane(of_up, LANE)
        opened, passed = rounded(tl.sum(gate, axis=1)), rounded(tl.sum(up, axis=1))
        inner = opened / (1.0 + tl.exp(-opened)) * passed
        tl.store(inner_ptr + row * WIDTH + block * VALUES + tl.arange(0, VALUES), inner.to(tl.bfloat16))


@triton.jit
def down_kernel(
    inner_ptr,  # bfloat16 [tokens, CHOSEN + SHARED, WIDTH]
    weight_ptr,  # FP8 [experts, HIDDEN, WIDTH]
    scales_ptr,  # float32 [experts, HIDDEN / GROUP, WIDTH / GROUP]
    chosen_ptr,  # int32 [tokens, CHOSEN], -1 where there is none
    shares_ptr,  # float32 [tokens, CHOSEN]
    out_ptr,  # bfloat16 [tokens, HIDDEN]
    shared_ptr,  # FP8 [HIDDEN, WIDTH], of the shared expert
    shared_scales_ptr,  # float32 [HIDDEN / GROUP, WIDTH / GROUP]
    factor,  # float32, of the sum without the shared expert
    CHOSEN: tl.constexpr,  # below 32
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    POWERS: tl.constexpr,
    SUMS: tl.constexpr,
    AHEAD: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (token, block of values). All tensors contiguous. Choices are taken by powers of two, nine as eight and one."""
    if not AHEAD:
        wait_for_kernel_ahead(COMPILED)
    token, block = tl.program_id(0), tl.program_id(1)
    summed = tl.zeros([SUMS], tl.float32)
    for bit in tl.static_range(5):
        if CHOSEN // (16 >> bit) % 2:
            summed += sum_of_some(
                inner_ptr + token * (CHOSEN + SHARED) * WIDTH, weight_ptr, scales_ptr, shares_ptr + token * CHOSEN,
                chosen_ptr + token * CHOSEN, block, CHOSEN, 16 >> bit, HIDDEN, WIDTH, SUMS, AHEAD, COMPILED,
            )  # fmt: skip
    summed *= factor
    if SHARED:
        inner = inner_ptr + (token * (CHOSEN + SHARED) + CHOSEN) * WIDTH
        summed = rounded(summed) + sum_of_shared(inner, shared_ptr, shared_scales_ptr, block, WIDTH, POWERS, SUMS, COMPILED)
    tl.store(out_ptr + token * HIDDEN + block * SUMS + tl.arange(0, SUMS), summed.to(tl.bfloat16))


@triton.jit
def sum_of_some(
    inner_ptr, weight_ptr, scales_ptr, shares_ptr, chosen_ptr, block, CHOSEN: tl.constexpr, SOME: tl.constexpr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SUMS: tl.constexpr, AHEAD: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """float32 [SUMS]: what the SOME choices of a token behind all larger powers of two in CHOSEN give.

    Where AHEAD the first ones wait for the kernel ahead, with weights read.
    """
    of_width: tl.constexpr = WIDTH // GROUP_OF_KERNEL
    before: tl.constexpr = CHOSEN // (2 * SOME) * (2 * SOME)
    read_ahead: tl.constexpr = AHEAD and before == 0
    choice, inside = before + tl.arange(0, SOME), tl.arange(0, GROUP_OF_KERNEL)
    expert = tl.load(chosen_ptr + choice).to(tl.int64)
    there = expert >= 0
    rows = (block * SUMS + tl.arange(0, SUMS))[None, :, None] * WIDTH + inside[None, None, :]
    weights = weight_ptr + (expert * (HIDDEN * WIDTH))[:, None, None] + rows
    scales = scales_ptr + expert * (HIDDEN // GROUP_OF_KERNEL * of_width) + block * SUMS // GROUP_OF_KERNEL * of_width
    inner = inner_ptr + (choice * WIDTH)[:, None] + inside[None, :]
    total = tl.zeros([SOME, SUMS, GROUP_OF_KERNEL // LANE], tl.float32)
    if read_ahead:
        left = tl.load(weights, there[:, None, None], 0.0)
        right = tl.load(weights + GROUP_OF_KERNEL, there[:, None, None], 0.0)
        wait_for_kernel_ahead(COMPILED)
    for group in tl.static_range(of_width):
        x = tl.load(inner + group * GROUP_OF_KERNEL, there[:, None], 0.0).to(tl.float32)
        values, scale = quantised(x, False, COMPILED)
        scale *= tl.load(scales + group, there, 0.0)[:, None]
        if read_ahead:
            weight = left if group == 0 else right
        else:
            weight = tl.load(weights + group * GROUP_OF_KERNEL, there[:, None, None], 0.0)
        products = weight.to(tl.float32) * (values.to(tl.float32) * scale)[:, None, :]
        total += added_by_lane(products, LANE)
    share = tl.load(shares_ptr + choice, there, 0.0)
    return tl.sum(rounded(tl.sum(total, axis=2) * share[:, None]), axis=0)


@triton.jit
def sum_of_shared(
    inner_ptr, weight_ptr, scales_ptr, block, WIDTH: tl.constexpr, POWERS: tl.constexpr, SUMS: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """float32 [SUMS]: what a token's shared expert gives to these values; WIDTH is a power of two."""
    of_width: tl.constexpr = WIDTH // GROUP_OF_KERNEL
    group, inside, at = tl.arange(0, of_width), tl.arange(0, GROUP_OF_KERNEL), tl.arange(0, WIDTH)
    x = tl.load(inner_ptr + group[:, None] * GROUP_OF_KERNEL + inside[None, :]).to(tl.float32)
    weight = tl.load(weight_ptr + (block * SUMS + tl.arange(0, SUMS))[:, None] * WIDTH + at[None, :])
    scales = tl.load(scales_ptr + block * SUMS // GROUP_OF_KERNEL * of_width + group)
    values, scale = quantised(x, POWERS, COMPILED)
    values = tl.reshape(values.to(tl.float32) * (scale * scales[:, None]), (1, WIDTH))
    return rounded(tl.sum(weight.to(tl.float32) * values, axis=1))


def tile_for(tokens: int) -> Tile:
    """The fastest one on an H200, or within 2 % of it."""
    return ONE if tokens == 1 else SOME


def problem(hidden: int, width: int, tile: Tile = ONE) -> str | None:
    """Why experts of this width on hidden states of that one cannot have the launches, or None."""
    if hidden % tile.step or width < GROUP or width != power_of_two(width):
        served = f"multiples of {tile.step} and powers of two from {GROUP} on are served"
        return f"hidden states of {hidden} and experts of {width}: {served}"
    return None


def few_experts(
    x: torch.Tensor,
    experts: ExpertWeights,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    *,
    factor: float = 1.0,
    shared: ExpertWeights | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """factor * the sum over a token's choices of share * down(silu(gate) * up), by block-FP8 experts; two launches.

    Args:
        x: bfloat16 [tokens, hidden], at most MOST_TOKENS.
        experts: whose inputs have exact scales.
        shares: float32 [tokens, choices].
        chosen: int32 [tokens, choices], experts; -1 is one of another GPU.
        factor: of every sum.
        shared: one expert as wide as the others; what it gives is added to every sum, rounded before.
        out: bfloat16 [tokens, hidden]; a new tensor where None.
        tile: of the programs.

    Returns:
        `out`. Values are quantised with exact scales a group, for the shared expert with its own, and rounded to bfloat16 where
        SGLang's launches hand over.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or `experts` other scales.
    """
    (tokens, hidden), choices, width = x.shape, chosen.shape[1], experts.width
    each = choices + (shared is not None)
    tile = tile or tile_for(tokens)
    if (why := problem(hidden, width, tile)) is not None:
        raise ValueError(why)
    out = torch.empty_like(x) if out is None else out
    check_experts(x, experts, shares, chosen, shared, out)
    if tokens:
        other = shared or experts  # not read without a shared one
        inner = torch.empty(tokens, each, width, dtype=torch.bfloat16, device=x.device)
        launch = {"CHOSEN": choices, "HIDDEN": hidden, "WIDTH": width, "SHARED": each - choices, "COMPILED": x.is_cuda}
        launch |= {"POWERS": other.scales is Scales.POWERS_OF_TWO} | early(x.is_cuda)
        ahead = tile.ahead and width == 2 * GROUP
        gate_up_kernel[(tokens * each, width // tile.values)](
            x, experts.first, experts.first_scales, chosen, inner, other.first, other.first_scales, VALUES=tile.values,
            STEP=tile.step, STAGES=tile.stages, AHEAD=ahead, num_warps=tile.warps, **launch,
        )  # fmt: skip
        given = inner, experts.second, experts.second_scales, chosen, shares, out, other.second, other.second_scales, factor
        warps = tile.sum_warps * (2 if choices >= 16 else 1)
        down_kernel[(tokens, hidden // tile.sums)](*given, SUMS=tile.sums, AHEAD=ahead, num_warps=warps, **launch)
    return out


def check_experts(
    x: torch.Tensor,
    experts: ExpertWeights,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    shared: ExpertWeights | None,
    out: torch.Tensor,
) -> None:
    """Refuse what the launches would misread, as `few_experts` has them."""
    (tokens, hidden), choices, width = x.shape, chosen.shape[1], experts.width
    if experts.scales is not Scales.EXACT:
        raise ValueError(f"experts have {experts.scales}: their inputs would be quantised with exact scales")
    known = 0 < choices <= MOST_CHOICES
    require(known, "chosen", chosen, f"of one to {MOST_CHOICES} choices", "the others would be left out")
    require(tokens <= MOST_TOKENS, "x", x, f"of at most {MOST_TOKENS} tokens", "tensor cores take less time")
    check_tensor("x", x, torch.bfloat16, (tokens, hidden))
    check_weights("experts", experts, hidden, width, len(experts.first))
    check_tensor("shares", shares, torch.float32, (tokens, choices))
    check_tensor("chosen", chosen, torch.int32, (tokens, choices))
    if shared is not None:
        check_weights("shared", shared, hidden, width)
    check_tensor("out", out, torch.bfloat16, (tokens, hidden))


def check_weights(name: str, weights: ExpertWeights, hidden: int, width: int, *count: int) -> None:
    """Refuse weights of other experts than `count` of this width, or than one alone."""
    check_tensor(f"{name}.first", weights.first, torch.float8_e4m3fn, (*count, 2 * width, hidden))
    check_tensor(f"{name}.first_scales", weights.first_scales, torch.float32, (*count, 2 * width // GROUP, hidden // GROUP))
    check_tensor(f"{name}.second", weights.second, torch.float8_e4m3fn, (*count, hidden, width))
    check_tensor(f"{name}.second_scales", weights.second_scales, torch.float32, (*count, hidden // GROUP, width // GROUP))
