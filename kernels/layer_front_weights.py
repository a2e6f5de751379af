"""What the front of a layer computes with beside activations: norms, RoPE's tables, and the form of scales."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

GROUP = 128
"""Values of the query's latent, of the KV cache and of index keys that share a scale."""
ROPE = 64
"""Values of a head that are turned."""
SUMMED_TOGETHER = 256
"""Values of a row that 32 lanes take at once; norms of other widths are summed in another order than SGLang's."""
WIDEST = 3072
"""Values of a row that FlashInfer's norm gives one warp."""


class Scales(Enum):
    """What SGLang's block-FP8 GEMM on Hopper has for scales of its input, float32 one a GROUP."""

    EXACT = "largest value / 448"
    POWERS_OF_TWO = "the next power of two"  # checkpoints whose scale_fmt is ue8m0, DeepSeek-V3.2's own


@dataclass(frozen=True)
class FrontWeights:
    """What a layer norms and rotates with; the tensors are the model's own. A layer without an indexer has no key's."""

    q_norm: torch.Tensor  # bfloat16 [q rank]
    latent_norm: torch.Tensor  # bfloat16 [latent]
    key_norm: torch.Tensor | None  # float32 [GROUP]
    key_bias: torch.Tensor | None  # float32 [GROUP]
    cos_sin: torch.Tensor  # float32 [positions, rope], cosines first
    index_cos_sin: torch.Tensor | None  # float32 [positions, rope]
    q_eps: float
    latent_eps: float
    key_eps: float
    neox: bool  # RoPE's layout in MLA: halves, or else neighbours
    index_neox: bool = False
    index_fused: bool = False
    """Whether SGLang has one kernel for index keys and one for index queries, as it does where their heads rotate neighbours:
    RoPE in float32, no Hadamard rotation, exact scales of queries, and gates in bfloat16."""

    @property
    def rope(self) -> int:
        return self.cos_sin.shape[1]

    def problem(self) -> str | None:
        """Why the launches cannot compute with these, or None."""
        for name, norm in (("q_a_layernorm", self.q_norm), ("kv_a_layernorm", self.latent_norm)):
            if norm.dtype != torch.bfloat16 or norm.shape[0] % SUMMED_TOGETHER or norm.shape[0] > WIDEST:
                return f"{name} has {norm.dtype} [{norm.shape[0]}]; widths are multiples of {SUMMED_TOGETHER} up to {WIDEST}"
        if self.rope != ROPE:
            return f"RoPE turns {self.rope} values of a head: {ROPE} are served"
        return _table_problem(self.cos_sin) or (None if self.key_norm is None else self._index_problem())

    def _index_problem(self) -> str | None:
        if self.index_fused and self.index_neox:
            return "its index heads rotate halves, which SGLang's fused kernels do not"
        for norm in (self.key_norm, self.key_bias):
            if norm.dtype != torch.float32 or norm.shape != (GROUP,):
                return f"the index key's norm has {norm.dtype} {tuple(norm.shape)} and not float32 [{GROUP}]"
        if self.index_cos_sin.shape[1] != self.rope:
            return f"RoPE turns {self.rope} values of a head and {self.index_cos_sin.shape[1]} of an index head"
        return _table_problem(self.index_cos_sin)


def _table_problem(table: torch.Tensor) -> str | None:
    fits = table.dtype == torch.float32 and table.is_contiguous()
    return None if fits else "RoPE's cosines are not contiguous float32"
