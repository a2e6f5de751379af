"""SGLang's own model classes on the CPU, in float32: all but the attention over the KV cache, which is plain attention here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sglang.srt import runtime_context
from sglang.srt.layers.rotary_embedding import base as rotary
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.srt.models.deepseek_v2 import DeepseekV32ForCausalLM
from sglang.srt.models.glm4_moe import GlmMoeDsaForCausalLM, GlmMoeDsaForCausalLMNextN

CLASSES = {
    "DeepseekV32ForCausalLM": (DeepseekV32ForCausalLM, DeepseekV3ForCausalLMNextN),
    "GlmMoeDsaForCausalLM": (GlmMoeDsaForCausalLM, GlmMoeDsaForCausalLMNextN),
}
"""Target and MTP model of an architecture."""


class DenseBackend:
    """Dense attention over the keys and values of this forward: causal, or as `mask`, bool [rows, rows], says."""

    def __init__(self, mask: torch.Tensor | None = None):
        self._mask = mask

    prefill_attention_backend_str = decode_attention_backend_str = "dense"

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None, **options):
        heads, rows = layer.tp_q_head_num, k.shape[0]
        if q_rope is not None:  # absorbed: latent and RoPE parts apart
            q, k = torch.cat([q.view(rows, heads, -1), q_rope], -1), torch.cat([k, k_rope], -1)
        q, k, v = (x.reshape(rows, n, -1).transpose(0, 1)[None] for x, n in ((q, heads), (k, layer.tp_k_head_num),
                                                                           (v, layer.tp_v_head_num)))  # fmt: skip
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
        mask = torch.ones(rows, rows, dtype=torch.bool).tril() if self._mask is None else self._mask
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scaling)
        return out[0].transpose(0, 1).reshape(rows, -1)


@contextlib.contextmanager
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What SGLang's layers ask of a process of one rank, and RoPE that needs no CUDA kernel."""
    context, unset = runtime_context.get_parallel(), {}
    for name in runtime_context._derived_widths():
        if name.endswith("_rank"):
            try:
                getattr(context, name)
            except RuntimeError:
                unset[name] = 0
    monkeypatch.setattr(rotary, "_is_cpu", True)
    with context.override(**unset):
        yield


def forward(
    model,
    ids: torch.Tensor,
    monkeypatch,
    method: AttnForwardMethod,
    hidden: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hidden states after the final norm [tokens, hidden], by SGLang's classes."""
    monkeypatch.setitem(AttentionBackendRegistry._handlers, "dense", lambda attention, batch: method)
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.should_run_indexer = lambda *a, **k: False  # selects nothing
            module._set_mla_kv_buffer = lambda *a, **k: None
    n = len(ids)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=ids, req_pool_indices=torch.zeros(1).long(),
        seq_lens=torch.tensor([n]), out_cache_loc=torch.arange(n), seq_lens_sum=n, positions=torch.arange(n),
        extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[n],
    )  # fmt: skip
    batch.mha_one_shot = False
    batch.spec_info = SimpleNamespace(hidden_states=hidden, dsa_topk_indices=None, dsa_seed_topk_capture=None)
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=DenseBackend(mask))):
        return model.model(ids, torch.arange(n), batch)
