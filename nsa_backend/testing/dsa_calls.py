"""Calls of SGLang 0.5.17 to 0.5.23: one outside a graph, one inside it; backend and options stand in process-wide contexts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from msgspec.structs import force_setattr
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context, get_attn_backend
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from nsa_backend.testing.pool import one_layer

LENGTHS_DTYPE = torch.int64
mla_pool = partial(one_layer, use_dsa=True)


def publish(
    num_steps: int, num_draft_tokens: int, *, decode: str = "torch", prefill: str = "torch", **options: Any
) -> dict[str, Any]:
    """Options are published for the whole process: a dummy model's, which SGLang resolves without a checkpoint or a GPU.

    `options` are others of SGLang's.
    """
    server_args = (
        get_context()
        .override_server_args(
            attention_backend="dsa",
            dsa_decode_backend=decode,
            dsa_prefill_backend=prefill,
            speculative_num_steps=num_steps,
            speculative_num_draft_tokens=num_draft_tokens,
            speculative_eagle_topk=1,
            speculative_attention_mode="prefill",
            **options,
        )
        .install()
    )
    choose(None, decode=decode, prefill=prefill)
    return {"server_args": server_args, "draft_attention_backend": None}


def choose(runner: Any, *, decode: str, prefill: str) -> None:
    """Other implementations for the backends that are built next, as if a user had named them."""
    get_context().override("testing", dsa_decode_backend=decode, dsa_prefill_backend=prefill)
    if hasattr(get_server_args(), "resolve_once"):  # keeps what was typed beside what it resolves, read-only
        force_setattr(get_server_args(), "dsa_decode_backend", decode)
        force_setattr(get_server_args(), "dsa_prefill_backend", prefill)


def builtin() -> tuple[type, type]:
    """SGLang's own (backend, multi-step backend)."""
    from sglang.srt.layers.attention import dsa_backend

    return dsa_backend.DeepseekSparseAttnBackend, dsa_backend.DeepseekSparseAttnMultiStepBackend


def quantize_k_cache() -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """SGLang's quantisation of latent and RoPE parts, as its packed FP8 KV cache has them."""
    try:
        from sglang.kernels.ops.attention.dsa.quant_k_cache import quantize_k_cache_separate
    except ImportError:
        from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate
    return quantize_k_cache_separate


def one_rank() -> contextlib.AbstractContextManager:
    """What SGLang's KV pool asks of decode context parallelism while it writes, in a process without ranks of it."""
    return get_parallel().override(attn_dcp_rank=0, attn_dcp_size=1)


def topk_plan(lengths: torch.Tensor) -> torch.Tensor:
    """SGLang's own plan of its top-k v2 kernel for rows of these lengths, int32 [rows]; int32 [rows + 1, 2]."""
    from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2

    return plan_topk_v2(lengths)


def draft_factory(runner: Any, num_steps: int, **options: bool) -> DraftBackendFactory:
    """Some of these releases give it the server arguments too; `options` are SGLang's own."""
    takes_options = "server_args" in inspect.signature(DraftBackendFactory).parameters
    options |= {"server_args": runner.server_args} if takes_options else {}
    return DraftBackendFactory(**options, draft_model_runner=runner, topk=1, speculative_num_steps=num_steps)


def batch_fields(model: Any) -> dict[str, Any]:
    """A batch knows neither pools nor backend."""
    return {}


def attention_backend(batch: ForwardBatch) -> Any:
    return get_attn_backend()


def running(backend: Any) -> contextlib.AbstractContextManager:
    """What SGLang's model runner puts around every forward."""
    return forward_context(ForwardContext(attn_backend=backend))


def before_capture(backend: Any, batch: ForwardBatch) -> None:
    backend.init_forward_metadata_out_graph(batch, in_capture=True)


def at_graph_head(backend: Any, batch: ForwardBatch) -> None:
    backend.init_forward_metadata_in_graph(batch)


def before_replay(backend: Any, batch: ForwardBatch) -> None:
    replay_call(backend, batch)()


def replay_call(backend: Any, batch: ForwardBatch) -> Callable[[], None]:
    """SGLang hands a view of the static buffers over, no batch."""
    view = SimpleNamespace(
        batch_size=batch.batch_size,
        forward_mode=batch.forward_mode,
        seq_lens=batch.seq_lens,
        req_pool_indices=batch.req_pool_indices,
        spec_info=batch.spec_info,
        **host_lengths(batch.seq_lens),
    )
    return partial(backend.init_forward_metadata_out_graph, view)


def host_lengths(seq_lens: torch.Tensor) -> dict[str, Any]:
    """SGLang may leave the lengths off the host."""
    return {"seq_lens_cpu": None, "seq_lens_sum": None}


def launch_call(backend: Any, batch: ForwardBatch) -> Callable[[], None]:
    return partial(at_graph_head, backend, batch)


def before_round_capture(backend: Any, batch: ForwardBatch) -> None:
    backend.init_forward_metadata_out_graph(batch, in_capture=True)


def at_round_head(backend: Any, batch: ForwardBatch) -> None:
    backend.init_forward_metadata_in_graph(batch)


def before_round_replay(backend: Any, batch: ForwardBatch) -> None:
    """Where nothing was padded, SGLang's batch has the live tensors and not those that the graph reads."""
    live = {"seq_lens": batch.seq_lens.clone(), "req_pool_indices": batch.req_pool_indices.clone(), "seq_lens_cpu": None}
    round_replay_call(backend, SimpleNamespace(**vars(batch) | live))()


def round_replay_call(backend: Any, batch: ForwardBatch) -> Callable[[], None]:
    return partial(backend.init_forward_metadata_out_graph, batch)


def round_launch_call(backend: Any, batch: ForwardBatch) -> Callable[[], None]:
    return partial(at_round_head, backend, batch)


def worker_fields(num_requests: int, num_steps: int) -> dict[str, Any]:
    """The parents and the order of one chain of drafts do not depend on the drafts: SGLang allocates them once."""
    order = torch.arange(num_steps).expand(num_requests, num_steps)
    return {
        "_topk1_parents_prealloc": order - 1,
        "_topk1_score_indices_prealloc": order,
        "index_share_for_mtp_iteration": False,
        "seed_dsa_topk_from_draft_extend": False,
    }


def step_batch(batch: ForwardBatch) -> ForwardBatch:
    """Every draft step goes through SGLang's eager runner, which copies the batch into static buffers of its own.

    `draft_forward` gives a step every N-th location of a request-major vector, and SGLang's KV writer reads locations as if
    they were dense. That copy alone makes them dense: without it, all requests but the first would write to wrong slots.
    """
    return replace(batch, out_cache_loc=batch.out_cache_loc.contiguous())
