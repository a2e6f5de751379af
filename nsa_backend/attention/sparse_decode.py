"""A kernel of our own for the few rows of decode: every row is split over the GPU; no padded heads, no joined query.

Written for one to sixteen rows of a rank's 8 to 32 heads, where FA3 leaves most of the GPU idle, and for FP8 KV caches, which
FA3 does not read.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.interface import NothingToPrepare, device_title, sinks_problems
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels.sparse_decode import Parts, sparse_decode

SMS_WITHOUT_A_GPU = 132
FP8_LATENT = 512  # values of a slot of SGLang's FP8 cache, which have a scale for each 128


def problems(config: AttentionConfig) -> list[str]:
    """Why sparse_decode cannot run."""
    found = []
    if config.prefill:
        found.append(f"it is made for few rows: name it for {adapter.DECODE_OPTION} alone")
    if config.device_sm != 90:
        found.append(f"nsa_backend runs it on Hopper (SM90) alone so far and this device is {device_title(config.device_sm)}")
    return found + kv_problems(config) + sinks_problems(config)


def kv_problems(config: AttentionConfig) -> list[str]:
    """Why kernels of ours cannot read the KV cache."""
    if config.kv_cache_dtype != torch.bfloat16 and not config.fp8:
        return [f"it reads a bfloat16 or fp8_e4m3 KV cache and this one is {config.kv_cache_dtype}"]
    if config.fp8 and config.latent_dim != FP8_LATENT:
        return [f"it reads FP8 values in four groups of 128 and this model's latent has {config.latent_dim}"]
    return []


def sms_of(device: torch.device) -> int:
    """SMs of the GPU; without one, those of the Hopper GPUs that this is written for."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SMS_WITHOUT_A_GPU


def build(config: AttentionConfig) -> SparseDecode:
    return SparseDecode(config)


class SparseDecode(NothingToPrepare):
    """One row, its own list of slots, as many programs as fill the GPU once."""

    def __init__(self, config: AttentionConfig):
        sms = self._num_sms = sms_of(config.device)
        # An SM has two programs at most, so no row is split where there are more rows than SMs.
        shape = sms, config.num_heads, config.latent_dim, config.index_topk, sms, config.device
        key = *shape, config.fp8
        self._parts = _parts[key] = _parts.get(key) or Parts.allocate(*shape, fp8=config.fp8)

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        return self._call(inputs)

    def forward_part(self, inputs: SparseInputs, part: ContextPart) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel itself skips what other ranks have."""
        lse = torch.empty(inputs.q_nope.shape[:2], dtype=torch.float32, device=inputs.q_nope.device)
        return self._call(inputs, ranks=part.ranks, rank=part.rank, lse=lse), lse

    def _call(self, inputs: SparseInputs, **part: Any) -> torch.Tensor:
        return sparse_decode(
            inputs.q_nope,
            inputs.q_rope,
            inputs.kv_cache,
            inputs.topk_slots,
            self.lens(inputs),
            inputs.sm_scale,
            num_sms=self._num_sms,
            logit_cap=inputs.logit_cap,
            parts=self._parts,
            **part,
        )

    @staticmethod
    def lens(inputs: SparseInputs) -> torch.Tensor:
        """int32 [rows], entries of each row to look at."""
        rows, topk = inputs.topk_slots.shape
        if inputs.nsa_cache_seqlens.shape[0] == rows:
            return inputs.nsa_cache_seqlens
        # Rows that SGLang padded beyond the metadata have no length; their slots are -1.
        return torch.full((rows,), topk, dtype=torch.int32, device=inputs.topk_slots.device)


_parts: dict[tuple, Parts] = {}
"""Shared by a process's backends, those of draft steps too: their forwards, captured or not, run one after the other."""
