"""What a layer of decode runs around its attention, on a GPU: the indexer's logits and top-k, the KV write, attention."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.fa3 import Fa3
from nsa_backend.benchmarks.calls.attention_case import COLD_ROWS, KV_DTYPES, Case
from nsa_backend.config import AttentionConfig
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.plan import PAGE_SIZE, plan_decode
from nsa_backend.kernels.sparse_decode import Parts, sparse_decode
from nsa_backend.metadata.views import NSAMetadata, step_metadata
from nsa_backend.testing.calls import calls
from nsa_backend.testing.shape import INDEX_DIM, LATENT, QK_DIM, ROPE, SCALE, TOPK

CONTEXT = 4096  # tokens of a request
TABLE = 163_840  # tokens that a row of the request table reaches on a server of DeepSeek-V3.2
CHOSEN = 10.0  # a score above all that are drawn
INDEX_HEADS = 64
INDEX_BYTES = INDEX_DIM + 4  # of a token: FP8 values and their scale


def repeats(rows: int) -> int:
    """Calls in a graph, each on KV of its own, so that none finds it in the L2 cache."""
    return max(4, -(-COLD_ROWS // rows))


class Indexer:
    """Logits and top-k of `rows` requests of CONTEXT tokens. Call i reads the i-th page tables."""

    def __init__(self, rows: int, pages: int, table: int = TABLE):
        """`pages` are what page tables draw from; `table` tokens a row of them reaches, as wide as the logits are."""
        self.rows, self.table = rows, table
        self.metadata = metadata_of(rows, table)
        generator = torch.Generator(device="cuda").manual_seed(rows)
        drawn = torch.randint(pages, (repeats(rows), rows, table // PAGE_SIZE), generator=generator, device="cuda")
        # The tokens that are decoded have pages of their own: two writes to one slot would leave either.
        own = torch.rand(repeats(rows), pages, generator=generator, device="cuda").topk(rows).indices
        drawn[:, :, (CONTEXT - 1) // PAGE_SIZE] = own
        self.tables = drawn.int()
        self.scores = torch.randn(rows, table, generator=generator, device="cuda")
        self._select, _ = adapter.topk_v2()

    def topk(self, i: int, scores: torch.Tensor | None = None, plan: torch.Tensor | None = None) -> torch.Tensor:
        """int32 [rows, TOPK] slots; of the scores that are there and with our plan unless others are given."""
        scores = self.scores if scores is None else scores
        out = scores.new_empty((self.rows, TOPK), dtype=torch.int32)
        plan = self.metadata.topk_plan if plan is None else plan
        self._select(scores, self.metadata.nsa_seqlens_expanded, self.tables[i], out, PAGE_SIZE, plan)
        return out

    @functools.cached_property
    def _index(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, keys and weights of the indexer's logits. A page has the values of its keys, then their scales."""
        generator = torch.Generator(device="cuda").manual_seed(0)
        query = torch.randn(self.rows, 1, INDEX_HEADS, INDEX_DIM, generator=generator, device="cuda").to(torch.float8_e4m3fn)
        pages, values = int(self.tables.max()) + 1, PAGE_SIZE * INDEX_DIM
        keys = torch.empty(pages, PAGE_SIZE * INDEX_BYTES, dtype=torch.uint8, device="cuda")
        drawn = torch.randn(pages, values, generator=generator, device="cuda", dtype=torch.bfloat16)
        keys[:, :values] = drawn.to(torch.float8_e4m3fn).view(torch.uint8)
        keys[:, values:] = torch.ones(pages, PAGE_SIZE, device="cuda").view(torch.uint8)
        weights = torch.rand(self.rows, INDEX_HEADS, generator=generator, device="cuda")
        return query, keys.view(pages, PAGE_SIZE, 1, INDEX_BYTES), weights

    def logits(self, i: int) -> torch.Tensor:
        """float32 [rows, table], by DeepGEMM as SGLang's indexer calls it."""
        import deep_gemm

        lengths = self.metadata.nsa_seqlens_expanded.view(-1, 1)
        schedule = self.metadata.paged_mqa_schedule_metadata
        return deep_gemm.fp8_paged_mqa_logits(*self._index, lengths, self.tables[i], schedule, self.table, clean_logits=False)


class Chain(Indexer):
    """The same before the attention of `case`, with the KV write of the tokens that are decoded between."""

    def __init__(self, case: Case, rows: int):
        super().__init__(rows, case.cache.shape[0] // PAGE_SIZE)
        self.scores[:, CONTEXT - 1] = CHOSEN  # each call reads what it wrote
        self.case, self.heads = case, case.heads
        generator = torch.Generator(device="cuda").manual_seed(case.heads)
        self._new = [torch.randn(rows, 1, n, generator=generator, device="cuda").bfloat16() for n in (LATENT, ROPE)]
        last = self.tables[:, :, (CONTEXT - 1) // PAGE_SIZE].long()
        self._slots = last * PAGE_SIZE + (CONTEXT - 1) % PAGE_SIZE  # int64 [calls, rows], of the new tokens
        self._bytes = case.cache.view(torch.uint8)
        self._overwritten = self._bytes[self._slots]
        self._pool = calls.mla_pool(KV_DTYPES[case.kv], None if case.kv == "bf16" else case.cache.shape[-1], "cuda")
        self._pool.kv_buffer = [case.cache.view(self._pool.store_dtype)]
        self._layer = SimpleNamespace(layer_id=0)
        self._num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
        sizes = (rows, case.heads, LATENT, TOPK, self._num_sms, "cuda")
        self._parts = Parts.allocate(*sizes, fp8=case.kv == "fp8")
        self.selected = [self.topk(i) for i in range(repeats(rows))]

    def restore(self) -> None:
        """Put back what the write has overwritten in the cache, which other cases read."""
        self._bytes[self._slots] = self._overwritten

    def forget(self) -> None:
        """Put NaN where the first kernel of sparse decode leaves parts for the second."""
        for parts in (self._parts.out, self._parts.lse):
            parts.fill_(torch.nan)

    def write(self, i: int) -> None:
        """SGLang's write of the new tokens' KV, quantised where the cache is FP8."""
        with calls.one_rank():
            self._pool.set_mla_kv_buffer(self._layer, self._slots[i], *self._new)

    def sparse_decode(self, slots: torch.Tensor, dependent: bool) -> torch.Tensor:
        """bfloat16 [rows, heads, LATENT]."""
        query, lens = self.case.query(self.rows), self.metadata.nsa_cache_seqlens_int32
        return sparse_decode(
            *query, self.case.cache, slots, lens, SCALE, num_sms=self._num_sms, parts=self._parts, dependent=dependent
        )

    def fa3(self, slots: torch.Tensor, schedule: torch.Tensor | None) -> torch.Tensor:
        """The same by FA3, whose tiles are scheduled in the call where `schedule` is None."""
        attend, _ = adapter.fa3_functions()
        (q_nope, q_rope), cache, metadata = self.case.query(self.rows), self.case.cache, self.metadata
        return attend(
            q=q_rope, qv=q_nope, k_cache=cache[..., LATENT:QK_DIM].unsqueeze(1), v_cache=cache[..., :LATENT].unsqueeze(1),
            page_table=slots, cache_seqlens=metadata.nsa_cache_seqlens_int32, cu_seqlens_q=metadata.nsa_cu_seqlens_q,
            cu_seqlens_k_new=metadata.nsa_cu_seqlens_k, max_seqlen_q=1, softmax_scale=SCALE, causal=True, softcap=0.0,
            return_softmax_lse=False, scheduler_metadata=schedule, num_splits=0,
        )  # fmt: skip

    def fa3_schedule(self) -> torch.Tensor:
        """What FA3 computes of the lengths, as our forward computes it once for all layers."""
        config = AttentionConfig(device_sm=90, num_heads=self.heads, kv_cache_dtype=torch.bfloat16, index_topk=TOPK)
        return Fa3(config).schedule(self.metadata.nsa_cache_seqlens_int32, self.metadata.nsa_cu_seqlens_q)


def metadata_of(rows: int, table: int) -> NSAMetadata:
    """Metadata of `rows` decode rows of CONTEXT tokens, by our launch."""
    plan = plan_decode(rows)
    buffers = MetadataBuffers.allocate(
        plan, table_width=table, num_sms=adapter.deep_gemm_num_sms(), device="cuda", wide=False, planned=True
    )
    inputs = BatchInputs(torch.full((rows,), CONTEXT, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda"))
    requests = torch.zeros(1, table, dtype=torch.int32, device="cuda")
    surplus_last = adapter.schedule_surplus_last(adapter.device_sm(torch.device("cuda")))
    write_metadata(plan, buffers, inputs, req_to_token=requests, index_topk=TOPK, surplus_last=surplus_last)
    return step_metadata(plan, buffers)
