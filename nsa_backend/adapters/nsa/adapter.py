"""SGLang 0.5.12 and 0.5.12.post1: the backend is called nsa and is told of captures and replays one by one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.model_config import get_nsa_index_topk, is_deepseek_nsa
from sglang.srt.environ import envs
from sglang.srt.layers.attention.nsa.nsa_indexer import BaseIndexerMetadata
from sglang.srt.layers.dp_attention import get_attention_tp_size
from sglang.srt.server_args import get_global_server_args

from nsa_backend.adapters import alike_ranks, naive_eagle
from nsa_backend.adapters.contract import Adapter
from nsa_backend.adapters.nsa import draft, entry_points, kernels, refusals
from nsa_backend.adapters.options import ADD_OPTIONS, add_options
from nsa_backend.adapters.sglang_types import AttentionBackend, DraftBackendFactory, ForwardBatch, ForwardMode, HookType
from nsa_backend.adapters.shared import CHECK, FACTORY, Settings, Takeover, hook, register_under

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


class NsaAdapter(Adapter):
    """SGLang 0.5.12 and 0.5.12.post1, part by part."""

    BACKEND_NAMES = ("nsa",)
    DECODE_ATTRIBUTE, PREFILL_ATTRIBUTE = "nsa_decode_backend", "nsa_prefill_backend"
    DECODE_OPTION, PREFILL_OPTION = "--nsa-decode-backend", "--nsa-prefill-backend"

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
    index_topk = staticmethod(get_nsa_index_topk)
    is_sparse_model = staticmethod(is_deepseek_nsa)
    attention_tp_size = staticmethod(get_attention_tp_size)
    environment_problems = staticmethod(refusals.environment_problems)
    combination_problems = staticmethod(refusals.combination_problems)
    round_problems = staticmethod(refusals.round_problems)
    front_problems = short_problems = prefill_problems = staticmethod(refusals.front_problems)
    divided_problems = staticmethod(refusals.divided_problems)
    model_problem = staticmethod(refusals.model_problem)
    draft_extend_sizes_in_tokens = staticmethod(draft.draft_extend_sizes_in_tokens)
    take_draft_side = staticmethod(draft.take_draft_side)
    draft_extend_graph_runner = staticmethod(draft.draft_extend_graph_runner)

    def settings(self, runner: ModelRunner) -> Settings:
        args = runner.server_args
        return Settings(
            args.nsa_decode_backend,
            args.nsa_prefill_backend,
            args.speculative_num_steps or 0,
            args.speculative_num_draft_tokens or 0,
        )

    def resolved(self, server_args: ServerArgs) -> ServerArgs:
        """Server arguments with every default filled in."""
        return server_args

    def served_backends(self, server_args: ServerArgs) -> tuple[str, str]:
        """Attention backends of (prefill, decode)."""
        return server_args.get_attention_backends()

    def schedule_surplus_last(self, device_sm: int) -> bool:
        """Whether DeepGEMM gives the last SMs one segment more; 0.1.0 gives it to the first."""
        return False

    def pairs_logits(self) -> bool:
        """No: its indexer hands over one row at a time."""
        return False

    def score_at_once(self, device_sm: int) -> None:
        """It does already."""

    def divide_indexer(self, device_sm: int) -> None:
        """Refused here where it is asked for."""

    def take_moe_configs(self) -> None:
        """None were measured with its Triton."""

    def fuse_topk(self, shares_selections: bool) -> bool:
        """Whether the indexer's top-k returns KV slots (SGLANG_NSA_FUSE_TOPK=1, the default) or token positions."""
        return envs.SGLANG_NSA_FUSE_TOPK.get()

    def shares_selections(self, factory: DraftBackendFactory) -> bool:
        """No: every draft step selects for itself."""
        return False

    def dense_prefill_limit(self) -> int:
        """Longest KV length, in tokens, that prefill still computes densely; SGLang sets it to index_topk."""
        return envs.SGLANG_NSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD.get()

    def in_prefill_graph(self) -> bool:
        """Prefill is captured in pieces only under --enforce-piecewise-cuda-graph, which is refused."""
        return False

    def is_draft_extend(self, mode: ForwardMode) -> bool:
        return mode.is_draft_extend(include_v2=True)

    def is_ragged_draft_extend(self, mode: ForwardMode) -> bool:
        """Whether requests extend by different numbers of tokens (spec v1)."""
        return mode.is_draft_extend()

    def rows_of_rank(self, batch: ForwardBatch) -> None:
        """All rows of a prefill: prefill context parallel is refused."""

    def kv_pool(self, batch: ForwardBatch, backend: AttentionBackend) -> Any:
        """Where the KV of `batch` is."""
        return batch.token_to_kv_pool

    def take_rounds(self, ours: Takeover) -> None:
        """Nothing: no round is one graph on these releases, and a server that asks for it does not start."""

    def take_context_parts(self, runner: ModelRunner) -> None:
        """No rank has a part of a request's KV in these releases."""

    def take_layer_fronts(self, runner: ModelRunner, backends: tuple[type, ...], demanded: bool) -> None:
        """Nothing: these releases have other layers, and a server that asks for the front does not start."""

    def offer_warm_up(self) -> None:
        """Nothing: it captures rounds in one graph, and is refused here."""

    def clear_padding_on_resume(self, pool: Any) -> None:
        """Nothing: releasing memory was not looked at in these releases."""

    def keep_draft_kv(self, draft_runner: ModelRunner) -> None:
        """Nothing: where SGLang would copy a retracted request's KV to the host, these releases fail with a sparse pool."""

    def serves_here(self) -> bool:
        """Whether the server of this process has this backend for prefill or decode."""
        return not set(self.BACKEND_NAMES).isdisjoint(self.served_backends(get_global_server_args()))

    def take_over(self, ours: Takeover) -> None:
        """Register everything; raises RuntimeError where SGLang did not take a hook."""
        hook(f"{FACTORY}._create_nsa_decode_backend", ours.create_multi_step_backend, HookType.REPLACE)
        hook(f"{FACTORY}._create_nsa_prefill_backend", ours.create_draft_extend_backend, HookType.REPLACE)
        hook(CHECK, ours.check_server_args, HookType.AROUND)
        hook(naive_eagle.FROM_ARGUMENTS, naive_eagle.from_arguments, HookType.AROUND)
        hook(ADD_OPTIONS, add_options, HookType.AROUND)
        hook(alike_ranks.MEET, partial(alike_ranks.meet, self.serves_here), HookType.AROUND)
        register_under(self.BACKEND_NAMES, ours.create_backend)  # last: nothing is taken over by halves
