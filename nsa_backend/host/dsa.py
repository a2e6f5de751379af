"""SGLang 0.5.17 to 0.5.23: the backend is called dsa (nsa still works) and prepares metadata inside the captured graph.

SGLang calls `init_forward_metadata_out_graph` before a capture and before every replay, and `init_forward_metadata_in_graph`
at the head of what it captures, once a forward or draft round: that is where the metadata launch belongs.

Names that moved between these releases are looked for where each has them; behaviour that changed is told by what the
installed source offers, never by comparing versions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.model_config import get_dsa_index_topk as index_topk
from sglang.srt.configs.model_config import is_deepseek_dsa as is_sparse_model
from sglang.srt.environ import envs
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import BaseIndexerMetadata
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.server_args import ServerArgs

from nsa_backend.error_notes import noted
from nsa_backend.host.dsa_kernels import (
    FLASH_MLA_DISTRIBUTION,
    TOPK_READS_PAGE_TABLE_1,
    concat_query,
    dequantize_k_cache_paged,
    fa3_functions,
    fa3_scheduler,
    flash_mla,
    mla_quantize_and_rope_for_fp8,
    topk_v2,
)
from nsa_backend.host.dsa_refusals import REFUSED_OPTIONS, REFUSED_VALUES, environment_problems, model_problem
from nsa_backend.host.shared import (
    CHECK,
    FACTORY,
    ForwardBatch,
    ForwardMode,
    HookType,
    Settings,
    Takeover,
    batch_sizes_chosen_with,
    count_draft_extend_in_tokens,
    hook,
    register_under,
)
from nsa_backend.old_options import ADD_OPTIONS, add_aliases

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from nsa_backend.indexer.metadata import IndexerMetadata

__all__ = [
    "FLASH_MLA_DISTRIBUTION",
    "REFUSED_OPTIONS",
    "REFUSED_VALUES",
    "TOPK_READS_PAGE_TABLE_1",
    "BaseIndexerMetadata",
    "concat_query",
    "dequantize_k_cache_paged",
    "environment_problems",
    "fa3_functions",
    "fa3_scheduler",
    "flash_mla",
    "index_topk",
    "is_sparse_model",
    "mla_quantize_and_rope_for_fp8",
    "model_problem",
    "topk_v2",
]

BACKEND_NAMES = ("dsa", "nsa")
DECODE_ATTRIBUTE, PREFILL_ATTRIBUTE = "dsa_decode_backend", "dsa_prefill_backend"
DECODE_OPTION, PREFILL_OPTION = "--dsa-decode-backend", "--dsa-prefill-backend"


class BackendEntryPoints(AttentionBackend):
    """What SGLang calls around captures and replays of one model's forwards."""

    needs_cpu_seq_lens = False
    """Replays read lengths on the GPU alone; an eager forward that has none on the host waits for the longest."""

    extend_dummy_seqs_capped_by_req_pool = True
    """A dummy prefill batch may not have more requests than the request pool has rows: page tables come from there."""

    @noted
    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Choose what a capture fills, or what a replay reads. Nothing on the device."""
        bs, mode = forward_batch.batch_size, forward_batch.forward_mode
        if not in_capture:
            # The draft-extend runner hands over its whole static buffers, which begin where the captured views did.
            self.before_replay(mode, bs, forward_batch.seq_lens, forward_batch.req_pool_indices)
            return
        self.before_capture(
            mode,
            bs,
            forward_batch.positions.shape[0],
            seq_lens=forward_batch.seq_lens[:bs],
            req_pool_indices=forward_batch.req_pool_indices[:bs],
            extend_lens=None,
        )

    @noted
    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """The metadata launch, recorded in the graph; SGLang warms the captured forward up with it too."""
        self.at_graph_head()

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """Yes: a draft-extend replay needs no preparation on the host."""
        return True

    @noted
    def get_indexer_metadata(self, layer_id: int, forward_batch: ForwardBatch) -> IndexerMetadata:
        """What the indexer of a layer reads."""
        return self.indexer_metadata()


class MultiStepEntryPoints:
    """What SGLang calls around captures and replays of a draft round."""

    needs_cpu_seq_lens = False

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Choose what a capture fills, or check a replay, whose graph reads static tensors and not those of `forward_batch`."""
        if in_capture:
            self.before_capture(forward_batch)
        else:
            self.before_replay(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """The one launch for all steps, at the head of the captured round."""
        self.at_graph_head()


def settings(runner: ModelRunner) -> Settings:
    """Options as SGLang resolved and published them in this process; `runner.server_args` may hold what was typed alone."""
    kernel, spec = get_exec().kernel, get_spec()
    return Settings(
        kernel.dsa_decode_backend,
        kernel.dsa_prefill_backend,
        spec.speculative_num_steps or 0,
        spec.speculative_num_draft_tokens or 0,
    )


def resolved(server_args: ServerArgs) -> Any:
    """Server arguments with every default filled in, before they are published."""
    if not hasattr(server_args, "resolve_once"):
        return server_args
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def served_backends(server_args: ServerArgs) -> tuple[str, str]:
    """Attention backends of (prefill, decode)."""
    args = resolved(server_args)
    return args.prefill_attention_backend or args.attention_backend, args.decode_attention_backend or args.attention_backend


def schedule_surplus_last(device_sm: int) -> bool:
    """Whether DeepGEMM gives the last SMs one segment more: from 0.1.5 on it does on Hopper, and not on Blackwell."""
    return device_sm // 10 == 9


def attention_tp_size() -> int:
    return get_parallel().attn_tp_size


def fuse_topk() -> bool:
    """Whether the indexer's top-k returns KV slots (SGLANG_DSA_FUSE_TOPK=1, the default) or token positions."""
    return envs.SGLANG_DSA_FUSE_TOPK.get()


def dense_prefill_limit() -> int:
    """Longest KV length, in tokens, that prefill still computes densely; SGLang sets it to index_topk."""
    return envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get()


def in_prefill_graph() -> bool:
    """Whether a prefill graph is being captured or replayed: its model forward is fixed to sparse attention.

    SGLang captures prefill in pieces by default, with attention and the indexer eager between them.
    """
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph

    return is_in_breakable_cuda_graph() or is_in_tc_piecewise_cuda_graph()


def is_draft_extend(mode: ForwardMode) -> bool:
    return mode.is_draft_extend_v2()


def is_ragged_draft_extend(mode: ForwardMode) -> bool:
    """Requests always extend by D tokens: spec v1 is gone."""
    return False


def kv_pool(batch: ForwardBatch, backend: AttentionBackend) -> Any:
    """Where the KV of `batch` is: a batch no longer knows, its backend does."""
    return backend.token_to_kv_pool


def take_over(ours: Takeover) -> None:
    """Register everything; raises RuntimeError where SGLang did not take a hook."""
    stamped = _factory_returns_a_name()

    def built(create: Callable) -> Callable:
        return (lambda factory: ("dsa", create(factory))) if stamped else create

    hook(f"{FACTORY}._create_dsa_decode_backend", built(ours.create_multi_step_backend), HookType.REPLACE)
    hook(f"{FACTORY}._create_dsa_prefill_backend", built(ours.create_draft_extend_backend), HookType.REPLACE)
    hook(CHECK, ours.check_server_args, HookType.AROUND)
    hook(ADD_OPTIONS, add_aliases, HookType.AROUND)
    register_under(BACKEND_NAMES, ours.create_backend)  # last: nothing is taken over by halves


def _factory_returns_a_name() -> bool:
    """Whether the draft factory's methods return (backend name, backend), which began with the stamping of backends."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    return "stamps_children" in inspect.signature(DraftBackendFactory._create_backend).parameters


def take_draft_side(ours: Takeover) -> None:
    """Count the draft-extend runner's sizes in tokens, and pass SGLang's isinstance checks of its own backend.

    The draft worker captures draft-extend for the backends that it names by class. Being a virtual subclass opens that check
    and every other one alike. Not done when the plugin loads: the class's module imports sgl_kernel, which needs libcuda.
    """
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    count_draft_extend_in_tokens(ours, draft_extend_sizes_in_tokens)
    DeepseekSparseAttnBackend.register(ours.backend_class)


def draft_extend_sizes_in_tokens(tokens_per_request: int) -> contextlib.AbstractContextManager[None]:
    """While a draft-extend graph runner is built, its batch sizes count tokens."""
    return batch_sizes_chosen_with(captured_req_width=tokens_per_request)
