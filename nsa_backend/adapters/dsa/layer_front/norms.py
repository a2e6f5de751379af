"""The norms of a layer whose front is ours, and what multiplies them in FP8: one launch each.

SGLang norms and quantises in two launches, and in prefills for each product anew: qkv_a and wk read hidden states once more,
and so do experts. Where ranks sum between two halves of a layer, SGLang may norm in the same launch as that; no norm is called
then, and everyone quantises as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from nsa_backend.adapters import experts
from nsa_backend.adapters.dsa.layer_front.front import LayerFront
from nsa_backend.adapters.dsa.layer_front.kept_input import KEPT
from nsa_backend.adapters.dsa.layer_front.projections import scales_of, take_input
from nsa_backend.adapters.routers import LayerRouter
from nsa_backend.kernels import add_norm as kernels
from nsa_backend.kernels import router
from nsa_backend.kernels.add_norm import add_norm
from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.kernels.projection_inputs import ALIGNED

logger = logging.getLogger(__name__)

MOST_ROWS = 128
"""Of a captured forward that decodes or verifies: a row has a block, and a multiprocessor of Hopper has one of them."""


class LayerNorm:
    """One norm of a layer, in the place of an RMSNorm's `forward`."""

    def __init__(
        self,
        norm: Any,
        scales: Scales | None,
        next_is_ours: Callable[[int], bool],
        scales_of_many: Callable[[int], Scales | None] | None = None,
    ):
        """Of a norm that `problem` finds nothing against.

        Args:
            norm: the layer's.
            scales: of the layer's input in FP8, which the norm quantises; None behind attention, and with other weights.
            next_is_ours: whether so many rows have a launch of ours behind this one.
            scales_of_many: those in which so many rows, more than MOST_ROWS, are multiplied; None where nobody takes them.
        """
        self.norm, self.own = norm, norm.forward
        self.scales, self.next_is_ours, self.scales_of_many = scales, next_is_ours, scales_of_many or (lambda rows: scales)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, post_residual_addition: Any = None, **options: Any
    ) -> Any:
        """(norm, sum), in the place of `x` and `residual`; what SGLang's returns of anything that is not served."""
        KEPT.forget()
        if residual is None or post_residual_addition is not None or options or not _fits(x, residual):
            return self.own(x, residual, post_residual_addition, **options)
        rows, few = len(x), len(x) <= MOST_ROWS
        scales = self.scales if few else self._of_many(rows)
        if scales is None and not few:  # a launch that quantises nothing saves nothing there
            return self.own(x, residual, post_residual_addition)
        weight, eps = self.norm.weight.data, self.norm.variance_epsilon
        found = add_norm(x, residual, weight, eps, scales, before_ours=few and self.next_is_ours(rows))
        if found is not None:
            KEPT.keep(x, scales, found)
        return x, residual

    def _of_many(self, rows: int) -> Scales | None:
        """Those who multiply experts' input want rows in multiples of ALIGNED, as SGLang pads them."""
        return None if rows % ALIGNED else self.scales_of_many(rows)


def _fits(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether these are rows of a norm that is served: few of a forward that is captured, or many."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import get_is_capture_mode

    if x.dim() != 2 or not (len(x) > MOST_ROWS or (len(x) > 0 and get_is_capture_mode())):
        return False
    return (
        not torch.compiler.is_compiling()
        and residual.shape == x.shape
        and all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in (x, residual))
    )


def take(model: Any) -> int:
    """Have both norms of every layer of `model` whose front is ours.

    Returns:
        How many norms have the launch.
    """
    taken = 0  # of norms
    for layer in model.modules():
        front = getattr(getattr(layer, "self_attn", None), "forward_absorb_prepare", None)
        if not isinstance(front, LayerFront):
            continue
        qkv_a, indexer = front.attention.fused_qkv_a_proj_with_mqa, front.attention.indexer
        for name, scales, next_is_ours, of_many in (
            ("input_layernorm", scales_of(qkv_a), front.begins_with_ours, None),
            (
                "post_attention_layernorm", None,
                lambda rows, layer=layer: routes(layer, rows), lambda rows, layer=layer: of_experts(layer, rows),
            ),
        ):  # fmt: skip
            norm = getattr(layer, name, None)
            if problem(norm) is None:
                norm.forward = LayerNorm(norm, scales, next_is_ours, of_many)
                if norm.weight.is_cuda:
                    for one in {scales, Scales.EXACT}:  # of few rows, and of many
                        kernels.compile_ahead(norm.weight.device, len(norm.weight), one)
                taken += 1
                if scales is not None:
                    take_input(qkv_a, scales, once=indexer is None or indexer.use_dsa_indexer_fusion)
    if taken:
        logger.info(
            "nsa_backend: %d norms are launches of this package: up to %d rows in captured forwards, more before FP8 products",
            taken, MOST_ROWS,
        )  # fmt: skip
    return taken


def of_experts(layer: Any, rows: int) -> Scales | None:
    """Of so many rows whose experts take what the norm quantises; else None."""
    return Scales.EXACT if experts.take_quantised(layer.mlp, rows) else None


def routes(layer: Any, rows: int) -> bool:
    """Whether experts of so many rows have our router, which comes first behind the norm."""
    gate = getattr(layer.mlp, "gate", None)
    return rows <= router.MOST_ROWS and isinstance(getattr(gate, "forward", None), LayerRouter)


def problem(norm: Any) -> str | None:
    """Why a norm is SGLang's, or None."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.runtime_context import get_exec

    if type(norm) is not RMSNorm or "forward" in vars(norm):
        return f"it is {type(norm).__name__}, or another extension's"
    if norm.weight.dtype != torch.bfloat16:
        return f"it has weights of {norm.weight.dtype}"
    if (why := kernels.problem(*norm.weight.shape)) is not None:
        return why
    other = norm.variance_size_override is not None or norm.cast_x_before_out_mul or norm._quant_linear is not None
    if other or norm.fp32_residual or norm.override_orig_dtype is not None:
        return "it norms in another way"
    if get_exec().deterministic.enable_deterministic_inference:
        return "sums have an order that a user asked for"
    return None
