"""A model runner of DeepSeek-V3.2's shape on one H200, without a model: what the backends read from SGLang's."""

from types import SimpleNamespace

import pytest

INDEX_TOPK, CONTEXT, MAX_BS = 2048, 163_840, 64


@pytest.fixture(scope="session")
def single_rank() -> None:
    from sglang.srt.plugins import load_plugins

    from nsa_backend.demo.cpu_host import start_single_rank

    load_plugins()
    start_single_rank()


@pytest.fixture
def make_runner(single_rank):
    """Returns a function of (num_steps, heads, context, **server_args) that builds the runner."""
    import torch

    def build(num_steps: int = 3, heads: int = 64, context: int = CONTEXT, slots: int = 1 << 16, **server_args):
        width = context + 4 + num_steps + 1
        pool = SimpleNamespace(
            req_to_token=torch.zeros(MAX_BS * 2 + 1, width, dtype=torch.int32, device="cuda"), size=MAX_BS * 2
        )
        kv_pool = SimpleNamespace(
            dtype=torch.bfloat16, page_size=64, size=slots, nsa_kv_cache_store_fp8=False, kv_cache_dim=576, start_layer=0
        )
        arguments = {
            "nsa_decode_backend": "fa3",
            "nsa_prefill_backend": "flashmla_sparse",
            "enable_deterministic_inference": False,
            "speculative_num_steps": num_steps,
            "speculative_num_draft_tokens": num_steps + 1,
            "speculative_eagle_topk": 1,
        }
        return SimpleNamespace(
            device="cuda",
            page_size=64,
            is_draft_worker=True,
            kv_cache_dtype=torch.bfloat16,
            req_to_token_pool=pool,
            token_to_kv_pool=kv_pool,
            model_config=SimpleNamespace(
                hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=INDEX_TOPK),
                num_attention_heads=heads,
                context_len=context,
                qk_nope_head_dim=128,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
            ),
            server_args=SimpleNamespace(**arguments | server_args),
        )

    return build
