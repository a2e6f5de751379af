"""SGLang 0.5.12 and 0.5.12.post1: the backend is called nsa and is told of captures and replays one by one.

SGLang calls a backend before a capture, never inside one, so the metadata launch is recorded when the first layer of the
captured forward asks for its indexer metadata, and that of a draft round at the head of `draft_forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import get_nsa_index_topk as index_topk
from sglang.srt.configs.model_config import is_deepseek_nsa as is_sparse_model
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.nsa.dequant_k_cache import dequantize_k_cache_paged
from sglang.srt.layers.attention.nsa.nsa_indexer import BaseIndexerMetadata
from sglang.srt.layers.attention.utils import concat_mla_absorb_q_general as concat_query
from sglang.srt.layers.attention.utils import mla_quantize_and_rope_for_fp8
from sglang.srt.layers.dp_attention import get_attention_tp_size as attention_tp_size

from nsa_backend.error_notes import noted
from nsa_backend.host.nsa_draft import draft_extend_graph_runner, draft_extend_sizes_in_tokens, take_draft_side
from nsa_backend.host.shared import (
    CHECK,
    FACTORY,
    ForwardBatch,
    ForwardMode,
    HookType,
    Settings,
    Takeover,
    hook,
    register_under,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpecInput

    from nsa_backend.indexer.metadata import IndexerMetadata

__all__ = [
    "BaseIndexerMetadata",
    "attention_tp_size",
    "concat_query",
    "dequantize_k_cache_paged",
    "draft_extend_graph_runner",
    "draft_extend_sizes_in_tokens",
    "index_topk",
    "is_sparse_model",
    "mla_quantize_and_rope_for_fp8",
    "take_draft_side",
]

BACKEND_NAMES = ("nsa",)
DECODE_ATTRIBUTE, PREFILL_ATTRIBUTE = "nsa_decode_backend", "nsa_prefill_backend"
DECODE_OPTION, PREFILL_OPTION = "--nsa-decode-backend", "--nsa-prefill-backend"

TOPK_READS_PAGE_TABLE_1 = True
"""The fused top-k reads a table of one column a token."""

REFUSED_OPTIONS = {
    "enable_nsa_prefill_context_parallel": "--enable-nsa-prefill-context-parallel",
    "enforce_piecewise_cuda_graph": "--enforce-piecewise-cuda-graph",
}
"""Attributes of ServerArgs to options that this generation alone has and that must be off."""

REFUSED_VALUES: dict[str, tuple[str, tuple]] = {}
"""Attributes to the option and the values that are served; nothing more in this generation."""


class BackendEntryPoints(AttentionBackend):
    """What SGLang calls around captures and replays of one model's forwards."""

    @noted
    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
    ) -> None:
        """Prepare a capture. `seq_lens` and `req_pool_indices` are the graph runner's static buffers."""
        extend_lens = spec_info.num_accept_tokens if is_ragged_draft_extend(forward_mode) else None
        self.before_capture(
            forward_mode, bs, num_tokens, seq_lens=seq_lens, req_pool_indices=req_pool_indices, extend_lens=extend_lens
        )

    @noted
    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: SpecInput | None,
        seq_lens_cpu: torch.Tensor | None,
        out_cache_loc: torch.Tensor | None = None,
        actual_forward_mode: ForwardMode | None = None,
    ) -> None:
        """Nothing on the device: the graph writes its own metadata."""
        self.before_replay(forward_mode, bs, seq_lens, req_pool_indices)

    @noted
    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> IndexerMetadata:
        """Called by every layer before it reads any metadata; in a capture, the first layer's call records the launch."""
        if self.captured.is_first_layer(layer_id):
            self.at_graph_head()
        return self.indexer_metadata()

    def get_verify_buffers_to_fill_after_draft(self) -> list[None]:
        """No tree mask and no positions: one chain of drafts needs neither."""
        return [None, None]


class MultiStepEntryPoints:
    """What SGLang calls around captures and replays of a draft round."""

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Prepare a capture; `begin_draft_round` records the launch inside it, on the runner's static tensors."""
        self.before_capture(forward_batch)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch, bs: int) -> None:
        """Nothing on the device: the draft graph writes its own metadata."""
        self.before_replay(bs)


def settings(runner: ModelRunner) -> Settings:
    args = runner.server_args
    return Settings(
        args.nsa_decode_backend,
        args.nsa_prefill_backend,
        args.speculative_num_steps or 0,
        args.speculative_num_draft_tokens or 0,
    )


def resolved(server_args: ServerArgs) -> ServerArgs:
    """Server arguments with every default filled in."""
    return server_args


def served_backends(server_args: ServerArgs) -> tuple[str, str]:
    """Attention backends of (prefill, decode)."""
    return server_args.get_attention_backends()


def model_problem(hf_config: Any, speculative: bool) -> str | None:
    """What a sparse model asks of its backend that this one does not do; nothing in these releases."""
    return None


def environment_problems() -> list[str]:
    """SGLang's environment variables with values that are not served; none in these releases."""
    return []


def schedule_surplus_last(device_sm: int) -> bool:
    """Whether DeepGEMM gives the last SMs one segment more; 0.1.0 gives it to the first."""
    return False


def fuse_topk() -> bool:
    """Whether the indexer's top-k returns KV slots (SGLANG_NSA_FUSE_TOPK=1, the default) or token positions."""
    return envs.SGLANG_NSA_FUSE_TOPK.get()


def topk_v2() -> None:
    """None: these releases do not have SGLang's top-k v2 kernel."""


def fa3_scheduler() -> Callable | None:
    """None: tiles are scheduled in every layer, as these releases do."""
    return None


def dense_prefill_limit() -> int:
    """Longest KV length, in tokens, that prefill still computes densely; SGLang sets it to index_topk."""
    return envs.SGLANG_NSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get()


def in_prefill_graph() -> bool:
    """Prefill is captured in pieces only under --enforce-piecewise-cuda-graph, which is refused."""
    return False


def is_draft_extend(mode: ForwardMode) -> bool:
    return mode.is_draft_extend(include_v2=True)


def is_ragged_draft_extend(mode: ForwardMode) -> bool:
    """Whether requests extend by different numbers of tokens (spec v1)."""
    return mode.is_draft_extend()


def kv_pool(batch: ForwardBatch, backend: AttentionBackend) -> Any:
    """Where the KV of `batch` is."""
    return batch.token_to_kv_pool


def fa3_functions() -> tuple[Callable, Callable]:
    """`(flash_attn_with_kvcache, flash_attn_varlen_func)` of SGLang's FA3."""
    from sglang.jit_kernel.flash_attention import flash_attn_varlen_func, flash_attn_with_kvcache

    return flash_attn_with_kvcache, flash_attn_varlen_func


def flash_mla() -> ModuleType:
    """The module of FlashMLA's functions: `flash_mla_sparse_fwd`, `flash_mla_with_kvcache`, `get_mla_metadata`."""
    import sgl_kernel.flash_mla as module

    return module


FLASH_MLA_DISTRIBUTION = "sglang-kernel"


def take_over(ours: Takeover) -> None:
    """Register everything; raises RuntimeError where SGLang did not take a hook."""
    hook(f"{FACTORY}._create_nsa_decode_backend", ours.create_multi_step_backend, HookType.REPLACE)
    hook(f"{FACTORY}._create_nsa_prefill_backend", ours.create_draft_extend_backend, HookType.REPLACE)
    hook(CHECK, ours.check_server_args, HookType.AROUND)
    register_under(BACKEND_NAMES, ours.create_backend)  # last: nothing is taken over by halves
