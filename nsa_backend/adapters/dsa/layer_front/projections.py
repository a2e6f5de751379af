"""The projections in front of attention: which formats of weights are served, and an input quantised once for two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from nsa_backend.adapters.dsa.layer_front.kept_input import KEPT, quantised_input
from nsa_backend.kernels import early_products, tile_products
from nsa_backend.kernels.block_fp8 import Product
from nsa_backend.kernels.layer_front_weights import GROUP, Scales

if TYPE_CHECKING:
    from sglang.srt.layers.linear import LinearBase

FEW_ROWS, MORE_ROWS, FEW_ROWS_ALONE = 32, 128, 8
"""Up to which a launch of ours pays (benchmarks/tuning/projections.py; of GLM-5's first products by its rank's profile): in
place of both queries' with more columns than `MOST_TIMED`, of others together, and of DeepGEMM's one."""
MOST_ROWS_EARLY = 32
"""Of more, products that are there early seem to take time from the launch ahead (rank_v32_tp8, 32 x 4096)."""
MOST_TIMED = 11264
"""Columns of two projections together, and so of one by itself, of which more than a few rows were timed."""
LEAST_INNER = 4096
"""Values of a row from which on the first products of a layer are ours: narrower ones were not timed."""


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
    """Block-FP8 weights as `multiply` takes them."""
    return linear.weight, linear.weight_scale_inv


def come_early(
    weights: list[torch.Tensor],
    most_rows: int,
    gates: torch.Tensor | None = None,
    gates_dtype: torch.dtype = torch.float32,
) -> bool:
    """Whether products with these weights have launches whose weights come early, compiled here for up to `most_rows`."""
    inner, columns, of_gates = weights[0].shape[1], [len(weight) for weight in weights], 0 if gates is None else len(gates)
    if any(launch.problem(inner, *columns, gates=of_gates) is not None for launch in (early_products, tile_products)):
        return False
    if weights[0].is_cuda:
        early_products.compile_ahead(weights[0].device, inner, gates_dtype)
        more = range(early_products.MOST_ROWS + 1, most_rows + 1)
        tile_products.compile_ahead(weights[0].device, inner, more, columns, of_gates, gates_dtype)
    return True


def multiply(x: tuple[torch.Tensor, torch.Tensor], *products: Product | None, **of_gates: Any) -> tuple[torch.Tensor, ...]:
    """Rows in FP8 with their scales times weights that `come_early`; `of_gates` as both launches take it.

    What is launched next on the stream is a kernel of this package.
    """
    few = len(x[0]) <= early_products.MOST_ROWS
    launch = early_products.early_products if few else tile_products.tile_products
    return launch(*x, *(one for one in products if one is not None), **of_gates, before_ours=True)


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
    most_rows: int

    @classmethod
    def of(cls, attention: Any) -> FirstProducts | None:
        """Of a DeepseekV2AttentionMLA with an indexer and block-FP8 weights wide enough for it to pay, or None."""
        indexer, qkv_a = attention.indexer, attention.fused_qkv_a_proj_with_mqa
        if indexer is None:
            return None
        joined = indexer.use_dsa_indexer_fusion
        wk, gates = (None, indexer.wk_weights_proj) if joined else (indexer.wk, indexer.weights_proj)
        scales, gates_dtype = scales_of(qkv_a), torch.bfloat16 if joined else torch.float32
        if scales is None or qkv_a.weight.shape[1] < LEAST_INNER:
            return None
        weights = [linear.weight for linear in (qkv_a, wk) if linear is not None]
        if not come_early(weights, MORE_ROWS, gates.weight, gates_dtype):
            return None
        return cls(qkv_a, wk, gates, scales, gates_dtype, MORE_ROWS)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """bfloat16 [rows, columns] of qkv_a and wk, and the gates as SGLang has them: float32, bfloat16 where it joins both.

        What is launched next on the stream is a kernel of this package.
        """
        x = quantised_input(hidden, self.scales, before_ours=len(hidden) <= MOST_ROWS_EARLY)
        with_gates = {"gates": (hidden, self.gates.weight), "gates_dtype": self.gates_dtype}
        found = multiply(x, product(self.qkv_a), None if self.wk is None else product(self.wk), **with_gates)
        if self.wk is not None:
            return found
        qkv, joined = found
        return qkv, joined[:, :GROUP], joined[:, GROUP:]


@dataclass(frozen=True)
class QueryProducts:
    """q_b and wq_b of one layer in one launch, for few rows; their weights as they are at every call."""

    wq_b: LinearBase
    most_rows: int

    @classmethod
    def of(cls, attention: Any) -> QueryProducts | None:
        """Of a DeepseekV2AttentionMLA with an indexer and block-FP8 weights, or None."""
        if attention.indexer is None:
            return None
        q_b, wq_b = attention.q_b_proj, attention.indexer.wq_b
        weights = [q_b.weight, wq_b.weight]
        most_rows = MORE_ROWS if sum(map(len, weights)) <= MOST_TIMED else FEW_ROWS
        if scales_of(q_b) is None or scales_of(wq_b) is None or not come_early(weights, most_rows):
            return None
        return cls(wq_b, most_rows)

    def __call__(self, x: tuple[torch.Tensor, torch.Tensor], q_b: LinearBase) -> tuple[torch.Tensor, ...]:
        """bfloat16 [rows, columns] of `q_b` and wq_b; `x` is FP8 and its scales.

        What is launched next is a kernel of this package.
        """
        return multiply(x, product(q_b), product(self.wq_b))


@dataclass(frozen=True)
class EarlyProduct:
    """One projection of few rows by a launch whose weights come early; its weights as they are at every call."""

    linear: LinearBase
    most_rows: int

    @classmethod
    def of(cls, linear: LinearBase) -> EarlyProduct | None:
        """Of block-FP8 weights that were timed, or None."""
        served = scales_of(linear) is not None and len(linear.weight) <= MOST_TIMED
        return cls(linear, FEW_ROWS_ALONE) if served and come_early([linear.weight], FEW_ROWS_ALONE) else None

    def __call__(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """bfloat16 [rows, columns]; `x` is FP8 and its scales, of 1 to `most_rows` rows.

        What is launched next on the stream is a kernel of this package.
        """
        return multiply(x, product(self.linear))[0]


def has(products: FirstProducts | QueryProducts | EarlyProduct | None, rows: int) -> bool:
    """Whether so many rows have the launch of a layer's products, which may have none."""
    return products is not None and 0 < rows <= products.most_rows


def has_early(products: FirstProducts | QueryProducts | EarlyProduct | None, rows: int) -> bool:
    """Whether they have it, and it is better there while the launch ahead runs."""
    return rows <= MOST_ROWS_EARLY and has(products, rows)


def take_input(linear: LinearBase, scales: Scales, *, once: bool) -> None:
    """Have a projection take what the norm has quantised of its input; `once`, nobody else takes it after."""
    kept = KEPT.take if once else KEPT.of
    linear.quant_method.apply = partial(_kept_or, linear.quant_method.apply, lambda x: kept(x, scales))


def _kept_or(
    own: Callable[..., torch.Tensor], kept: Callable, linear: LinearBase, x: Any, *arguments: Any, **options: Any
) -> torch.Tensor:
    return own(linear, kept(x) or x, *arguments, **options)


def take_output(o_proj: LinearBase) -> int:
    """Have a launch whose weights come early for few rows that are quantised already; ranks sum as before.

    Returns:
        Rows up to which it has.
    """
    if not come_early([o_proj.weight], FEW_ROWS_ALONE):
        return 0
    o_proj.quant_method.apply = partial(_early_or, o_proj.quant_method.apply)
    return FEW_ROWS_ALONE


def _early_or(own: Callable[..., torch.Tensor], linear: LinearBase, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    if bias is None and isinstance(x, tuple) and len(x) == 2 and 0 < len(x[0]) <= FEW_ROWS_ALONE:
        # A norm or a sum of ranks is next, and waits before it reads anything, as SGLang's and FlashInfer's all do.
        return multiply(x, product(linear))[0]
    return own(linear, x, bias)
