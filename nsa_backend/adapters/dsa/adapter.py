"""SGLang 0.5.17 to 0.5.23: the backend is called dsa (nsa still works) and prepares metadata inside the captured graph.

SGLang calls `init_forward_metadata_out_graph` before a capture and before every replay, and `init_forward_metadata_in_graph`
at the head of what it captures, once a forward or draft round: that is where the metadata launch belongs.

Names that moved between these releases are looked for where each has them; behaviour that changed is told by what the
installed source offers, never by comparing versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import get_dsa_index_topk, is_deepseek_dsa
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_indexer_metadata import BaseIndexerMetadata
from sglang.srt.runtime_context import get_exec, get_parallel, get_server_args, get_spec
from sglang.srt.server_args import ServerArgs

from nsa_backend.adapters import (
    alike_ranks,
    decode_context_parallel,
    divided_indexer,
    naive_eagle,
    prefill_context_parallel,
    replicated_query,
    resumed_memory,
    retraction,
)
from nsa_backend.adapters.contract import Adapter
from nsa_backend.adapters.dsa import draft, entry_points, kernels, refusals
from nsa_backend.adapters.dsa.layer_front import options as layer_front
from nsa_backend.adapters.dsa.layer_front import prefill_rules, short
from nsa_backend.adapters.dsa.rounds import served, warm_up
from nsa_backend.adapters.options import ADD_OPTIONS, add_options
from nsa_backend.adapters.sglang_types import AttentionBackend, DraftBackendFactory, ForwardBatch, ForwardMode, HookType
from nsa_backend.adapters.shared import CHECK, FACTORY, Settings, Takeover, hook, register_under

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class DsaAdapter(Adapter):
    """SGLang 0.5.17 to 0.5.23, part by part."""

    BACKEND_NAMES = ("dsa", "nsa")
    DECODE_ATTRIBUTE, PREFILL_ATTRIBUTE = "dsa_decode_backend", "dsa_prefill_backend"
    DECODE_OPTION, PREFILL_OPTION = "--dsa-decode-backend", "--dsa-prefill-backend"

    BackendEntryPoints = entry_points.BackendEntryPoints
    MultiStepEntryPoints = entry_points.MultiStepEntryPoints
    BaseIndexerMetadata = BaseIndexerMetadata
    TOPK_READS_PAGE_TABLE_1 = kernels.TOPK_READS_PAGE_TABLE_1
    FLASH_MLA_DISTRIBUTION = kernels.FLASH_MLA_DISTRIBUTION
    REFUSED = refusals.REFUSED

    concat_query = staticmethod(kernels.concat_query)
    dequantize_k_cache_paged = staticmethod(kernels.dequantize_k_cache_paged)
    fa3_functions = staticmethod(kernels.fa3_functions)
    fa3_scheduler = staticmethod(kernels.fa3_scheduler)
    flash_mla = staticmethod(kernels.flash_mla)
    mla_quantize_and_rope_for_fp8 = staticmethod(kernels.mla_quantize_and_rope_for_fp8)
    topk_v2 = staticmethod(kernels.topk_v2)
    index_topk = staticmethod(get_dsa_index_topk)
    is_sparse_model = staticmethod(is_deepseek_dsa)
    environment_problems = staticmethod(refusals.environment_problems)
    model_problem = staticmethod(refusals.model_problem)
    draft_extend_sizes_in_tokens = staticmethod(draft.draft_extend_sizes_in_tokens)
    take_draft_side = staticmethod(draft.take_draft_side)
    combination_problems = staticmethod(refusals.combination_problems)
    rows_of_rank = staticmethod(prefill_context_parallel.rows_of_rank)
    front_problems = staticmethod(layer_front.server_problems)
    short_problems = staticmethod(short.short_problems)
    prefill_problems = staticmethod(prefill_rules.prefill_problems)
    divided_problems = staticmethod(divided_indexer.divided_problems)
    round_problems = staticmethod(served.server_problems)

    def settings(self, runner: ModelRunner) -> Settings:
        """Options as SGLang resolved and published them in this process; `runner.server_args` may hold what was typed alone."""
        kernel, overlap, spec = get_exec().kernel, get_exec().overlap, get_spec()
        return Settings(
            kernel.dsa_decode_backend,
            kernel.dsa_prefill_backend,
            spec.speculative_num_steps or 0,
            spec.speculative_num_draft_tokens or 0,
            overlap.enable_two_batch_overlap,
            get_parallel().attn_cp_size > 1,
            *decode_context_parallel.rank_of_context(),
            get_server_args().disaggregation_mode != "null",
            *self.named_by_user(get_server_args()),
        )

    def named_by_user(self, server_args: ServerArgs) -> tuple[bool, bool]:
        """Newer releases keep what was typed beside what they resolve; older ones fill their default in."""
        decode, prefill = (
            not hasattr(server_args, "resolve_once") or getattr(server_args, name) is not None
            for name in (self.DECODE_ATTRIBUTE, self.PREFILL_ATTRIBUTE)
        )
        return decode, prefill

    def resolved(self, server_args: ServerArgs) -> Any:
        """Server arguments with every default filled in, before they are published."""
        if not hasattr(server_args, "resolve_once"):
            return server_args
        from sglang.srt.arg_groups.overrides import resolved_view

        return resolved_view(server_args)

    def served_backends(self, server_args: ServerArgs) -> tuple[str, str]:
        """Attention backends of (prefill, decode)."""
        args = self.resolved(server_args)
        return args.prefill_attention_backend or args.attention_backend, args.decode_attention_backend or args.attention_backend

    def schedule_surplus_last(self, device_sm: int) -> bool:
        """Whether DeepGEMM gives the last SMs one segment more: from 0.1.5 on it does on Hopper, and not on Blackwell."""
        return device_sm // 10 == 9

    def pairs_logits(self) -> bool:
        """Its indexer does by what metadata answers: `paged_mqa_ctx_lens_2d` of as many rows as `get_seqlens_int32`."""
        from sglang.srt.layers.attention.dsa import dsa_indexer

        by_torch = getattr(envs, "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", None)
        return hasattr(dsa_indexer, "deepgemm_paged_mqa_logits_native") and not (by_torch is not None and by_torch.get())

    def score_at_once(self, device_sm: int) -> None:
        """Only Blackwell's kernel takes no more rows than there are SMs."""
        from nsa_backend.adapters import index_scores

        if device_sm // 10 == 9 and index_scores.makes_pieces():
            index_scores.score_at_once()

    def divide_indexer(self, device_sm: int) -> None:
        """On Hopper by default, where that was measured."""
        if divided_indexer.wanted(self.resolved(get_server_args()), device_sm):
            divided_indexer.divide()

    def take_moe_configs(self) -> None:
        from nsa_backend.adapters import moe_configs

        moe_configs.take()

    def attention_tp_size(self) -> int:
        return get_parallel().attn_tp_size

    def fuse_topk(self, shares_selections: bool) -> bool:
        """Whether the indexer's top-k returns KV slots (SGLANG_DSA_FUSE_TOPK=1, the default) or token positions.

        Under PD disaggregation shared selections travel as positions; which side turns them into slots is SGLang's rule.
        """
        from sglang.srt.layers.attention.dsa.utils import should_use_dsa_fused_topk as rule

        options = (get_server_args(),) if "server_args" in inspect.signature(rule).parameters else ()
        return rule(*options, shares_selections)

    def shares_selections(self, factory: DraftBackendFactory) -> bool:
        """For models with index_share_for_mtp_iteration."""
        return factory.seed_dsa_topk_from_draft_extend

    def dense_prefill_limit(self) -> int:
        """Longest KV length, in tokens, that prefill still computes densely; SGLang sets it to index_topk."""
        return envs.SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get()

    def in_prefill_graph(self) -> bool:
        """Whether a prefill graph is being captured or replayed: its model forward is fixed to sparse attention.

        SGLang captures prefill in pieces by default, with attention and the indexer eager between them.
        """
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph
        from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import is_in_tc_piecewise_cuda_graph

        return is_in_breakable_cuda_graph() or is_in_tc_piecewise_cuda_graph()

    def is_draft_extend(self, mode: ForwardMode) -> bool:
        return mode.is_draft_extend_v2()

    def is_ragged_draft_extend(self, mode: ForwardMode) -> bool:
        """Requests always extend by D tokens: spec v1 is gone."""
        return False

    def attention_output(self, batch: ForwardBatch) -> torch.Tensor | None:
        """In a prefill that is captured in pieces, and in one that is padded."""
        return getattr(batch, "_attn_output", None) if takes_output_back() else None

    def kv_pool(self, batch: ForwardBatch, backend: AttentionBackend) -> Any:
        """Where the KV of `batch` is: a batch no longer knows, its backend does."""
        return backend.token_to_kv_pool

    def clear_padding_on_resume(self, pool: Any) -> None:
        """On servers that can release memory (--enable-memory-saver)."""
        if get_server_args().enable_memory_saver:
            resumed_memory.clear_padding_on_resume(pool)

    def keep_draft_kv(self, draft_runner: ModelRunner) -> None:
        """On a decode server of PD disaggregation, which copies the KV of retracted requests to the host."""
        if get_server_args().disaggregation_mode == "decode":
            retraction.keep_draft_kv(draft_runner.token_to_kv_pool_allocator, draft_runner.token_to_kv_pool)

    def serves_here(self) -> bool:
        """Whether the server of this process has this backend for prefill or decode."""
        return not set(self.BACKEND_NAMES).isdisjoint(self.served_backends(get_server_args()))

    def take_over(self, ours: Takeover) -> None:
        """Register everything; raises RuntimeError where SGLang did not take a hook."""
        stamped = self.factory_returns_a_name()

        def built(create: Callable) -> Callable:
            return (lambda factory: ("dsa", create(factory))) if stamped else create

        hook(f"{FACTORY}._create_dsa_decode_backend", built(ours.create_multi_step_backend), HookType.REPLACE)
        hook(f"{FACTORY}._create_dsa_prefill_backend", built(ours.create_draft_extend_backend), HookType.REPLACE)
        hook(CHECK, ours.check_server_args, HookType.AROUND)
        hook(naive_eagle.FROM_ARGUMENTS, naive_eagle.from_arguments, HookType.AROUND)
        hook(ADD_OPTIONS, add_options, HookType.AROUND)
        hook(alike_ranks.MEET, partial(alike_ranks.meet, self.serves_here), HookType.AROUND)
        decode_context_parallel.take_defaults(self.BACKEND_NAMES)
        register_under(self.BACKEND_NAMES, ours.create_backend)  # last: nothing is taken over by halves

    def take_rounds(self, ours: Takeover) -> None:
        """Let the servers that this package serves run their speculative rounds in one graph, where their options allow it."""

        def has_rounds(server_args: ServerArgs) -> bool:
            return served.has_rounds(self.resolved(server_args), self.served_backends(server_args), self.BACKEND_NAMES)

        draft.take_rounds(ours, has_rounds)

    def take_layer_fronts(self, runner: ModelRunner, backends: tuple[type, ...], demanded: bool) -> None:
        from nsa_backend.adapters.dsa.layer_front.take import take_layer_fronts

        args, of_target = self.resolved(get_server_args()), not runner.is_draft_worker
        _, prefill_named = self.named_by_user(get_server_args())
        pool = runner.token_to_kv_pool
        take_layer_fronts(runner.model, pool, args, backends, demanded, of_target, prefill_named=prefill_named)

    def take_context_parts(self, runner: ModelRunner) -> None:
        if decode_context_parallel.rank_of_context()[0] > 1:
            decode_context_parallel.take_context_parts(runner.model)
            if get_parallel().dcp_replicate_q_proj:
                replicated_query.renew_after_updates()

    def offer_warm_up(self) -> None:
        """Imports SGLang's module of warm-ups, which is heavy."""
        warm_up.offer()

    def factory_returns_a_name(self) -> bool:
        """Whether the draft factory's methods return (backend name, backend), which began with the stamping of backends."""
        from sglang.srt.speculative.draft_utils import DraftBackendFactory

        return "stamps_children" in inspect.signature(DraftBackendFactory._create_backend).parameters


@cache
def takes_output_back() -> bool:
    """Whether a batch says where a layer's attention belongs while that runs alone: older releases leave the last one there."""
    if find_spec("sglang.srt.layers.attention.graph_utils") is None:
        return False
    from sglang.srt.layers.attention import graph_utils

    return hasattr(graph_utils, "attention_input_scope")
