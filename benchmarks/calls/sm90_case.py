"""One shape of the comparison of SM90 kernels: query, top-k rows and KV, and how far a result is from float32."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.attention.torch_reference import TorchSparseAttention
from nsa_backend.benchmarks.calls.attention_case import SLOTS, pools
from nsa_backend.testing.shape import LATENT, QK_DIM, ROPE, SCALE, TOPK

CONTEXT = 1 << 17  # tokens that a prefill of full rows chooses from; 151 MB of bfloat16 KV
SHORT = 300  # tokens of a short decode row
LOTS_OF_ROWS = 2048  # decode: rows of slots to draw from, so that calls find no KV in the L2 cache
CHECKED_ROWS = 16


@dataclass(frozen=True)
class Shape:
    """What is measured at once."""

    phase: str  # decode or prefill
    kv: str  # bf16 or fp8
    heads: int
    rows: int
    lengths: str  # full: index_topk a row; short: SHORT a row; growing: 1, 2, 3, ... up to index_topk

    @property
    def context(self) -> int:
        """Tokens that the rows choose from."""
        if self.phase == "decode":
            return SLOTS
        return self.rows if self.lengths == "growing" else CONTEXT


class Sm90Case:
    """Inputs of a shape. Where rows are drawn in lots, call i takes the i-th one; a prefill repeats the same rows."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.cache, self.values = pools(shape.kv)  # [SLOTS, 1, packed or 576]; the same values in bfloat16
        rows, heads, device = shape.rows, shape.heads, "cuda"
        generator = torch.Generator(device=device).manual_seed(heads)
        # As SGLang's model leaves them: q_nope heads first in memory, q_rope rows first.
        nope = torch.randn(heads, rows, LATENT, generator=generator, device=device, dtype=torch.bfloat16)
        self.q_nope = nope.transpose(0, 1)
        self.q_rope = torch.randn(rows, heads, ROPE, generator=generator, device=device, dtype=torch.bfloat16)
        reach = torch.arange(1, rows + 1, device=device, dtype=torch.int32)
        full = torch.full((rows,), TOPK, device=device, dtype=torch.int32)
        self.lengths = {"full": full, "short": full.clamp(max=SHORT), "growing": reach.clamp(max=TOPK)}[shape.lengths]
        if shape.phase == "prefill":
            self._positions = spread(reach if shape.lengths == "growing" else torch.full_like(reach, CONTEXT), generator)
        else:
            size = (LOTS_OF_ROWS, TOPK)
            self._positions = torch.randint(SLOTS, size, generator=generator, device=device, dtype=torch.int32)
        if shape.lengths == "short":
            self._positions[:, SHORT:] = -1

    def chosen(self, call: int) -> torch.Tensor:
        """int32 [rows, TOPK]: slots, which are also positions in the context; -1 past a row's length."""
        start = call * self.shape.rows % (self._positions.shape[0] - self.shape.rows + 1)
        return self._positions[start : start + self.shape.rows]

    @functools.cached_property
    def flattened(self) -> torch.Tensor:
        """int32 [context]: the slot of every token."""
        return torch.arange(self.shape.context, dtype=torch.int32, device="cuda")

    def joined(self, multiple: int) -> torch.Tensor:
        """bfloat16 [rows, heads, 576] with zero heads up to a multiple of `multiple`."""
        heads = -(-self.shape.heads // multiple) * multiple
        query = torch.zeros(self.shape.rows, heads, QK_DIM, dtype=torch.bfloat16, device="cuda")
        query[:, : self.shape.heads, :LATENT] = self.q_nope
        query[:, : self.shape.heads, LATENT:] = self.q_rope
        return query

    def error(self, out: torch.Tensor, values: torch.Tensor | None = None) -> float:
        """Relative error of call 0's result [rows, heads or more, LATENT], on CHECKED_ROWS rows.

        `values` [slots, 1, 576] are those the float32 reference reads, the case's own where None.
        """
        rows = torch.linspace(0, self.shape.rows - 1, min(CHECKED_ROWS, self.shape.rows), device="cuda").long()
        inputs = SparseInputs(
            q_nope=self.q_nope[rows].float(),
            q_rope=self.q_rope[rows].float(),
            kv_cache=self.values if values is None else values,
            topk_slots=self.chosen(0)[rows],
            nsa_cache_seqlens=None,
            nsa_cu_seqlens_q=None,
            nsa_cu_seqlens_k=None,
            sm_scale=SCALE,
            logit_cap=0.0,
        )
        want = TorchSparseAttention().forward(inputs)
        return float((out[rows, : self.shape.heads].float() - want).norm() / want.norm())


def spread(reach: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """int32 [rows, TOPK]: row i has TOPK different positions below reach[i], or all of them in order and then -1."""
    reach, column = reach.long()[:, None], torch.arange(TOPK, device=reach.device)
    shift = torch.rand(reach.shape[0], TOPK, generator=generator, device=reach.device) * (reach // TOPK)
    chosen = torch.where(reach > TOPK, column * reach // TOPK + shift.long(), column)
    return torch.where(column < reach, chosen, -1).int()
