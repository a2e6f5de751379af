"""One KV dtype and head count of the attention benchmark: inputs, and the three ways to call a kernel on them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.testing.calls import calls
from nsa_backend.testing.captured import MODES, Captured, static_batch
from nsa_backend.testing.runner import make_gpu_runner
from nsa_backend.testing.shape import LATENT, QK_DIM, ROPE, SCALE, TOPK

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
NAMES = {"bf16": ("fa3", "flashmla_sparse", "sparse_decode"), "fp8": ("flashmla_kv", "sparse_decode")}
SLOTS, CONTEXT = 1 << 20, 4096
CHOSEN_ROWS = 2048  # top-k rows to draw from: 4 calls of 512 rows
MAX_ROWS = 512
COLD_ROWS = 56  # rows x 2048 tokens x 1152 bytes that replace what the 60 MB L2 held
HEAD_BLOCK = 64  # of FlashMLA's kernels
_pools: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def pools(kv: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(the KV cache as the implementations read it, the same values in bfloat16), a million random tokens."""
    if kv not in _pools:
        _pools.clear()
        generator = torch.Generator(device="cuda").manual_seed(0)
        values = torch.randn(SLOTS, 1, QK_DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
        _pools[kv] = (values, values) if kv == "bf16" else _quantised(values)
    return _pools[kv]


def _quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    nope, rope = calls.quantize_k_cache()(values[..., :LATENT].contiguous(), values[..., LATENT:].contiguous())
    packed = torch.cat([nope.view(torch.uint8), rope.view(torch.uint8)], dim=-1).view(torch.float8_e4m3fn)
    return packed, adapter.dequantize_k_cache_paged(packed, torch.arange(SLOTS, dtype=torch.int32, device="cuda"))


def of_flashmla(kv: str, query: torch.Tensor, cache: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """FlashMLA's kernel for such a KV cache, called with what each row chose.

    Args:
        kv: a key of KV_DTYPES.
        query: [rows, heads, 576], whose heads are padded to a multiple of HEAD_BLOCK.
        cache: of `pools`.

    Returns:
        A function of int32 [rows, 2048] slots to [rows, heads, 512].
    """
    flash_mla, (rows, heads, _) = adapter.flash_mla(), query.shape
    if kv == "bf16":
        attend = flash_mla.flash_mla_sparse_fwd
        return lambda chosen: attend(q=query, kv=cache, indices=chosen.unsqueeze(1), sm_scale=SCALE, d_v=LATENT)[0]
    lengths = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")
    tiles, num_splits = flash_mla.get_mla_metadata(
        cache_seqlens=lengths, num_q_tokens_per_head_k=heads, num_heads_k=1, num_heads_q=heads, is_fp8_kvcache=True, topk=TOPK
    )
    arguments = dict(
        q=query.unsqueeze(1), k_cache=cache.view(-1, PAGE_SIZE, 1, cache.shape[-1]), cache_seqlens=lengths, head_dim_v=LATENT,
        tile_scheduler_metadata=tiles, num_splits=num_splits, softmax_scale=SCALE,
        block_table=torch.empty(rows, 0, dtype=torch.int32, device="cuda"), is_fp8_kvcache=True,
    )  # fmt: skip
    return lambda chosen: flash_mla.flash_mla_with_kvcache(**arguments, indices=chosen.unsqueeze(1))[0].squeeze(1)


class Case:
    """Queries of `heads` heads over one of the pools. Call i of a variant takes the i-th lot of top-k rows.

    A row attends to as many tokens as its `context` has, and to TOPK at most.
    """

    def __init__(self, kv: str, heads: int, context: int = CONTEXT):
        from sglang.srt.layers.radix_attention import RadixAttention

        self.kv, self.heads, self.context, self.names = kv, heads, context, NAMES[kv]
        self.cache, self.values = pools(kv)
        self.bytes_per_token = self.cache.shape[-1] * self.cache.element_size()
        generator = torch.Generator(device="cuda").manual_seed(heads)
        self._chosen = torch.randint(SLOTS, (CHOSEN_ROWS, TOPK), generator=generator, device="cuda", dtype=torch.int32)
        self._query = torch.randn(heads, MAX_ROWS, LATENT, generator=generator, device="cuda").bfloat16()
        self._rope = torch.randn(MAX_ROWS, heads, ROPE, generator=generator, device="cuda").bfloat16()
        self._layer = RadixAttention(heads, QK_DIM, SCALE, 1, layer_id=0, v_head_dim=LATENT)
        self._batch = SimpleNamespace(
            token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda layer_id: self.cache), hisparse_coordinator=None
        )
        self._backends = {}

    def query(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As SGLang's model leaves them: q_nope heads first in memory, seen rows first."""
        return self._query[:, :rows].transpose(0, 1), self._rope[:rows]

    def chosen(self, rows: int, call: int) -> torch.Tensor:
        start = call * rows % (CHOSEN_ROWS - rows + 1)
        return self._chosen[start : start + rows]

    def ours(self, name: str, rows: int) -> Callable[[int], torch.Tensor]:
        """Our forward_decode."""
        from nsa_backend.backend import NativeSparseAttnBackend

        backend = self._backend("ours", NativeSparseAttnBackend, name)
        self._capture(backend, rows).in_graph()  # makes the metadata launch
        backend.captured.leave()
        return self._forward_decode(backend, rows)

    def builtin(self, name: str, rows: int) -> Callable[[int], torch.Tensor]:
        """SGLang's own forward_decode."""
        backend = self._backend("builtin", calls.builtin()[0], name)
        self._capture(backend, rows)
        return self._forward_decode(backend, rows)

    def bare(self, name: str, rows: int) -> Callable[[int], object]:
        """The kernel alone, on arguments that exist already: FlashMLA's query is joined and padded beforehand."""
        return getattr(self, f"_bare_{name}")(rows)

    def error(self, name: str, rows: int) -> float:
        """Relative error of our forward_decode against float32."""
        from nsa_backend.attention.sparse_inputs import SparseInputs
        from nsa_backend.attention.torch_reference import TorchSparseAttention

        out = self.ours(name, rows)(0).float()
        q_nope, q_rope = self.query(rows)
        want = TorchSparseAttention().forward(
            SparseInputs(
                q_nope=q_nope.float(), q_rope=q_rope.float(), kv_cache=self.values, topk_slots=self.chosen(rows, 0),
                nsa_cache_seqlens=None, nsa_cu_seqlens_q=None, nsa_cu_seqlens_k=None,
                sm_scale=self._layer.scaling, logit_cap=0.0,
            )
        )  # fmt: skip
        return float((out - want).norm() / want.norm())

    def _backend(self, side: str, backend_class: type, name: str):
        if (side, name) not in self._backends:
            runner = make_gpu_runner(num_steps=3, context=max(CONTEXT, self.context), max_requests=MAX_ROWS, heads=self.heads)
            dtype = KV_DTYPES[self.kv]
            runner.kv_cache_dtype = runner.token_to_kv_pool.dtype = dtype
            pool = runner.token_to_kv_pool
            pool.nsa_kv_cache_store_fp8 = pool.dsa_kv_cache_store_fp8 = self.kv == "fp8"
            pool.kv_cache_dim, pool.get_key_buffer = self.cache.shape[-1], lambda layer_id: self.cache
            calls.choose(runner, decode=name, prefill="flashmla_kv" if self.kv == "fp8" else "flashmla_sparse")
            backend = backend_class(runner)
            backend.init_cuda_graph_state(MAX_ROWS, MAX_ROWS)
            self._backends[side, name] = backend
        return self._backends[side, name]

    def _capture(self, backend, rows: int) -> Captured:
        lengths = torch.full((rows,), self.context, device="cuda")
        slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
        batch = static_batch(lengths, slots, 1)
        return Captured(backend, batch, MODES["decode"], rows)

    def _forward_decode(self, backend, rows: int) -> Callable[[int], torch.Tensor]:
        metadata = backend.forward_metadata
        q_nope, q_rope = self.query(rows)

        def call(i: int) -> torch.Tensor:
            backend.forward_metadata = metadata
            return backend.forward_decode(
                q_nope, None, None, self._layer, self._batch, False, q_rope=q_rope, topk_indices=self.chosen(rows, i)
            )

        return call

    def _bare_fa3(self, rows: int) -> Callable[[int], object]:
        attend, _ = adapter.fa3_functions()
        q_nope, q_rope = self.query(rows)
        lengths = torch.full((rows,), TOPK, dtype=torch.int32, device="cuda")
        cu = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        arguments = dict(
            q=q_rope, qv=q_nope, k_cache=self.cache[..., LATENT:].unsqueeze(1), v_cache=self.cache[..., :LATENT].unsqueeze(1),
            cache_seqlens=lengths, cu_seqlens_q=cu, cu_seqlens_k_new=cu * TOPK, max_seqlen_q=1,
            softmax_scale=self._layer.scaling, causal=True, softcap=0.0, return_softmax_lse=False, num_splits=0,
        )  # fmt: skip
        return lambda i: attend(**arguments, page_table=self.chosen(rows, i))

    def _joined(self, rows: int) -> torch.Tensor:
        q_nope, q_rope = self.query(rows)
        padded = -(-self.heads // HEAD_BLOCK) * HEAD_BLOCK
        joined = torch.zeros(rows, padded, QK_DIM, dtype=torch.bfloat16, device="cuda")
        joined[:, : self.heads] = torch.cat([q_nope, q_rope], dim=-1)
        return joined

    def _bare_flashmla(self, rows: int) -> Callable[[int], object]:
        attend = of_flashmla(self.kv, self._joined(rows), self.cache)
        return lambda i: attend(self.chosen(rows, i))

    _bare_flashmla_sparse = _bare_flashmla_kv = _bare_flashmla
