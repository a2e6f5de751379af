"""SGLang on a machine without a GPU: just enough of a model runner for the entry points the backend is reached through."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace

import torch


def start_process() -> None:
    """Load SGLang and the plugin; call before anything imports triton or sgl_kernel.

    Triton kernels run through Triton's interpreter. sgl_kernel's CUDA libraries are not loaded (they need libcuda), so that
    the module with SGLang's draft loop can be imported; nothing here calls them.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # SGLang decorates helpers with torch.compile, which would need a C++ compiler
    if not torch.cuda.is_available():
        loader = types.ModuleType("sgl_kernel.load_utils")
        loader._load_architecture_specific_ops = loader._preload_cuda_library = lambda: None
        sys.modules.setdefault("sgl_kernel.load_utils", loader)
    logging.getLogger("sglang").setLevel(logging.ERROR)
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401  (SGLang's draft loop)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    start_single_rank()


def start_single_rank() -> None:
    """SGLang's parallel state for one process, which its attention code asks for group sizes."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized

    from nsa_backend.testing.calls import calls

    if model_parallel_is_initialized():
        return
    calls.publish(1, 2)  # newer releases read group sizes from the published options
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{rendezvous}"
    )
    initialize_model_parallel(backend="gloo")


def make_runner(
    model_shape, req_to_token_pool, kv_pool, *, num_steps: int, num_draft_tokens: int, is_draft_worker: bool
) -> SimpleNamespace:
    """What the backend reads from SGLang's ModelRunner, filled for a model of `model_shape` on the CPU."""
    from nsa_backend.testing.calls import calls

    hf_config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=model_shape.index_topk)
    return SimpleNamespace(
        device="cpu",
        page_size=kv_pool.page_size,
        is_draft_worker=is_draft_worker,
        kv_cache_dtype=torch.float32,
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool=kv_pool,
        model_config=SimpleNamespace(
            hf_config=hf_config,
            hf_text_config=hf_config,
            model_is_mrope=False,
            num_attention_heads=model_shape.heads,
            context_len=req_to_token_pool.req_to_token.shape[1],
            kv_lora_rank=model_shape.latent,
            qk_rope_head_dim=model_shape.rope,
            qk_nope_head_dim=model_shape.latent,
        ),
        **calls.publish(num_steps, num_draft_tokens),
    )
