"""The three generations of SGLang's metadata for a draft replay, driven from SGLang 0.5.12.post1.

The release precomputes once and copies with fused kernels. Its earlier ways are still in it: behind an environment variable
(every step computes its own), and as the path taken where the fused kernels are missing (one copy a tensor and step).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

RELEASED = "builtin"
"""Precompute once, fused copies: the replay as the release runs it."""


def per_step(multi_step: Any, batch: SimpleNamespace, bs: int) -> None:
    """Every step computes all of its metadata (SGLANG_NSA_ENABLE_MTP_PRECOMPUTE_METADATA=0)."""
    from sglang.srt.environ import envs

    with envs.SGLANG_NSA_ENABLE_MTP_PRECOMPUTE_METADATA.override(False):
        multi_step.init_forward_metadata_replay_cuda_graph(batch, bs)


def precompute(multi_step: Any, batch: SimpleNamespace, bs: int) -> None:
    """Compute once, then copy tensor by tensor into every step; the calls are those of SGLang's own loop."""
    from sglang.srt.layers.attention import nsa_backend as module
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    fused, module._USE_FUSED_METADATA_COPY = module._USE_FUSED_METADATA_COPY, False
    try:
        precomputed = multi_step.attn_backends[0]._precompute_replay_metadata(
            bs=bs,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            forward_mode=ForwardMode.DECODE,
            spec_info=batch.spec_info,
        )
        for backend in multi_step.attn_backends:
            backend.init_forward_metadata_replay_cuda_graph_from_precomputed(
                bs=bs, precomputed=precomputed, forward_mode=ForwardMode.DECODE
            )
    finally:
        module._USE_FUSED_METADATA_COPY = fused


GENERATIONS = {"builtin_precompute": precompute, "builtin_per_step": per_step}
"""The two earlier generations, newest first, by the name that a result row has them under."""
