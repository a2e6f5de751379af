"""FlashMLA's sparse prefill kernel, which also serves decode: one query row, its own list of slots."""

from __future__ import annotations

import inspect

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.context_part import ContextPart, joinable
from nsa_backend.attention.interface import NothingToPrepare, bfloat16_problems, package_problems
from nsa_backend.attention.joined_query import QueryJoiner
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig

HEADS_MULTIPLE = 64
"""Query heads come in blocks of 64 on Hopper."""

TOPK_MULTIPLE = 128
"""The kernel walks a top-k row in pairs of 64-token blocks."""


def problems(config: AttentionConfig) -> list[str]:
    """Why flashmla_sparse cannot run."""
    found = []
    if config.device_sm != 90:
        found.append("nsa_backend runs FlashMLA on Hopper (SM90) alone so far")
    if config.index_topk % TOPK_MULTIPLE:
        found.append(f"it takes an index_topk in multiples of {TOPK_MULTIPLE} and this model has {config.index_topk}")
    dequantised = config.fp8 and config.prefill  # once a layer
    if not dequantised:
        found += bfloat16_problems(config)
    elif config.context_ranks > 1:
        found.append(
            "--dcp-size divides the KV of a request among ranks, and its copy of an FP8 cache in bfloat16 is of whole requests"
        )
    return found + package_problems(adapter.FLASH_MLA_DISTRIBUTION)


def build(config: AttentionConfig) -> FlashMlaSparse:
    return FlashMlaSparse(config)


class FlashMlaSparse(NothingToPrepare):
    """Pads the query heads to a multiple of 64 and trims the output; slots of -1 are skipped by the kernel.

    Where the installed FlashMLA takes the number of valid slots of each row, it does not even scan the others.
    """

    def __init__(self, config: AttentionConfig) -> None:
        self._attend = adapter.flash_mla().flash_mla_sparse_fwd
        self._takes_lengths = "topk_length" in inspect.signature(self._attend).parameters
        self._query = QueryJoiner(config, -(-config.num_heads // HEADS_MULTIPLE) * HEADS_MULTIPLE)

    def reserve(self, max_rows: int) -> None:
        self._query.reserve(max_rows)

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        return self._call(inputs)[0]

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        own = part.own(inputs)
        out, lse = self._call(own)
        return joinable(out, lse[:, : out.shape[1]], own, natural=False)

    def _call(self, inputs: SparseInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp, in base 2: [rows, heads, latent] and [rows, padded heads]."""
        rows, heads, latent_dim = inputs.q_nope.shape
        # Rows that SGLang padded beyond the metadata have no length; their slots are -1.
        known = self._takes_lengths and inputs.nsa_cache_seqlens.shape[0] == rows
        options = {"topk_length": inputs.nsa_cache_seqlens} if known else {}
        if inputs.attn_sink is not None:
            options["attn_sink"] = torch.nn.functional.pad(inputs.attn_sink, (0, self._query.padded_heads - heads))
        out, _, lse = self._attend(
            q=self._query.join(inputs),
            kv=inputs.kv_cache,
            indices=inputs.topk_slots.unsqueeze(1),
            sm_scale=inputs.sm_scale,
            d_v=latent_dim,
            **options,
        )
        return out[:, :heads], lse
