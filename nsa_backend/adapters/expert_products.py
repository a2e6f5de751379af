"""Block-FP8 experts by SGLang's products with launches of ours around them, or by products of ours.

Some tokens have one launch before the first product and one between, or one for both products and what is between. Many, of a
prefill, have SGLang's order, one launch between, and the second product and sums by ours, which add what the shared expert gave
too. Of still more the first product is ours as well, and what is between is part of it.

The sequence of launches behind SGLang's choice of tiles is a copy of 30 lines here. Hooks at what it calls before and between
its products would leave it SGLang's, but they are four: with bulk copies the sequence quantises, without them or with experts
of 128 `invoke_fused_moe_kernel` does, and what the activation writes is bfloat16 by then. They would have to hand values on
from one to the next, in every forward, LoRA's too.

Both of SGLang's products take values that are FP8 already, with their scales, whether they copy in bulk or not. So what tells
rows by expert quantises their input too.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
import triton.language as tl

from nsa_backend.adapters import shared_expert
from nsa_backend.adapters.few_experts import SWITCH
from nsa_backend.environment import switched_on
from nsa_backend.kernels import down_blocks, down_rows, expert_order, expert_tiles, gate_up_rows, whole_experts
from nsa_backend.kernels.choice_sums import choice_sums
from nsa_backend.kernels.expert_activation import activate, problem
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import GROUP

logger = logging.getLogger(__name__)

TOKENS = range(5, 129)
"""Of a forward whose rows a launch of ours tells by expert. Fewer are two launches in all (`few_experts`), of most experts."""
ONE_LAUNCH = range(8, shared_expert.MANY)
"""Of one whose experts have both products in one launch, if that serves them: an H200 was faster (`one_launch_to_1024` of
benchmarks/results/experts_0_5_23_h200.json)."""
TIMED = {(256, 256), (257, 256)}
"""Experts of a GPU and their width that have all of these unasked: an H200 was faster (`between_products` and `many_tokens` of
benchmarks/results/experts_0_5_23_h200.json). Others have them where a user asks."""
TIMED_IN_ONE_LAUNCH = {(32, 2048, 7168)}
"""Experts of a GPU, their width and hidden states that have both products in one launch unasked, and else SGLang's: with
--ep-size 8 DeepSeek-V3.2's, of which an H200 was faster (`one_launch_to_1024` of the same file)."""
BOTH = 2048
"""Tokens of a forward from which on its first product is ours too. Of fewer, blocks of 128 rows have few rows of an expert: an
H200 was 3 to 7 % slower with 1536 (`both_products` of the same file)."""
FORM = {
    "use_fp8_w8a8": True, "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False,
    "per_channel_quant": False, "block_shape": [GROUP, GROUP],
}  # fmt: skip
"""What SGLang's functions are told of block-FP8 experts."""


class Tiles(NamedTuple):
    """What SGLang chooses for both products."""

    first: dict[str, Any]
    second: dict[str, Any]  # the first one where SGLang has none
    first_in_bulk: bool
    second_in_bulk: bool  # also whether rows between both products are in blocks


def serves(x: torch.Tensor, weights: ExpertWeights, chosen: torch.Tensor, gpus: int = 1) -> bool:
    """Whether these tokens have launches of ours; one choice of a token has no sum in SGLang's. Arguments are `run`'s."""
    (tokens, choices), hidden, experts = chosen.shape, x.shape[1], len(weights.first)
    if not may_serve(hidden, experts, weights.width) or choices == 1 or problem(weights.width) is not None:
        return False
    of_any_tokens = wanted(experts, weights.width)
    if tokens >= shared_expert.MANY:
        return of_any_tokens and down_rows.problem(hidden, weights.width) is None
    if expert_order.problem(tokens, choices, hidden) is not None:
        return False
    return (of_any_tokens and tokens in TOKENS) or has_one_launch(x, weights, choices, gpus)


def may_serve(hidden: int, experts: int, width: int) -> bool:
    """Whether some tokens of so many experts of a GPU are to have launches of ours, where these serve them."""
    return wanted(experts, width) or (experts, width, hidden) in TIMED_IN_ONE_LAUNCH


def wanted(experts: int, width: int) -> bool:
    """Whether so many experts of a GPU, of this width, are to have launches of ours of any number of tokens."""
    return (experts, width) in TIMED or switched_on(SWITCH)


def compile_ahead(weights: ExpertWeights, choices: int, gpus: int = 1) -> None:
    """Compile products in CUDA C++ in a server's first forward, rather than in the first one that has them, whose tokens
    have so many choices each of the experts of so many GPUs.

    Nothing is compiled while a forward is captured; SGLang runs it before that.

    Raises:
        RuntimeError: NVRTC or the driver refuses.
    """
    first = weights.first
    if first.is_cuda and not torch.cuda.is_current_stream_capturing():
        _compile(len(first), weights.width, first.shape[-1], first.device, choices, gpus)


def has_both(hidden: int, width: int) -> bool:
    """Whether long prefills of experts like these have both products of ours, and not the second one alone."""
    return gate_up_rows.problem(hidden, width) is None and down_blocks.problem(hidden, width) is None


def tokens_of_one_launch(experts: int, choices: int, gpus: int = 1) -> range:
    """Of a forward that may have both products in one launch, as `run` has its tokens; none of more rows than tiles have."""
    return range(ONE_LAUNCH.start, min(ONE_LAUNCH.stop, whole_experts.most_choices(experts) * gpus // choices + 1))


def has_one_launch(x: torch.Tensor, weights: ExpertWeights, choices: int, gpus: int = 1) -> bool:
    """Whether these tokens, with so many choices each, have both products in one launch."""
    tokens, hidden = x.shape
    of_launch = tokens_of_one_launch(len(weights.first), choices, gpus)
    return tokens in of_launch and whole_experts.problem(hidden, weights.width) is None


@functools.cache
def _compile(experts: int, width: int, hidden: int, device: torch.device, choices: int, gpus: int) -> None:
    if may_serve(hidden, experts, width) and whole_experts.problem(hidden, width) is None:
        of_launch = tokens_of_one_launch(experts, choices, gpus)
        rows = {whole_experts.rows_for(tokens * choices // gpus, experts) for tokens in of_launch}
        whole_experts.compile_ahead(device, hidden, width, rows)
    if wanted(experts, width) and has_both(hidden, width):
        for product in gate_up_rows, down_blocks:
            expert_tiles.compiled_on(product.kernel_for(hidden), device.index)


def run(
    x: torch.Tensor,
    weights: ExpertWeights,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    out: torch.Tensor,
    *,
    factor: float,
    filtered: bool,
    gpus: int = 1,
    quantised: tuple[torch.Tensor, torch.Tensor] | None = None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out`, with the sums of what experts give, by launches of ours and, for some, SGLang's products among them.

    Args:
        x, weights, shares, chosen, factor: as `kernels.few_experts` has them, of what `serves` says yes to.
        out: bfloat16 [tokens, hidden]; of many tokens it may be `x`. Of others what adds a shared expert may fill it later.
        filtered: whether experts may be another GPU's.
        gpus: whose experts tokens choose, each of which has as many.
        quantised: of many tokens, `x` in FP8 and its scales where SGLang has made them.
        shared: of many tokens, bfloat16 [tokens, hidden] to be added.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    (tokens, choices), experts, many = chosen.shape, len(weights.first), len(x) >= shared_expert.MANY
    if not many and has_one_launch(x, weights, choices, gpus):
        tell(experts, weights.width, tokens_of_one_launch(experts, choices, gpus), "both products in one launch")
        given = in_one_launch(x, weights, shares, chosen, filtered=filtered, gpus=gpus)
        return sums(given, factor, out, chosen if filtered else None)
    both_served = many and has_both(x.shape[1], weights.width)
    if many:
        tell_of_many(experts, weights.width, both_served)
    else:
        these = TOKENS
        if whole_experts.problem(x.shape[1], weights.width) is None:
            others = tokens_of_one_launch(experts, choices, gpus)
            these = range(TOKENS.start, others.start) if tokens < others.start else range(others.stop, TOKENS.stop)
        tell(experts, weights.width, these, "one launch before both products and one between")
    if both_served and tokens >= BOTH:
        return choice_sums(both_ours(x, weights, shares, chosen, quantised), factor, shared, out)
    tiles = tiles_for(weights, tokens, choices)
    block, in_blocks = tiles.first["BLOCK_SIZE_M"], many or tiles.second_in_bulk
    if many:
        order = fused_moe.moe_align_block_size(chosen, block, experts)
        values, scales = quantised or (x, None)
    else:
        found = expert_order.order(x, chosen, block, experts)
        values, scales, order = found.values, found.scales, (found.sorted_ids, found.expert_ids, found.padded)
    sorted_ids, expert_ids, padded = order
    form = FORM | {"compute_type": tl.bfloat16, "filter_expert": filtered}
    rows = chosen.numel() + (min(chosen.numel(), experts + 1) * (block - 1) if in_blocks else 0)
    rows -= rows % block if many else 0  # blocks are whole
    both = x.new_empty(rows, 2 * weights.width)
    fused_moe.invoke_fused_moe_kernel(
        values, weights.first, None, both, scales, weights.first_scales, None, shares, chosen, *order, False, choices,
        tiles.first, c_sorted=in_blocks, b_use_tma=tiles.first_in_bulk, **form,
    )  # fmt: skip
    values, scales = activate(both, chosen, expert_ids, padded, block, sorted_ids if in_blocks else None)
    given = x.new_empty(tokens, choices, x.shape[1])
    if many:
        down_rows.down_rows(values, scales, weights.second, weights.second_scales, shares, *order, block, given)
        return choice_sums(given, factor, shared, out)
    fused_moe.invoke_fused_moe_kernel(
        values, weights.second, None, given, scales, weights.second_scales, None, shares, chosen, *order, True, 1,
        tiles.second, a_use_tma=tiles.second_in_bulk, b_use_tma=tiles.second_in_bulk, router_topk=choices, **form,
    )  # fmt: skip
    return sums(given, factor, out)


def sums(given: torch.Tensor, factor: float, out: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """`out`, with the sums of what experts of some tokens gave, unless what adds the shared expert is to fill it.

    `chosen` says which choices gave nothing, as `choice_sums` takes it.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    if shared_expert.leave_sums(given, factor, out, chosen):
        return out
    return fused_moe.moe_combine_topk(given, out, factor) if chosen is None else choice_sums(given, factor, None, out, chosen)


def in_one_launch(
    x: torch.Tensor, weights: ExpertWeights, shares: torch.Tensor, chosen: torch.Tensor, *, filtered: bool, gpus: int
) -> torch.Tensor:
    """bfloat16 [tokens, choices, hidden]: what experts of some tokens give, by one launch of ours; arguments are `run`'s.

    Where some may be another GPU's theirs is nothing, and not written.
    """
    experts = len(weights.first)
    rows = whole_experts.rows_for(chosen.numel() // gpus, experts)
    order = whole_experts.ordered(x, chosen, experts, weights.width, rows, others=not filtered)
    return whole_experts.whole_experts(order, rows, weights, shares, x.new_empty(*chosen.shape, x.shape[1]))


def both_ours(
    x: torch.Tensor,
    weights: ExpertWeights,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    quantised: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """bfloat16 [tokens, choices, hidden]: what experts of many tokens give, by two products of ours; arguments are `run`'s."""
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    (tokens, choices), block = chosen.shape, expert_tiles.BLOCK
    order = fused_moe.moe_align_block_size(chosen, block, len(weights.first))
    values, scales = quantised or sglang_per_token_group_quant_fp8(x, GROUP)
    rows = len(order[0]) // block * block
    first = values[:tokens], scales[:tokens], weights.first, weights.first_scales
    values, scales = gate_up_rows.gate_up_rows(*first, choices, *order, rows)
    given = x.new_empty(tokens, choices, x.shape[1])
    second = values, scales, weights.second, weights.second_scales, shares, *order
    return down_blocks.down_blocks(*second, given)


def tiles_for(weights: ExpertWeights, tokens: int, choices: int) -> Tiles:
    """Those of so many tokens with so many choices each."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    found, (found_second, _) = fused_moe.try_get_optimal_moe_config(
        weights.first.shape, tuple(weights.second.shape), choices, "fp8_w8a8", tokens,
        block_shape=FORM["block_shape"], per_channel_quant=False, return_down_config=True,
    )  # fmt: skip
    first, second = dict(found), dict(found_second or {})
    in_bulk = [bool(tile.pop("USE_TMA", False) and fused_moe._moe_support_tma()) for tile in (first, second)]
    return Tiles(first, second or first, *in_bulk)


@functools.cache
def tell(count: int, width: int, tokens: range, what: str) -> None:
    """The log has it once a shape."""
    given = tokens.start, tokens.stop - 1, what, count, width
    logger.info("nsa_backend: experts of %d to %d tokens have %s, %d experts of %d", *given)


@functools.cache
def tell_of_many(count: int, width: int, both: bool) -> None:
    """Likewise; whether the most have both products of ours."""
    of_both = f", of {BOTH} or more both" if both else ""
    logger.info(
        "nsa_backend: experts of %d tokens or more have our second product%s, %d experts of %d",
        shared_expert.MANY, of_both, count, width,
    )  # fmt: skip
