"""Block-FP8 experts of some tokens by SGLang's Triton runner, with one launch of ours before the first product and one between.

The sequence of launches behind SGLang's choice of tiles and order of rows is a copy of 30 lines here. Hooks at what it calls
between its products would leave it SGLang's, but they are three: with bulk copies the sequence quantises, without them or with
experts of 128 `invoke_fused_moe_kernel` does, and what the activation writes is bfloat16 by then. They would have to hand
values on from one to the next, in every forward, LoRA's too.

Both of SGLang's products take values that are FP8 already, with their scales, whether they copy in bulk or not. So what tells
rows by expert quantises their input too, and the sequence finds that with the rows' order.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl

from nsa_backend.adapters.few_experts import MODULE, MOST_OF_LAUNCHES, SERVED, SWITCH, are_plain, room_for_sums, sums_are_free
from nsa_backend.adapters.sglang_types import HookType
from nsa_backend.adapters.shared import hook
from nsa_backend.environment import switched_on
from nsa_backend.kernels import expert_order
from nsa_backend.kernels.expert_activation import activate, problem
from nsa_backend.kernels.layer_front_weights import GROUP

logger = logging.getLogger(__name__)

TOKENS = range(5, MOST_OF_LAUNCHES + 1)
"""Of a forward that has both launches. Fewer are two launches in all (`few_experts`), of most experts."""
TIMED = {(256, 256), (257, 256)}
"""Experts of a GPU and their width that have them unasked: an H200 was faster with 8 to 128 tokens (`between_products` of
benchmarks/results/experts_0_5_23_h200.json). Others, those of --ep-size too, have them where a user asks."""

OF_SEQUENCE = {name: value for name, value in SERVED.items() if name != "inplace"} | {"hooks": None}
"""Of SGLang's sequence, arguments that are served with these values alone; `hooks` are LoRA's."""
FORM = {
    "use_fp8_w8a8": True, "use_int8_w8a8": False, "use_int8_w8a16": False, "use_int4_w4a16": False,
    "per_channel_quant": False, "block_shape": [GROUP, GROUP],
}  # fmt: skip
"""What SGLang's functions are told of block-FP8 experts."""
NAMES = (
    "config", "down_config", "down_moe_use_tma", "up_moe_use_tma", "sorted_token_ids", "expert_ids", "num_tokens_post_padded",
)  # fmt: skip
"""What SGLang's sequence calls the fields of `Prepared`."""


class Prepared(NamedTuple):
    """What SGLang has chosen before its sequence begins, in the order in which `_prepare_fused_moe_run` gives it."""

    first_tile: dict[str, Any]
    second_tile: dict[str, Any] | None  # None where it is the first one
    second_in_bulk: bool  # whether rows between both products are in blocks
    first_in_bulk: bool
    sorted_ids: torch.Tensor  # int32 [rows], choices by expert, the number of choices in padding
    expert_ids: torch.Tensor  # int32 [blocks], -1 of another GPU
    padded: torch.Tensor  # int32 [1], rows of all blocks

    @property
    def given(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """FP8 and scales of hidden states where they are quantised already, as `prepare` leaves them with the order."""
        return getattr(self.sorted_ids, "quantised", None)


def take() -> None:
    """Have SGLang's Triton runner leave what is before and between its products to one launch each; once a process."""
    hook(f"{MODULE}._prepare_fused_moe_run", prepared, HookType.AROUND)
    hook(f"{MODULE}._fused_moe_kernel_sequence", sequence, HookType.AROUND)


def prepared(
    original: Callable[..., tuple], hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor,
    **form: Any,
) -> tuple:  # fmt: skip
    """Around SGLang's choice of tiles and its order of rows: what `Prepared` has."""
    if form != FORM or not has_launches(hidden_states, w1, topk_ids) or not is_ordered(hidden_states, w1, topk_ids):
        return original(hidden_states, w1, w2, topk_ids, **form)
    return prepare(hidden_states, w1, w2, topk_ids)


def has_launches(x: torch.Tensor, first: torch.Tensor, chosen: torch.Tensor) -> bool:
    """Whether these tokens have both, of experts with these weights of the first product; one choice has no sum in SGLang's."""
    width = first.shape[1] // 2
    wanted = len(x) in TOKENS and ((len(first), width) in TIMED or switched_on(SWITCH))
    return wanted and chosen.shape[1] > 1 and problem(width) is None and sums_are_free()


def is_ordered(x: torch.Tensor, first: torch.Tensor, chosen: torch.Tensor) -> bool:
    """Whether one launch gives what SGLang's would for these tensors."""
    types = x.dtype == torch.bfloat16 and first.dtype == torch.float8_e4m3fn and chosen.dtype == torch.int32
    fits = expert_order.problem(*chosen.shape, x.shape[1]) is None
    return types and fits and x.is_contiguous() and chosen.is_contiguous()


def prepare(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, chosen: torch.Tensor) -> Prepared:
    """SGLang's tiles for these experts and tokens, rows in blocks by expert, and with them `x` quantised.

    Args:
        x, first, second, chosen: as `kernels.few_experts` has them.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    found, (found_second, _) = fused_moe.try_get_optimal_moe_config(
        first.shape, tuple(second.shape), chosen.shape[1], "fp8_w8a8", len(x),
        block_shape=[GROUP, GROUP], per_channel_quant=False, return_down_config=True,
    )  # fmt: skip
    tile, second_tile = dict(found), found_second and dict(found_second)
    bulk = [bool(one and one.pop("USE_TMA", False) and fused_moe._moe_support_tma()) for one in (second_tile, tile)]
    values, scales, *order = expert_order.order(x, chosen, tile["BLOCK_SIZE_M"], len(first))
    order[0].quantised = values, scales
    return Prepared(tile, second_tile, *bulk, *order)


signature_of = functools.cache(inspect.signature)


def sequence(
    original: Callable[..., torch.Tensor], hidden_states: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """Around SGLang's launches of a layer's experts, behind those that sort rows: bfloat16 [tokens, hidden]."""
    if len(hidden_states) not in TOKENS:
        return original(hidden_states, *arguments, **options)
    given = signature_of(original).bind(hidden_states, *arguments, **options)
    given.apply_defaults()
    of = given.arguments
    if not has_launches(hidden_states, of["w1"], of["topk_ids"]) or not are_plain(of, OF_SEQUENCE):
        return original(hidden_states, *arguments, **options)
    tell(of["w1"].shape[0], of["w1"].shape[1] // 2)
    before = Prepared(*(of[name] for name in NAMES))
    return experts(
        hidden_states, of["w1"], of["w1_scale"], of["w2"], of["w2_scale"], of["topk_weights"], of["topk_ids"], before,
        hidden_states if of["inplace"] else room_for_sums(hidden_states), factor=of["routed_scaling_factor"],
        filtered=of["filter_expert"],
    )  # fmt: skip


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
) -> torch.Tensor:
    """`out`, with the sums of what block-FP8 experts give, by the launches of SGLang's sequence and ours among them.

    Args:
        x: bfloat16 [tokens, hidden]; `out` may be the same tensor, which the last launch writes.
        first, first_scales, second, second_scales, shares, chosen: as `kernels.few_experts` has them; two choices or more.
        prepared: for these choices.
        factor: of the sums, 1 where None.
        filtered: whether experts may be another GPU's.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    tile, bulk, block = prepared.first_tile, prepared.second_in_bulk, prepared.first_tile["BLOCK_SIZE_M"]
    (tokens, choices), order = chosen.shape, (prepared.sorted_ids, prepared.expert_ids, prepared.padded)
    form = FORM | {"compute_type": tl.bfloat16, "filter_expert": filtered}
    rows = chosen.numel() + (min(chosen.numel(), len(first) + 1) * (block - 1) if bulk else 0)
    both, (values, scales) = x.new_empty(rows, first.shape[1]), prepared.given or (x, None)
    fused_moe.invoke_fused_moe_kernel(
        values, first, None, both, scales, first_scales, None, shares, chosen, *order, False, choices, tile,
        c_sorted=bulk, b_use_tma=prepared.first_in_bulk, **form,
    )  # fmt: skip
    values, scales = activate(both, chosen, prepared.expert_ids, prepared.padded, block, prepared.sorted_ids if bulk else None)
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
        "nsa_backend: experts of %d to %d tokens have one launch before both products and one between, %d experts of %d",
        TOKENS.start, TOKENS.stop - 1, count, width,
    )  # fmt: skip
