"""Calls of SGLang 0.5.12 and 0.5.12.post1: captures and replays are announced one by one, batches carry pools and backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from nsa_backend.testing.pool import one_layer

LENGTHS_DTYPE = torch.int32
mla_pool = partial(one_layer, use_nsa=True)


def publish(num_steps: int, num_draft_tokens: int, *, decode: str = "torch", prefill: str = "torch") -> dict[str, Any]:
    """Options stand in the server arguments that every model runner has."""
    return {
        "server_args": SimpleNamespace(
            nsa_decode_backend=decode,
            nsa_prefill_backend=prefill,
            speculative_num_steps=num_steps,
            speculative_num_draft_tokens=num_draft_tokens,
            speculative_eagle_topk=1,
            speculative_draft_attention_backend=None,
            speculative_attention_mode="prefill",
            decode_attention_backend=None,
            prefill_attention_backend=None,
            attention_backend="nsa",
            enable_deterministic_inference=False,  # the built-in backend reads it
        )
    }


def choose(runner: Any, *, decode: str, prefill: str) -> None:
    """Other implementations for the backends that `runner` builds next."""
    runner.server_args.nsa_decode_backend, runner.server_args.nsa_prefill_backend = decode, prefill


def builtin() -> tuple[type, type]:
    """SGLang's own (backend, multi-step backend)."""
    from sglang.srt.layers.attention import nsa_backend

    return nsa_backend.NativeSparseAttnBackend, nsa_backend.NativeSparseAttnMultiStepBackend


def one_rank() -> contextlib.AbstractContextManager:
    """Nothing: these releases have no decode context parallelism."""
    return contextlib.nullcontext()


def quantize_k_cache() -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """SGLang's quantisation of latent and RoPE parts, as its packed FP8 KV cache has them."""
    from sglang.srt.layers.attention.nsa.quant_k_cache import quantize_k_cache_separate

    return quantize_k_cache_separate


def draft_factory(runner: Any, num_steps: int) -> DraftBackendFactory:
    return DraftBackendFactory(runner.server_args, runner, 1, num_steps)


def batch_fields(model: Any) -> dict[str, Any]:
    """A batch says where its KV is and which backend it runs on."""
    runner = model.runner
    return {
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool": runner.token_to_kv_pool,
        "attn_backend": model.backend,
    }


def attention_backend(batch: ForwardBatch) -> Any:
    return batch.attn_backend


def running(backend: Any) -> contextlib.AbstractContextManager:
    """Nothing to set: the batch knows its backend."""
    return contextlib.nullcontext()


def before_capture(backend: Any, batch: ForwardBatch) -> None:
    backend.init_forward_metadata_capture_cuda_graph(
        batch.batch_size,
        len(batch.positions),
        batch.req_pool_indices,
        batch.seq_lens,
        None,
        batch.forward_mode,
        batch.spec_info,
    )


def at_graph_head(backend: Any, batch: ForwardBatch) -> None:
    """SGLang calls nothing inside a graph; the first layer that asks for its metadata launches them."""


def before_replay(backend: Any, batch: ForwardBatch) -> None:
    replay_call(backend, batch)()


def replay_call(backend: Any, batch: ForwardBatch) -> Callable[[], None]:
    """On the CPU the static lengths are those on the host too."""
    on_host = batch.seq_lens if batch.seq_lens.device.type == "cpu" else batch.seq_lens_cpu
    return partial(
        backend.init_forward_metadata_replay_cuda_graph,
        batch.batch_size, batch.req_pool_indices, batch.seq_lens, 0, None, batch.forward_mode, batch.spec_info, on_host,
    )  # fmt: skip


def host_lengths(seq_lens: torch.Tensor) -> dict[str, Any]:
    """SGLang keeps the lengths on the host too, and their sum."""
    return {"seq_lens_cpu": seq_lens.cpu().to(torch.int32), "seq_lens_sum": int(seq_lens.sum())}


def launch_call(backend: Any, batch: ForwardBatch) -> Callable[[], None]:
    return partial(backend.get_indexer_metadata, 0, None)


def before_round_capture(backend: Any, batch: ForwardBatch) -> None:
    backend.init_forward_metadata_capture_cuda_graph(batch)


def at_round_head(backend: Any, batch: ForwardBatch) -> None:
    """The plugin's hook of `draft_forward` launches the metadata of the round."""


def before_round_replay(backend: Any, batch: ForwardBatch) -> None:
    round_replay_call(backend, batch)()


def round_replay_call(backend: Any, batch: ForwardBatch) -> Callable[[], None]:
    return partial(backend.init_forward_metadata_replay_cuda_graph, batch, batch.batch_size)


def round_launch_call(backend: Any, batch: ForwardBatch) -> Callable[[], None]:
    """Without the copy that makes the draft locations dense, which the plugin's hook makes too."""
    return lambda: backend.at_graph_head()


def worker_fields(num_requests: int, num_steps: int) -> dict[str, Any]:
    return {}


def step_batch(batch: ForwardBatch) -> ForwardBatch:
    """The model gets the batch that `draft_forward` has written to."""
    return batch
