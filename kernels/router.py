"""A MoE layer's router in one launch: logits of every expert, scores, and the experts that each of a few tokens chooses.

SGLang has two launches, one behind the other on a layer's critical path: a GEMM of few rows, and the choice, which cannot begin
before all logits are there. Here each program has the logits of some experts, over a part of the hidden states. The last one
that arrives adds the parts in their order, so that logits do not depend on who was last, and chooses. Weights are read while
the kernel ahead still runs: nothing on the stream writes them.

Scores and shares are computed as by the kernels that SGLang takes on Hopper: with groups FlashInfer's `noAuxTcKernels.cu`,
whose tanh is the GPU's approximate one; without groups SGLang's `_router_triton_kernel`. Of equal scores the lower expert comes
first, of equal groups the lower group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.blocks import power_of_two
from nsa_backend.kernels.checks import check_tensor, require
from nsa_backend.kernels.dependent_launch import early, let_next_begin, wait_for_kernel_ahead

MOST_ROWS = 16
"""For more SGLang takes another GEMM."""
DOT_ROWS = tl.constexpr(16)
"""Of a tile of tensor cores."""
LEAST_KEY = tl.constexpr(-(2**31))


@dataclass(frozen=True)
class Choice:
    """How a token chooses experts: `routed` of them, of its `kept` best groups, and then all `shared` ones."""

    routed: int
    groups: int = 1  # 1 for none
    kept: int = 1
    shared: int = 0  # 0 or 1, behind the others
    factor: float = 1.0  # of the chosen experts' shares, whose sum it is
    shared_share: float = 1.0


@dataclass(frozen=True)
class Tile:
    """What a program has of the logits."""

    values: int = 2  # experts
    splits: int = 1  # among which hidden states are divided
    step: int = 1024  # hidden states at once
    warps: int = 4
    dots: bool = False  # whether tensor cores multiply: 16 or more experts, and as many rows


class Routed(NamedTuple):
    """What a router gives."""

    shares: torch.Tensor  # float32 [rows, routed + shared]
    chosen: torch.Tensor  # int32 [rows, routed + shared]
    logits: torch.Tensor  # float32 [rows, experts]


ONE = Tile(values=1, warps=1)
"""One warp chooses without waiting for others."""
SOME = Tile(values=16, splits=8, step=128, dots=True)
MANY = replace(SOME, warps=8)


@triton.jit
def ordered(bits):
    """int32 that compare as the float32 whose bits these are, and the other way round."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def sigmoid_by_tanh(x, COMPILED: tl.constexpr):
    """0.5 * tanh(0.5 * x) + 0.5 with the GPU's approximate tanh, which nvcc 13 takes under FlashInfer's -use_fast_math."""
    if COMPILED:
        tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [0.5 * x], tl.float32, is_pure=True, pack=1)
        return 0.5 * tanh + 0.5
    else:
        return tl.sigmoid(x)


@triton.jit
def in_best_groups(keys, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """int32 [rows, experts]: `keys`, LEAST_KEY of experts outside the KEPT groups whose two best have the largest sums."""
    ROWS: tl.constexpr = keys.shape[0]
    SIZE: tl.constexpr = keys.shape[1] // GROUPS
    of_groups = tl.reshape(keys, (ROWS, GROUPS, SIZE))
    inside, group = tl.arange(0, SIZE), tl.arange(0, GROUPS)
    best = tl.max(of_groups, axis=2)
    first = tl.min(tl.where(of_groups == best[:, :, None], inside[None, None, :], SIZE), axis=2)
    second = tl.max(tl.where(inside[None, None, :] == first[:, :, None], LEAST_KEY, of_groups), axis=2)
    total = ordered(best).to(tl.float32, bitcast=True) + ordered(second).to(tl.float32, bitcast=True)
    total = ordered(total.to(tl.int32, bitcast=True))
    mine, other = total[:, :, None], total[:, None, :]
    before = (other > mine) | ((other == mine) & (group[None, None, :] < group[None, :, None]))
    kept = tl.sum(before.to(tl.int32), axis=2) < KEPT
    return tl.reshape(tl.where(kept[:, :, None], of_groups, LEAST_KEY), keys.shape)


@triton.jit
def sum_of_splits(sums_ptr, rows, EXPERTS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """float32 [ROWS, EXPERTS]: logits of `rows` rows, their parts added in order."""
    row, expert = tl.arange(0, ROWS)[:, None], tl.arange(0, EXPERTS)[None, :]
    logits = tl.zeros([ROWS, EXPERTS], tl.float32)
    for split in tl.static_range(SPLITS):
        part = sums_ptr + (split * rows + row) * EXPERTS + expert
        logits += tl.load(part, row < rows, 0.0, cache_modifier=".cg")
    return logits


@triton.jit
def choose(
    logits, bias_ptr, there, shares_ptr, chosen_ptr, factor, shared_share, ROUTED: tl.constexpr, SHARED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, SLOTS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Store what each row chooses by its logits, float32 [rows, experts]."""
    EXPERTS: tl.constexpr = logits.shape[1]
    score = sigmoid_by_tanh(logits, COMPILED) if GROUPS > 1 else tl.sigmoid(logits)
    expert, slot = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    biased = score + tl.load(bias_ptr + expert)
    if GROUPS == 1:
        biased = tl.where(biased == biased, biased, -1e30)
    keys = ordered(biased.to(tl.int32, bitcast=True))
    if GROUPS > 1:
        keys = in_best_groups(keys, GROUPS, KEPT)
    chosen = tl.zeros([logits.shape[0], SLOTS], tl.int32)
    for place in tl.static_range(ROUTED):
        best = tl.max(keys, axis=1)[:, None]
        found = tl.min(tl.where(keys == best, expert, EXPERTS - 1), axis=1)[:, None]
        chosen = tl.where(slot == place, found, chosen)
        keys = tl.where(expert == found, LEAST_KEY, keys)
    share = tl.where(slot < ROUTED, tl.gather(score, chosen, axis=1), 0.0)
    total = tl.sum(share, axis=1)[:, None]
    share = share / (total + 1e-20 if GROUPS > 1 else tl.where(total > 0.0, total, 1.0)) * factor
    if SHARED:
        share, chosen = tl.where(slot == ROUTED, shared_share, share), tl.where(slot == ROUTED, EXPERTS, chosen)
    at = tl.arange(0, logits.shape[0])[:, None] * (ROUTED + SHARED) + slot
    wanted = there & (slot < ROUTED + SHARED)
    tl.store(shares_ptr + at, share, wanted)
    tl.store(chosen_ptr + at, chosen, wanted)


@triton.jit(do_not_specialize=["rows"])
def router_kernel(
    x_ptr,  # bfloat16 [rows, HIDDEN]
    weight_ptr,  # bfloat16 [EXPERTS, HIDDEN]
    bias_ptr,  # float32 [EXPERTS], of scores that are compared
    sums_ptr,  # float32 [SPLITS, rows, EXPERTS]; the logits where SPLITS is 1
    logits_ptr,  # float32 [rows, EXPERTS]
    shares_ptr,  # float32 [rows, ROUTED + SHARED]
    chosen_ptr,  # int32 [rows, ROUTED + SHARED]
    arrived_ptr,  # int32 [1], zero before, and left so
    rows,
    factor,  # float32
    shared_share,  # float32
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least `rows`
    ROUTED: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SLOTS: tl.constexpr,
    VALUES: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    DOTS: tl.constexpr,
    BEFORE_OURS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Program (block of experts, split). All tensors contiguous."""
    block, split = tl.program_id(0), tl.program_id(1)
    value = block * VALUES + tl.arange(0, VALUES)
    begin = split * (HIDDEN // SPLITS)
    inside = tl.arange(0, STEP)
    steps: tl.constexpr = HIDDEN // SPLITS // STEP
    weights = ()
    for step in tl.static_range(steps):
        at = begin + step * STEP + inside
        weights = weights + (tl.load(weight_ptr + value[:, None] * HIDDEN + at[None, :]),)  # noqa: RUF005, Triton's tuple
    wait_for_kernel_ahead(COMPILED)
    let_next_begin(BEFORE_OURS, COMPILED)  # behind the wait: what that one lets begin may read what was written ahead of this
    sums = sums_ptr + split * rows * EXPERTS
    if DOTS:
        row = tl.arange(0, DOT_ROWS)
        total = tl.zeros([VALUES, DOT_ROWS], tl.float32)
        for step in tl.static_range(steps):
            at = begin + step * STEP + inside
            weight = weights[step]
            x = tl.load(x_ptr + row[None, :] * HIDDEN + at[:, None], row[None, :] < rows, 0.0)
            if not COMPILED:  # the interpreter multiplies the bits of bfloat16
                weight, x = weight.to(tl.float32), x.to(tl.float32)
            total = tl.dot(weight, x, total)
        tl.store(sums + row[None, :] * EXPERTS + value[:, None], total, row[None, :] < rows)
    else:
        for row in tl.static_range(ROWS):
            total = tl.zeros([VALUES, STEP], tl.float32)
            for step in tl.static_range(steps):
                at = begin + step * STEP + inside
                x = tl.load(x_ptr + row * HIDDEN + at[None, :], row < rows, 0.0)
                total += weights[step].to(tl.float32) * x.to(tl.float32)
            tl.store(sums + row * EXPERTS + value, tl.sum(total, axis=1), row < rows)
    tl.debug_barrier()  # every warp has stored its part
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == EXPERTS // VALUES * SPLITS - 1:
        tl.store(arrived_ptr, 0)
        logits = sum_of_splits(sums_ptr, rows, EXPERTS, ROWS, SPLITS)
        there = tl.arange(0, ROWS)[:, None] < rows
        if SPLITS > 1:
            tl.store(logits_ptr + tl.arange(0, ROWS)[:, None] * EXPERTS + tl.arange(0, EXPERTS)[None, :], logits, there)
        choose(
            logits, bias_ptr, there, shares_ptr, chosen_ptr, factor, shared_share, ROUTED, SHARED, GROUPS, KEPT, SLOTS, COMPILED
        )


def tile_for(rows: int) -> Tile:
    """Not measured yet: benchmarks/tuning/router.py times others."""
    if rows == 1:
        return ONE
    return SOME if rows <= 4 else MANY


def problem(experts: int, hidden: int, choice: Choice, tile: Tile = MANY) -> str | None:
    """Why a router of these sizes cannot have the launch, or None."""
    if experts != power_of_two(experts) or hidden % (tile.splits * tile.step) or experts % tile.values:
        served = f"powers of two, and multiples of {tile.splits * tile.step}, are served"
        return f"{experts} experts and hidden states of {hidden}: {served}"
    if choice.groups != power_of_two(choice.groups) or experts < 2 * choice.groups:
        return f"{choice.groups} groups of {experts} experts: powers of two, of two experts or more, are served"
    candidates = experts // choice.groups * choice.kept
    if not 0 < choice.routed <= candidates or not 0 < choice.kept <= choice.groups or choice.shared not in (0, 1):
        return f"{choice}: a token chooses among experts of the groups that it keeps, and one shared expert at most"
    return None


def counter(weight: torch.Tensor) -> torch.Tensor:
    """What `route` counts its programs with: zero, and zero again after every launch.

    Launches that may run at the same time need one each.
    """
    return torch.zeros(1, dtype=torch.int32, device=weight.device)


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    arrived: torch.Tensor,
    choice: Choice,
    tile: Tile | None = None,
    *,
    before_ours: bool = False,
) -> Routed:
    """Experts that each row of `x` chooses, and their shares; one launch.

    Args:
        x: bfloat16 [rows, hidden], contiguous, at most MOST_ROWS.
        weight: bfloat16 [experts, hidden], contiguous.
        bias: float32 [experts], added to scores that are compared and to no share.
        arrived: from `counter`.
        choice: how many, and of which.
        tile: of the programs.
        before_ours: whether what is launched next on this stream is a kernel of this package that waits for this one.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    (rows, hidden), experts = x.shape, weight.shape[0]
    tile = tile or tile_for(rows)
    if (why := problem(experts, hidden, choice, tile)) is not None:
        raise ValueError(why)
    require(rows <= MOST_ROWS, "x", x, f"of at most {MOST_ROWS} rows", "the others would be left out")
    check_tensor("x", x, torch.bfloat16, (rows, hidden))
    check_tensor("weight", weight, torch.bfloat16, (experts, hidden))
    check_tensor("bias", bias, torch.float32, (experts,))
    check_tensor("arrived", arrived, torch.int32, (1,))
    slots = choice.routed + choice.shared
    shares = torch.empty(rows, slots, dtype=torch.float32, device=x.device)
    chosen = torch.empty(rows, slots, dtype=torch.int32, device=x.device)
    logits = torch.empty(rows, experts, dtype=torch.float32, device=x.device)
    if rows:
        sums = logits if tile.splits == 1 else torch.empty(tile.splits, *logits.shape, dtype=torch.float32, device=x.device)
        router_kernel[(experts // tile.values, tile.splits)](
            x, weight, bias, sums, logits, shares, chosen, arrived, rows, choice.factor, choice.shared_share,
            EXPERTS=experts, HIDDEN=hidden, ROWS=power_of_two(rows), ROUTED=choice.routed, SHARED=choice.shared,
            GROUPS=choice.groups, KEPT=choice.kept, SLOTS=power_of_two(slots), VALUES=tile.values, SPLITS=tile.splits,
            STEP=tile.step, DOTS=tile.dots, BEFORE_OURS=before_ours, COMPILED=x.is_cuda,
            num_warps=tile.warps, **early(x.is_cuda),
        )  # fmt: skip
    return Routed(shares, chosen, logits)
