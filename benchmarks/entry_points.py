"""How SGLang calls a backend around a captured graph, ours and its own alike, in the installed generation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from nsa_backend.adapters import sglang
from nsa_backend.adapters.installed import adapter
from nsa_backend.testing.calls import calls

IN_GRAPH = "dsa" in adapter.BACKEND_NAMES
"""Whether SGLang asks for metadata inside the graph."""


def builtin() -> tuple[type, type]:
    """SGLang's own (backend, multi-step backend)."""
    if IN_GRAPH:
        from sglang.srt.layers.attention import dsa_backend as module

        return module.DeepseekSparseAttnBackend, module.DeepseekSparseAttnMultiStepBackend
    from sglang.srt.layers.attention import nsa_backend as module

    return module.NativeSparseAttnBackend, module.NativeSparseAttnMultiStepBackend


def modes() -> dict[str, Any]:
    """SGLang's captured forward modes, by the names used here."""
    found = {"decode": "DECODE", "target_verify": "TARGET_VERIFY"}
    found["draft_extend"] = "DRAFT_EXTEND_V2" if IN_GRAPH else "DRAFT_EXTEND"
    return {name: sglang.ForwardMode[mode] for name, mode in found.items()}


def static_batch(seq_lens: torch.Tensor, req_pool_indices: torch.Tensor, num_steps: int) -> SimpleNamespace:
    """A graph runner's tensors for `seq_lens` of any integer dtype; every request accepted `num_steps` tokens."""
    bs = seq_lens.shape[0]
    return SimpleNamespace(
        batch_size=bs,
        seq_lens=seq_lens.to(calls.LENGTHS_DTYPE),
        seq_lens_cpu=None if IN_GRAPH else seq_lens.cpu().to(torch.int32),
        seq_lens_sum=None if IN_GRAPH else int(seq_lens.sum()),
        req_pool_indices=req_pool_indices,
        spec_info=SimpleNamespace(num_accept_tokens=torch.full((bs,), num_steps, dtype=torch.int32, device=seq_lens.device)),
        forward_mode=sglang.ForwardMode.DECODE,
    )


class Captured:
    """One mode of one backend for one batch size: `replay` is called before the graph, `in_graph` is what the graph holds."""

    def __init__(self, backend: Any, batch: SimpleNamespace, mode: Any, rows: int):
        """Calls what SGLang calls before a capture; `init_cuda_graph_state` was called before."""
        bs = batch.batch_size
        if IN_GRAPH:
            view = SimpleNamespace(**vars(batch) | {"forward_mode": mode})
            view.positions = torch.zeros(rows, dtype=torch.int64, device=batch.seq_lens.device)
            backend.init_forward_metadata_out_graph(view, in_capture=True)
            self.replay: Callable[[], None] = lambda: backend.init_forward_metadata_out_graph(view)
            self.in_graph: Callable[[], None] = lambda: backend.init_forward_metadata_in_graph(view)
        else:
            read = (batch.req_pool_indices, batch.seq_lens)
            backend.init_forward_metadata_capture_cuda_graph(bs, rows, *read, None, mode, batch.spec_info)
            self.replay = lambda: backend.init_forward_metadata_replay_cuda_graph(
                bs, *read, 0, None, mode, batch.spec_info, batch.seq_lens_cpu
            )
            self.in_graph = lambda: backend.get_indexer_metadata(0, None)


class CapturedRound:
    """The same of a draft round."""

    def __init__(self, multi_step: Any, batch: SimpleNamespace):
        if IN_GRAPH:
            multi_step.init_forward_metadata_out_graph(batch, in_capture=True)
            self.replay: Callable[[], None] = lambda: multi_step.init_forward_metadata_out_graph(batch)
            self.in_graph: Callable[[], None] = lambda: multi_step.init_forward_metadata_in_graph(batch)
        else:
            multi_step.init_forward_metadata_capture_cuda_graph(batch)
            self.replay = lambda: multi_step.init_forward_metadata_replay_cuda_graph(batch, batch.batch_size)
            self.in_graph = multi_step.at_graph_head


def server_args(num_steps: int, num_draft_tokens: int) -> Any:
    """What a fake runner carries as its ServerArgs, published where the generation reads options from its context."""
    speculative = {"speculative_num_steps": num_steps, "speculative_num_draft_tokens": num_draft_tokens}
    speculative["speculative_eagle_topk"] = 1
    if not IN_GRAPH:
        return SimpleNamespace(
            nsa_decode_backend="fa3",
            nsa_prefill_backend="flashmla_sparse",
            enable_deterministic_inference=False,  # the built-in backend reads it
            **speculative,
        )
    from sglang.srt.runtime_context import get_context

    chosen = {"attention_backend": "dsa", "dsa_decode_backend": "fa3", "dsa_prefill_backend": "flashmla_sparse"}
    return get_context().override_server_args(**chosen, **speculative).install()


def use(runner: Any, *, decode: str, prefill: str) -> None:
    """Choose implementations on a fake runner."""
    if not IN_GRAPH:
        runner.server_args.nsa_decode_backend, runner.server_args.nsa_prefill_backend = decode, prefill
        return
    from sglang.srt.runtime_context import get_context

    get_context().override("benchmark", dsa_decode_backend=decode, dsa_prefill_backend=prefill)


def fp8_packing() -> tuple[Callable, Callable]:
    """(quantise latent and RoPE parts separately, dequantise slots) of SGLang's packed FP8 KV cache."""
    if not IN_GRAPH:
        from sglang.srt.layers.attention.nsa.quant_k_cache import quantize_k_cache_separate
    else:
        try:
            from sglang.kernels.ops.attention.dsa.quant_k_cache import quantize_k_cache_separate
        except ImportError:
            from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate
    return quantize_k_cache_separate, adapter.dequantize_k_cache_paged
