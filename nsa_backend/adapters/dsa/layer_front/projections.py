"""The projections in front of attention: which formats of weights are served, and an input quantised once for two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nsa_backend.adapters.dsa.layer_front.kept_input import KEPT, quantised_input
from nsa_backend.kernels import early_products
from nsa_backend.kernels.layer_front_weights import GROUP, Scales
from nsa_backend.kernels.split_products import (
    FEW_ROWS,
    FEW_ROWS_OF_THREE,
    GATES,
    LEAST_INNER,
    TILES_OF_QUERIES,
    Product,
    counters,
    padded_rows,
    split_products,
)

if TYPE_CHECKING:
    from sglang.srt.layers.linear import LinearBase


def scales_of(linear: LinearBase) -> Scales | None:
    """How the input of `linear` is quantised; None for bfloat16 weights.

    Raises:
        ValueError: its weights are served by SGLang's own layer alone; says why.
    """
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.quantization import fp8_utils
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    method, name, weight = getattr(linear, "quant_method", None), getattr(linear, "prefix", ""), linear.weight
    if getattr(linear, "set_lora", False):
        raise ValueError(f"{name} has LoRA adapters")
    if getattr(linear, "bias", None) is not None:
        raise ValueError(f"{name} has a bias")
    if type(method) is UnquantizedLinearMethod and weight.dtype == torch.bfloat16:
        return None
    if type(method) is not Fp8LinearMethod or weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} has weights of {weight.dtype} under {type(method).__name__}")
    run = method.w8a8_block_fp8_linear
    powers = isinstance(run, partial) and run.keywords == {"act_scale_ue8m0": True} and not run.args
    run = run.func if powers else run
    rows, columns = weight.shape
    if (
        run is not fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
        or deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0
        or method.use_mxfp8
        or method.use_marlin
        or getattr(linear, "block_fp8_mxfp8_ready", False)
        or list(method.weight_block_size) != [GROUP, GROUP]
        or rows % 64
        or columns % GROUP
    ):
        raise ValueError(f"{name} has FP8 weights [{rows}, {columns}] that DeepGEMM does not multiply in blocks of 128")
    return Scales.POWERS_OF_TWO if powers else Scales.EXACT


def product(linear: LinearBase) -> Product:
    """Block-FP8 weights as `split_products` takes them."""
    return linear.weight, linear.weight_scale_inv


def come_early(
    weights: list[torch.Tensor], gates: torch.Tensor | None = None, gates_dtype: torch.dtype = torch.float32
) -> bool:
    """Whether products of few rows with these weights have the launch whose weights come early, which is compiled here."""
    inner = weights[0].shape[1]
    of_gates = 0 if gates is None else len(gates)
    if early_products.problem(inner, *map(len, weights), gates=of_gates) is not None:
        return False
    if weights[0].is_cuda:
        early_products.compile_ahead(weights[0].device, inner, gates_dtype)
    return True


@dataclass(frozen=True)
class FirstProducts:
    """qkv_a, wk and weights_proj of one layer in one launch, for few rows; their weights as they are at every call.

    The input is quantised in a launch before it.
    """

    qkv_a: LinearBase
    wk: LinearBase | None  # None where `gates` has the index key's columns first
    gates: LinearBase
    scales: Scales
    gates_dtype: torch.dtype
    arrived: torch.Tensor
    most_rows: int
    early: bool  # whether weights of few rows come early

    @classmethod
    def of(cls, attention: Any) -> FirstProducts | None:
        """Of a DeepseekV2AttentionMLA with an indexer and block-FP8 weights wide enough for it to pay, or None."""
        indexer, qkv_a = attention.indexer, attention.fused_qkv_a_proj_with_mqa
        if indexer is None:
            return None
        joined = indexer.use_dsa_indexer_fusion
        wk, gates = (None, indexer.wk_weights_proj) if joined else (indexer.wk, indexer.weights_proj)
        scales = scales_of(qkv_a)
        if scales is None or qkv_a.weight.shape[1] < LEAST_INNER or gates.weight.shape[0] % GATES:
            return None
        arrived = counters(qkv_a.weight, None if wk is None else wk.weight, gates.weight)
        gates_dtype = torch.bfloat16 if joined else torch.float32
        early = come_early([linear.weight for linear in (qkv_a, wk) if linear is not None], gates.weight, gates_dtype)
        most_rows = FEW_ROWS if wk is None else FEW_ROWS_OF_THREE
        return cls(qkv_a, wk, gates, scales, gates_dtype, arrived, most_rows, early)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """bfloat16 [rows, columns] of qkv_a and wk, and the gates as SGLang has them: float32, bfloat16 where it joins both.

        What is launched next on the stream is a kernel of this package.
        """
        # Of more rows, products that are there early take time from what is ahead.
        x = quantised_input(hidden, self.scales, before_ours=len(hidden) <= FEW_ROWS)
        qkv_a, wk = product(self.qkv_a), None if self.wk is None else product(self.wk)
        with_gates: dict[str, Any] = {"gates": (hidden, self.gates.weight), "gates_dtype": self.gates_dtype}
        if self.early and len(hidden) <= early_products.MOST_ROWS:
            found = early_products.early_products(*x, qkv_a, wk, **with_gates, before_ours=True)
        else:
            found = split_products(*x, qkv_a, wk, self.arrived, **with_gates, before_ours=True)
        if wk is not None:
            return found
        qkv, joined = found
        return qkv, joined[:, :GROUP], joined[:, GROUP:]


@dataclass(frozen=True)
class QueryProducts:
    """q_b and wq_b of one layer in one launch, for few rows; their weights as they are at every call."""

    wq_b: LinearBase
    arrived: torch.Tensor  # for as many heads of q_b as a call may have
    most_rows: int
    early: bool  # whether weights of few rows come early

    @classmethod
    def of(cls, attention: Any) -> QueryProducts | None:
        """Of a DeepseekV2AttentionMLA with an indexer and block-FP8 weights, or None."""
        if attention.indexer is None:
            return None
        q_b, wq_b = attention.q_b_proj, attention.indexer.wq_b
        if scales_of(q_b) is None or scales_of(wq_b) is None:
            return None
        of_all_ranks = q_b.weight.new_empty(attention.dcp_size * len(q_b.weight), 0)
        return cls(wq_b, counters(of_all_ranks, wq_b.weight), FEW_ROWS, come_early([q_b.weight, wq_b.weight]))

    def __call__(self, x: tuple[torch.Tensor, torch.Tensor], q_b: LinearBase) -> tuple[torch.Tensor, ...]:
        """bfloat16 [rows, columns] of `q_b` and wq_b; `x` is FP8 and its scales.

        What is launched next is a kernel of this package.
        """
        if self.early and len(x[0]) <= early_products.MOST_ROWS:
            return early_products.early_products(*x, product(q_b), product(self.wq_b), before_ours=True)
        tile = TILES_OF_QUERIES[padded_rows(len(x[0]))]
        return split_products(*x, product(q_b), product(self.wq_b), self.arrived, tile, before_ours=True)


MOST_ALONE = 11264
"""Columns of a projection by itself: as many as were timed of two together."""


@dataclass(frozen=True)
class EarlyProduct:
    """One projection of few rows by the launch whose weights come early; its weights as they are at every call."""

    linear: LinearBase
    most_rows: int

    @classmethod
    def of(cls, linear: LinearBase) -> EarlyProduct | None:
        """Of block-FP8 weights that were timed, or None."""
        served = scales_of(linear) is not None and len(linear.weight) <= MOST_ALONE
        return cls(linear, early_products.MOST_ROWS) if served and come_early([linear.weight]) else None

    def __call__(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """bfloat16 [rows, columns]; `x` is FP8 and its scales, of 1 to `most_rows` rows.

        What is launched next on the stream is a kernel of this package.
        """
        return early_products.early_products(*x, product(self.linear), before_ours=True)[0]


def has(products: FirstProducts | QueryProducts | EarlyProduct | None, rows: int) -> bool:
    """Whether so many rows have the launch of a layer's products, which may have none."""
    return products is not None and 0 < rows <= products.most_rows


def take_input(linear: LinearBase, scales: Scales, *, once: bool) -> None:
    """Have a projection take what the norm has quantised of its input; `once`, nobody else takes it after."""
    kept = KEPT.take if once else KEPT.of
    linear.quant_method.apply = partial(_kept_or, linear.quant_method.apply, lambda x: kept(x, scales))


def _kept_or(
    own: Callable[..., torch.Tensor], kept: Callable, linear: LinearBase, x: Any, *arguments: Any, **options: Any
) -> torch.Tensor:
    return own(linear, kept(x) or x, *arguments, **options)


def take_output(o_proj: LinearBase) -> None:
    """Have the launch whose weights come early for few rows that `value_products` has quantised; ranks sum as before."""
    if come_early([o_proj.weight]):
        o_proj.quant_method.apply = partial(_early_or, o_proj.quant_method.apply)


def _early_or(own: Callable[..., torch.Tensor], linear: LinearBase, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    if bias is None and isinstance(x, tuple) and len(x) == 2 and 0 < len(x[0]) <= early_products.MOST_ROWS:
        # A norm or a sum of ranks is next, and waits before it reads anything, as SGLang's and FlashInfer's all do.
        return early_products.early_products(*x, product(linear), before_ours=True)[0]
    return own(linear, x, bias)
