"""What the backend, ours and SGLang's own, reads from SGLang's ModelRunner, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.testing.calls import calls
from nsa_backend.testing.shape import QK_DIM, AttentionShape


def make_runner(
    shape: AttentionShape, req_to_token_pool: Any, kv_pool: Any, *, num_steps: int, num_draft_tokens: int,
    is_draft_worker: bool, context: int | None = None, device: str = "cpu", decode: str = "torch", prefill: str = "torch",
) -> SimpleNamespace:  # fmt: skip
    """A runner of a model of `shape` whose tokens lie in the pools; its options are published for the whole process.

    Args:
        shape: of the model's attention.
        req_to_token_pool: has `req_to_token`, int32 [rows, width].
        kv_pool: has `page_size`, `dtype` and `size` in tokens.
        num_steps: N.
        num_draft_tokens: D.
        is_draft_worker: whether it runs the draft model.
        context: longest request; the width of the request table where None.
        device: of the backend's tensors.
        decode: implementation of decode.
        prefill: implementation of prefill.
    """
    hf_config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=shape.index_topk)
    return SimpleNamespace(
        device=device,
        page_size=kv_pool.page_size,
        is_draft_worker=is_draft_worker,
        model=torch.nn.Module(),
        kv_cache_dtype=kv_pool.dtype,
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool=kv_pool,
        model_config=SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=hf_config,
            model_is_mrope=False,
            num_attention_heads=shape.heads,
            context_len=req_to_token_pool.req_to_token.shape[1] if context is None else context,
            kv_lora_rank=shape.latent,
            qk_rope_head_dim=shape.rope,
            qk_nope_head_dim=shape.nope,
        ),
        hisparse_coordinator=None,
        max_running_requests=req_to_token_pool.size,
        **calls.publish(num_steps, num_draft_tokens, decode=decode, prefill=prefill),
    )


def make_gpu_runner(
    *, num_steps: int, context: int, max_requests: int = 128, heads: int = 64, num_draft_tokens: int | None = None
) -> SimpleNamespace:
    """A draft worker's runner in DeepSeek-V3.2's shape on the GPU, over a request table of zeros and a bfloat16 KV pool
    that has no memory."""
    width = context + 4 + num_steps + 1
    slots = torch.zeros(max_requests + 1, width, dtype=torch.int32, device="cuda")
    kv_pool = SimpleNamespace(
        dtype=torch.bfloat16,
        page_size=PAGE_SIZE,
        size=2**20 - PAGE_SIZE,
        kv_cache_dim=QK_DIM,
        start_layer=0,
        nsa_kv_cache_store_fp8=False,
        dsa_kv_cache_store_fp8=False,
    )
    return make_runner(
        AttentionShape(heads), SimpleNamespace(req_to_token=slots, size=max_requests), kv_pool, num_steps=num_steps,
        num_draft_tokens=num_draft_tokens or num_steps + 1, is_draft_worker=True, context=context, device="cuda",
        decode="fa3", prefill="flashmla_sparse",
    )  # fmt: skip
