"""TensorRT-LLM's sparse MLA decode kernel through flashinfer, for Blackwell (SM100); has never run on one here.

Its rules are those of `flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla` in the release that SGLang pins: with
`sparse_mla_top_k` the block table of a query token is its row of KV slots, and `seq_lens` says how many of them count.
"""

from __future__ import annotations

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.interface import NothingToPrepare, device_title, package_problems, part_problems, sinks_problems
from nsa_backend.attention.joined_query import QueryJoiner
from nsa_backend.attention.sparse_inputs import SparseInputs, append_rows
from nsa_backend.config import AttentionConfig

PAGE_SIZES = (32, 64)
KV_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)

_workspaces: dict[torch.device, torch.Tensor] = {}


def problems(config: AttentionConfig) -> list[str]:
    """Why trtllm cannot run."""
    found = []
    if config.device_sm // 10 != 10:
        found.append(f"its kernel is built for Blackwell (SM100, SM103) and this device is {device_title(config.device_sm)}")
    if config.kv_cache_dtype not in KV_DTYPES:
        found.append(f"it reads a bfloat16 or fp8_e4m3 KV cache and this one is {config.kv_cache_dtype}")
    if config.page_size not in PAGE_SIZES:
        found.append(f"it reads pages of 32 or 64 tokens and this cache has pages of {config.page_size}")
    if config.fp8 and config.partner != "trtllm":
        found.append(
            "its FP8 KV cache holds 576 plain values a token, which no other implementation reads: pass "
            f"{adapter.DECODE_OPTION if config.prefill else adapter.PREFILL_OPTION} trtllm too"
        )
    return found + sinks_problems(config) + part_problems(config) + package_problems("flashinfer_python")


def build(config: AttentionConfig) -> TrtLlm:
    return TrtLlm(config)


class TrtLlm(NothingToPrepare):
    """One query row is one sequence with one query token. On an FP8 KV cache the query comes joined, with RoPE, in FP8."""

    def __init__(self, config: AttentionConfig):
        import flashinfer.decode

        self._attend = flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla
        self._config = config
        self._query = QueryJoiner(config, config.num_heads)
        self._workspace = _workspace(config.device)

    def forward(self, inputs: SparseInputs) -> torch.Tensor:
        config = self._config
        out = self._attend(
            query=self._query.join(inputs).unsqueeze(1),
            kv_cache=inputs.kv_cache.view(-1, 1, config.page_size, inputs.kv_cache.shape[-1]),
            workspace_buffer=self._workspace,
            qk_nope_head_dim=config.nope_dim,
            kv_lora_rank=config.latent_dim,
            qk_rope_head_dim=config.rope_dim,
            block_tables=inputs.topk_slots.unsqueeze(1),
            seq_lens=_lengths(inputs),
            max_seq_len=config.table_width,
            sparse_mla_top_k=config.index_topk,
            bmm1_scale=inputs.sm_scale,  # the cache is written unscaled, so no q_scale or k_scale belongs here
            backend="trtllm-gen",
        )
        return out.squeeze(1)


def _lengths(inputs: SparseInputs) -> torch.Tensor:
    """int32 [rows]: of the requests in decode, which the kernel clips to index_topk, else of the top-k rows."""
    if inputs.cache_seqlens is None:
        return inputs.nsa_cache_seqlens
    return append_rows(inputs.cache_seqlens, inputs.q_nope.shape[0], 0)


def _workspace(device: torch.device) -> torch.Tensor:
    """One for all layers, steps and graphs of a device; flashinfer wants it zero before its first use."""
    if device not in _workspaces:
        _workspaces[device] = torch.zeros(adapter.flashinfer_workspace_bytes(), dtype=torch.uint8, device=device)
    return _workspaces[device]
