"""Block-FP8 experts of some tokens by SGLang's Triton runner, with one launch of this package between both products.

It is in place of the whole sequence of launches behind SGLang's choice of tiles and order of rows, a copy of which is 30 lines
here. Hooks at what that sequence calls between its products would leave it SGLang's, but they are three: with bulk copies the
sequence quantises, without them or with experts of 128 `invoke_fused_moe_kernel` does, and what the activation writes is
bfloat16 by then. They would have to hand values on from one to the next, in every forward, LoRA's too.

Both of SGLang's products take values that are FP8 already, with their scales, whether they copy in bulk or not. The switch
alone asks for it: no server has run it on a GPU.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl

from nsa_backend.adapters.few_experts import MODULE, SERVED, are_plain, room_for_sums
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.kernels.expert_activation import activate, problem
from nsa_backend.kernels.layer_front_weights import GROUP

logger = logging.getLogger(__name__)

SWITCH = "NSA_BACKEND_EXPERT_ACTIVATION"
FEWEST_TOKENS = 5
"""Of a forward. Fewer are two launches (`few_experts`), of most experts."""
BLOCKS_AHEAD = {256: 8}
"""Of a forward of up to so many tokens: blocks of rows whose weights of the second product are asked for. A guess."""
MOST_TOKENS = max(BLOCKS_AHEAD)
BEHIND_ROWS = False
"""Whether they are asked for once most rows have their programs."""

OF_SEQUENCE = {name: value for name, value in SERVED.items() if name != "inplace"} | {"hooks": None}
"""Of SGLang's sequence, arguments that are served with these values alone; `hooks` are LoRA's."""
FORM = {
    "use_fp8_w8a8": True, "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False,
    "per_channel_quant": False, "block_shape": [GROUP, GROUP],
}  # fmt: skip
"""What SGLang's functions are told of block-FP8 experts."""


class Prepared(NamedTuple):
    """What SGLang has chosen before its sequence begins, in the order in which `_prepare_fused_moe_run` gives it."""

    first_tile: dict[str, Any]
    second_tile: dict[str, Any] | None  # None where it is the first one
    second_in_bulk: bool  # whether rows between both products are in blocks
    first_in_bulk: bool
    sorted_ids: torch.Tensor  # int32 [rows], choices by expert, the number of choices in padding
    expert_ids: torch.Tensor  # int32 [blocks], -1 of another GPU
    padded: torch.Tensor  # int32 [1], rows of all blocks


def take() -> None:
    """Have SGLang's Triton runner leave what is between its products to one launch; once a process."""
    hook(f"{MODULE}._fused_moe_kernel_sequence", sequence, HookType.AROUND)


signature_of = functools.cache(inspect.signature)


def sequence(
    original: Callable[..., torch.Tensor], hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """Around SGLang's launches of a layer's experts, behind those that sort rows: bfloat16 [tokens, hidden]."""
    tokens = len(hidden_states)
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
        return original(hidden_states, *arguments, **options)
    given = signature_of(original).bind(hidden_states, *arguments, **options)
    given.apply_defaults()
    of = given.arguments
    if not serves(of):
        return original(hidden_states, *arguments, **options)
    tell(of["w1"].shape[0], of["w1"].shape[1] // 2)
    prepared = Prepared(
        of["config"], of["down_config"], of["down_moe_use_tma"], of["up_moe_use_tma"], of["sorted_token_ids"],
        of["expert_ids"], of["num_tokens_post_padded"],
    )  # fmt: skip
    return experts(
        hidden_states, of["w1"], of["w1_scale"], of["w2"], of["w2_scale"], of["topk_weights"], of["topk_ids"], prepared,
        hidden_states if of["inplace"] else room_for_sums(hidden_states), factor=of["routed_scaling_factor"],
        filtered=of["filter_expert"], ahead=blocks_ahead(tokens), behind_rows=BEHIND_ROWS,
    )  # fmt: skip


def serves(of: dict[str, Any]) -> bool:
    """Whether `experts` computes what SGLang's sequence would with these arguments; one choice has no sum there."""
    hidden, width = of["w1"].shape[2], of["w1"].shape[1] // 2
    return are_plain(of, OF_SEQUENCE) and of["topk_ids"].shape[1] > 1 and problem(hidden, width) is None


def blocks_ahead(tokens: int) -> int:
    """Of a forward of at most MOST_TOKENS."""
    return BLOCKS_AHEAD[min(most for most in BLOCKS_AHEAD if most >= tokens)]


def experts(
    x: torch.Tensor,
    first: torch.Tensor,
    first_scales: torch.Tensor,
    second: torch.Tensor,
    second_scales: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    prepared: Prepared,
    out: torch.Tensor,
    *,
    factor: float | None,
    filtered: bool,
    ahead: int,
    behind_rows: bool,
) -> torch.Tensor:
    """`out`, with the sums of what block-FP8 experts give, by the launches of SGLang's sequence and one of ours among them.

    Args:
        x: bfloat16 [tokens, hidden]; `out` may be the same tensor, which the last launch writes.
        first, first_scales, second, second_scales, shares, chosen: as `kernels.few_experts` has them; two choices or more.
        prepared: for these choices.
        factor: of the sums, 1 where None.
        filtered: whether experts may be another GPU's.
        ahead, behind_rows: as `kernels.expert_activation.activate` has them.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    tile, bulk, block = prepared.first_tile, prepared.second_in_bulk, prepared.first_tile["BLOCK_SIZE_M"]
    (tokens, choices), order = chosen.shape, (prepared.sorted_ids, prepared.expert_ids, prepared.padded)
    form = FORM | {"compute_type": tl.bfloat16, "filter_expert": filtered}
    rows = chosen.numel() + (min(chosen.numel(), len(first) + 1) * (block - 1) if bulk else 0)
    both = x.new_empty(rows, first.shape[1])
    fused_moe.invoke_fused_moe_kernel(
        x, first, None, both, None, first_scales, None, shares, chosen, *order, False, choices, tile,
        c_sorted=bulk, b_use_tma=prepared.first_in_bulk, **form,
    )  # fmt: skip
    values, scales = activate(
        both, second, chosen, prepared.expert_ids, prepared.padded, block, prepared.sorted_ids if bulk else None, ahead,
        behind_rows,
    )  # fmt: skip
    given = x.new_empty(tokens, choices, x.shape[1])
    fused_moe.invoke_fused_moe_kernel(
        values, second, None, given, scales, second_scales, None, shares, chosen, *order, True, 1, prepared.second_tile or tile,
        a_use_tma=bulk, b_use_tma=bulk, router_topk=choices, **form,
    )  # fmt: skip
    return fused_moe.moe_combine_topk(given, out, factor)


@functools.cache
def tell(count: int, width: int) -> None:
    """The log has it once a shape."""
    logger.info(
        "nsa_backend: experts of %d to %d tokens have one launch between both products, %d experts of %d",
        FEWEST_TOKENS, MOST_TOKENS, count, width,
    )  # fmt: skip
