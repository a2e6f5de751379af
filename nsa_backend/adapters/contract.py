"""The contract of an adapter: everything that the package asks of a generation of SGLang, declared in one place.

`core` declares the other direction, what SGLang's entry points ask of the backends.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from nsa_backend.adapters import sglang_types, shared, startup
from nsa_backend.adapters.option_rules import Rule
from nsa_backend.adapters.shared import Settings, Takeover


class Adapter(ABC):
    """One generation of releases. Imports that need a GPU or its libraries stay inside methods: every machine can have one."""

    # Names

    BACKEND_NAMES: tuple[str, ...]  # what SGLang calls DeepSeek sparse attention, its own name first
    DECODE_OPTION: str
    PREFILL_OPTION: str
    DECODE_ATTRIBUTE: str  # of ServerArgs
    PREFILL_ATTRIBUTE: str

    # Classes to inherit from

    BackendEntryPoints: type  # what SGLang calls around captures and replays of one model's forwards
    MultiStepEntryPoints: type  # the same of a draft round
    BaseIndexerMetadata: type  # the interface of SGLang's indexer

    # Options and models

    REFUSED: tuple[Rule, ...]  # options that this generation alone has, or alone may not be started with

    @abstractmethod
    def settings(self, runner: sglang_types.ModelRunner) -> Settings:
        """What the user chose, as SGLang resolved it."""

    @abstractmethod
    def resolved(self, server_args: sglang_types.ServerArgs) -> Any:
        """Server arguments with every default filled in."""

    @abstractmethod
    def served_backends(self, server_args: sglang_types.ServerArgs) -> tuple[str, str]:
        """Attention backends of (prefill, decode)."""

    @abstractmethod
    def environment_problems(self) -> list[str]:
        """One sentence for each of SGLang's own switches that must be off."""

    @abstractmethod
    def combination_problems(self, args: Any) -> list[str]:
        """One sentence for each of these resolved arguments that is not served beside another one."""

    @abstractmethod
    def round_problems(self, args: Any) -> list[str]:
        """One sentence for each reason why a server of these resolved arguments can have no graphs of whole rounds."""

    @abstractmethod
    def front_problems(self, args: Any) -> list[str]:
        """One sentence for each reason why a server of these resolved arguments can have no layer's front in two launches."""

    @abstractmethod
    def short_problems(self, args: Any) -> list[str]:
        """The same of decode graphs of short requests, which have neither index scores nor top-k."""

    @abstractmethod
    def prefill_problems(self, args: Any) -> list[str]:
        """The same of prefills of short requests in one graph."""

    @abstractmethod
    def divided_problems(self, args: Any) -> list[str]:
        """The same of ranks that divide the indexer's work of long prefills."""

    @abstractmethod
    def is_sparse_model(self, hf_config: Any) -> bool:
        """Whether a model has DeepSeek sparse attention."""

    @abstractmethod
    def index_topk(self, hf_config: Any) -> int:
        """Tokens that the sparse attention of such a model keeps."""

    @abstractmethod
    def model_problem(
        self, hf_config: Any, speculative: bool, dequantised_prefill: bool, disaggregated: bool = False
    ) -> str | None:
        """What a sparse model asks of its backend that this one does not do, or that SGLang does not do for it; or None.

        Args:
            hf_config: of a target or a draft model.
            speculative: whether draft steps are asked for.
            dequantised_prefill: whether prefill dequantises an FP8 KV cache, and its top-k counts rows of that.
            disaggregated: whether the server is one of a pair (PD disaggregation).
        """

    def named_by_user(self, server_args: sglang_types.ServerArgs) -> tuple[bool, bool]:
        """Whether the user named an implementation for decode, and one for prefill, or this release cannot tell."""
        return True, True

    @abstractmethod
    def attention_tp_size(self) -> int:
        """Ranks that share the heads of an attention layer."""

    @abstractmethod
    def fuse_topk(self, shares_selections: bool) -> bool:
        """Whether the indexer's top-k returns KV slots (the default) or token positions.

        `shares_selections` says whether a backend makes or takes the selection that all draft steps of a round attend with.
        """

    @abstractmethod
    def shares_selections(self, factory: sglang_types.DraftBackendFactory) -> bool:
        """Whether all draft steps of this factory's worker attend with the selection of the last accepted row."""

    @abstractmethod
    def dense_prefill_limit(self) -> int:
        """Longest KV length, in tokens, that prefill still computes densely; SGLang sets it to index_topk."""

    # Forwards

    @abstractmethod
    def is_draft_extend(self, mode: sglang_types.ForwardMode) -> bool:
        """Whether the draft model extends by what a verify has accepted."""

    @abstractmethod
    def is_ragged_draft_extend(self, mode: sglang_types.ForwardMode) -> bool:
        """Whether requests then extend by different numbers of tokens (spec v1)."""

    @abstractmethod
    def in_prefill_graph(self) -> bool:
        """Whether a prefill graph is being captured or replayed."""

    @abstractmethod
    def rows_of_rank(self, batch: sglang_types.ForwardBatch) -> slice | None:
        """Of all rows of a prefill, those that this rank computes, as `PrefillFields.of_rows` takes them; None for all."""

    def attention_output(self, batch: sglang_types.ForwardBatch) -> torch.Tensor | None:
        """Where SGLang copies what a layer's attention returns unless that lies there: [rows, heads * v_head_dim], or None."""
        return None

    @abstractmethod
    def kv_pool(self, batch: sglang_types.ForwardBatch, backend: sglang_types.AttentionBackend) -> Any:
        """Where the KV of `batch` is."""

    # Kernels of SGLang and its packages

    TOPK_READS_PAGE_TABLE_1: bool  # whether the top-k reads a table of one column a token
    FLASH_MLA_DISTRIBUTION: str  # the distribution that brings FlashMLA

    @abstractmethod
    def topk_v2(self) -> tuple[Callable, Callable | None] | None:
        """SGLang's top-k v2 kernel through pages, and its form for windows of ragged logits; None where there is none."""

    @abstractmethod
    def pairs_logits(self) -> bool:
        """Whether SGLang's indexer hands DeepGEMM several rows of a verified request at once where metadata has them so."""

    @abstractmethod
    def score_at_once(self, device_sm: int) -> None:
        """Have SGLang's indexer score all rows in one call of DeepGEMM, where it makes several and the device needs one."""

    @abstractmethod
    def divide_indexer(self, device_sm: int) -> None:
        """Have ranks of tensor parallel divide the indexer's work of long prefills, where the user or this device wants it."""

    @abstractmethod
    def take_moe_configs(self) -> None:
        """Have SGLang's Triton experts use the tiles that this package has measured, where SGLang has none of this Triton's."""

    @abstractmethod
    def schedule_surplus_last(self, device_sm: int) -> bool:
        """Whether DeepGEMM gives the last SMs one segment more, or the first."""

    @abstractmethod
    def fa3_functions(self) -> tuple[Callable, Callable]:
        """`(flash_attn_with_kvcache, flash_attn_varlen_func)` of SGLang's FA3."""

    @abstractmethod
    def fa3_scheduler(self) -> Callable | None:
        """FA3's function that schedules the tiles of a batch ahead of its layers, or None."""

    @abstractmethod
    def flash_mla(self) -> ModuleType:
        """The module of FlashMLA's functions: `flash_mla_sparse_fwd`, `flash_mla_with_kvcache`, `get_mla_metadata`."""

    @abstractmethod
    def concat_query(self, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """[rows, heads, latent + rope] in memory of its own."""

    @abstractmethod
    def dequantize_k_cache_paged(self, quant_k_cache: torch.Tensor, page_table_1_flattened: torch.Tensor) -> torch.Tensor:
        """bfloat16 [slots, 1, latent + rope] of those slots of a packed FP8 KV cache."""

    @abstractmethod
    def mla_quantize_and_rope_for_fp8(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """RoPE and the cast to fp8_e4m3 of query and key, in SGLang's one launch."""

    # Taking over

    @abstractmethod
    def take_over(self, ours: Takeover) -> None:
        """Register everything; raises RuntimeError where SGLang did not take a hook."""

    @abstractmethod
    def take_draft_side(self, ours: Takeover) -> None:
        """Hook what SGLang's draft workers need, once a draft backend is built: their modules need libcuda."""

    @abstractmethod
    def take_rounds(self, ours: Takeover) -> None:
        """Let SGLang's EAGLE worker run its rounds in one graph."""

    @abstractmethod
    def take_layer_fronts(self, runner: sglang_types.ModelRunner, backends: tuple[type, ...], demanded: bool) -> None:
        """Put our front before the layers of a loaded model; raises ValueError where it is demanded and none can have it.

        Args:
            runner: of the model, with its KV pool.
            backends: our attention backends.
            demanded: whether a model without such a layer is refused.
        """

    @abstractmethod
    def take_context_parts(self, runner: sglang_types.ModelRunner) -> None:
        """Make the layers of a loaded model ready for ranks that divide the KV of a request; nothing where none do."""

    @abstractmethod
    def offer_warm_up(self) -> None:
        """Put our own warm-up (`releases.ROUND_WARM_UP`) among SGLang's, in the process that answers requests."""

    @abstractmethod
    def draft_extend_sizes_in_tokens(self, tokens_per_request: int) -> contextlib.AbstractContextManager[None]:
        """While a draft-extend graph runner is built, its batch sizes count tokens."""

    @abstractmethod
    def clear_padding_on_resume(self, pool: Any) -> None:
        """Give what padding reads its zeros back whenever SGLang has released memory and taken it again.

        Args:
            pool: SGLang's KV pool, of the target or of a draft model. The padding row of the request table is every model's.
        """

    @abstractmethod
    def keep_draft_kv(self, draft_runner: sglang_types.ModelRunner) -> None:
        """Keep the draft's KV where SGLang keeps the target's alone.

        Args:
            draft_runner: the draft model's, with its pool and the allocator that it shares with the target.
        """

    # What all releases do alike

    WAY_BACK = shared.WAY_BACK
    attention_tp_size_of = staticmethod(startup.attention_tp_size_of)
    context_ranks_of = staticmethod(startup.context_ranks_of)
    deep_gemm_num_sms = staticmethod(shared.deep_gemm_num_sms)
    deep_gemm_schedule = staticmethod(shared.deep_gemm_schedule)
    device_sm = staticmethod(shared.device_sm)
    draft_config = staticmethod(startup.draft_config)
    flashinfer_workspace_bytes = staticmethod(shared.flashinfer_workspace_bytes)
    is_rocm = staticmethod(shared.is_rocm)
    package_problem = staticmethod(shared.package_problem)
    target_model = staticmethod(startup.target_model)
    watch_backends = staticmethod(startup.watch_backends)
    drafts_are_dense = staticmethod(startup.drafts_are_dense)


OFFERED = Adapter.__abstractmethods__ | Adapter.__annotations__.keys()
"""Every name that a generation has to define; constants cannot be abstract, so a test looks for them."""
