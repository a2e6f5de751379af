"""trtllm without a Blackwell GPU: flashinfer's real signature and shape check, and its documented semantics in torch."""

from __future__ import annotations

import inspect
import typing
from dataclasses import replace
from types import SimpleNamespace

import flashinfer.decode
import flashinfer.mla
import flashinfer.rope
import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.attention import trtllm
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.attention.torch_reference import TorchSparseAttention
from nsa_backend.config import AttentionConfig
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls

HEADS, LATENT, ROPE, TOPK, PAGE, SLOTS = 4, 512, 64, 128, 64, 512

FUSE_TOPK = getattr(envs, f"SGLANG_{adapter.BACKEND_NAMES[0].upper()}_FUSE_TOPK")
REAL = flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla
REAL_ROPE = flashinfer.rope.mla_rope_quantize_fp8


def checked(signature: inspect.Signature, hints: dict, kwargs: dict) -> dict:
    """Bind to the real signature, compare every value with its annotation, fill the defaults."""
    bound = signature.bind(**kwargs)
    for name, value in bound.arguments.items():
        allowed = typing.get_args(hints[name]) or (hints[name],)
        assert isinstance(value, allowed), f"{name} is {type(value)}, flashinfer wants {hints[name]}"
    bound.apply_defaults()
    return bound.arguments


class Emulator:
    """`trtllm_batch_decode_with_kv_cache_mla` for sparse MLA in float32; keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, **kwargs):
        a = SimpleNamespace(**checked(inspect.signature(REAL), typing.get_type_hints(REAL), kwargs))
        self.calls.append(a)
        kv_cache = flashinfer.mla._core._check_trtllm_gen_mla_shape(
            a.query, a.kv_cache, a.kv_lora_rank, a.qk_rope_head_dim, a.sparse_mla_top_k, a.block_tables, a.kv_cache.size(-2)
        )
        assert a.workspace_buffer.dtype == torch.uint8
        assert not a.workspace_buffer.any(), "its first use needs a zeroed workspace"
        assert a.query.is_contiguous()
        assert a.seq_lens.dtype == a.block_tables.dtype == torch.int32
        assert a.seq_lens.shape == a.query.shape[:1]
        assert int(a.seq_lens.max()) <= a.max_seq_len
        tokens = kv_cache.flatten(0, 2).float()
        query = a.query.flatten(0, 1).float()
        out = torch.zeros(*query.shape[:2], a.kv_lora_rank)
        for row, (table, length) in enumerate(zip(a.block_tables[:, 0], a.seq_lens.tolist(), strict=True)):
            slots = table[: min(length, a.sparse_mla_top_k)].long()  # the length clips the row, the row clips the length
            assert (slots >= 0).all(), "the kernel would read a slot of -1"
            keys = tokens[slots]
            weights = torch.softmax(query[row] @ keys.T * a.bmm1_scale, dim=-1)
            out[row] = weights @ keys[:, : a.kv_lora_rank] * a.bmm2_scale
        return out.to(torch.bfloat16).unsqueeze(1)


def rope_emulator(**kwargs):
    """`mla_rope_quantize_fp8` as documented: rotate the rope parts, cast everything to fp8_e4m3, write into the outputs."""
    a = SimpleNamespace(**checked(inspect.signature(REAL_ROPE), typing.get_type_hints(REAL_ROPE), kwargs))
    assert a.quant_scale_q == a.quant_scale_kv == 1.0
    cos, sin = a.cos_sin_cache[a.pos_ids].float().chunk(2, dim=-1)

    def rotated(x):
        x, c, s = x.float(), cos, sin
        if x.dim() == 3:
            c, s = c[:, None], s[:, None]
        if a.is_neox:
            x1, x2 = x.chunk(2, dim=-1)
            return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1).flatten(-2)

    for value, out in (
        (rotated(a.q_rope), a.q_rope_out),
        (rotated(a.k_rope), a.k_rope_out),
        (a.q_nope, a.q_nope_out),
        (a.k_nope, a.k_nope_out),
    ):
        assert value.shape == out.shape
        out.copy_(value.to(a.quantize_dtype))


@pytest.fixture
def emulator(monkeypatch):
    found = Emulator()
    monkeypatch.setattr(flashinfer.decode, "trtllm_batch_decode_with_kv_cache_mla", found)
    monkeypatch.setattr(flashinfer.rope, "mla_rope_quantize_fp8", rope_emulator)
    trtllm._workspaces.clear()
    with envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.override(4096):
        yield found
    trtllm._workspaces.clear()


class PlainPool:
    """SGLang's MLA pool for trtllm: 576 values a token, bfloat16 or plain fp8_e4m3."""

    page_size, size = PAGE, SLOTS - PAGE

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.kv = torch.randn(SLOTS, 1, LATENT + ROPE).to(dtype)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.kv

    def set_mla_kv_buffer(self, layer, loc, k_nope, k_rope) -> None:
        self.kv[loc] = torch.cat([k_nope.view(-1, 1, LATENT), k_rope.view(-1, 1, ROPE)], -1).to(self.dtype)


def blackwell(make_runner, monkeypatch, dtype: torch.dtype):
    """The backend as it would be built on an SM100, on the CPU."""
    settings = adapter.settings
    monkeypatch.setattr(adapter, "device_sm", lambda device: 100)
    runner = make_runner(num_steps=3, index_topk=TOPK, table_width=256, pool_size=8)
    runner.token_to_kv_pool = PlainPool(dtype)
    runner.kv_cache_dtype = dtype
    runner.model_config.num_attention_heads = HEADS
    runner.model_config.kv_lora_rank, runner.model_config.qk_rope_head_dim = LATENT, ROPE
    monkeypatch.setattr(adapter, "settings", lambda runner: replace(settings(runner), decode="trtllm", prefill="trtllm"))
    table = runner.req_to_token_pool.req_to_token
    table.copy_(torch.stack([torch.randperm(SLOTS)[: table.shape[1]] for _ in range(len(table))]))
    return create_backend(runner), runner


MODES = {
    ForwardMode.DECODE: ([200, 9], 1),
    ForwardMode.TARGET_VERIFY: ([130, 1], 4),
    ForwardMode.DRAFT_EXTEND_V2: ([131, 5], 4),
    ForwardMode.EXTEND: ([133, 7], 4),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("mode", MODES)
def test_against_the_reference(make_runner, monkeypatch, emulator, mode, dtype):
    backend, runner = blackwell(make_runner, monkeypatch, dtype)
    lengths, new = MODES[mode]
    rows = 2 * new
    batch = ForwardBatch(
        forward_mode=mode, batch_size=2, input_ids=None, req_pool_indices=torch.tensor([3, 6]),
        seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths), seq_lens_sum=sum(lengths),
        out_cache_loc=torch.arange(rows), positions=torch.arange(rows) * 3, extend_seq_lens=torch.tensor([new, new]),
        extend_seq_lens_cpu=[new, new], extend_prefix_lens_cpu=[0, 0],
        **calls.batch_fields(SimpleNamespace(runner=runner, backend=backend)),
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    metadata = backend.forward_metadata
    row_lens = metadata.nsa_seqlens_expanded.tolist()
    slots = torch.full((rows, TOPK), -1, dtype=torch.int32)
    for row, length in enumerate(row_lens):
        kept = torch.randperm(length)[:TOPK]
        slots[row, : len(kept)] = 64 * metadata.real_page_table[metadata.table_rows[row].long(), kept // 64] + kept % 64
    fp8 = dtype == torch.float8_e4m3fn
    rope_args = {"cos_sin_cache": torch.randn(64, ROPE), "is_neox": False} if fp8 else {}
    layer = RadixAttention(HEADS, LATENT + ROPE, 0.05, 1, layer_id=0, v_head_dim=LATENT)
    q_nope, q_rope = torch.randn(HEADS, rows, LATENT).bfloat16().transpose(0, 1), torch.randn(rows, HEADS, ROPE).bfloat16()
    k, k_rope = torch.randn(rows, 1, LATENT).bfloat16(), torch.randn(rows, 1, ROPE).bfloat16()
    with FUSE_TOPK.override(True), calls.running(backend):
        out = layer(q_nope, k, k, batch, q_rope=q_rope, k_rope=k_rope, topk_indices=slots, **rope_args)

    (call,) = emulator.calls
    assert call.seq_lens.tolist() == (lengths if mode.is_decode() else [min(n, TOPK) for n in row_lens])
    assert call.block_tables.shape == (rows, 1, TOPK)
    assert call.query.dtype == dtype
    query = call.query[:, 0].float()
    assert torch.equal(query[..., :LATENT], q_nope.to(dtype).float())
    if not fp8:
        assert torch.equal(query[..., LATENT:], q_rope.float())
    assert torch.equal(runner.token_to_kv_pool.kv[:rows, 0, :LATENT].float(), k[:, 0].to(dtype).float())
    want = TorchSparseAttention().forward(
        SparseInputs(
            q_nope=query[..., :LATENT], q_rope=query[..., LATENT:], kv_cache=runner.token_to_kv_pool.kv,
            topk_slots=slots, nsa_cache_seqlens=None, nsa_cu_seqlens_q=None, nsa_cu_seqlens_k=None,
            sm_scale=0.05, logit_cap=0.0,
        )
    )  # fmt: skip
    assert out.shape == (rows, HEADS, LATENT)
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-2)


def test_rope_is_applied_to_query_and_key_at_their_positions(make_runner, monkeypatch, emulator):
    """Position p turns by the angle p: equal positions keep the dot product, distance alone decides it."""
    from nsa_backend.attention.fp8 import rope_in_fp8

    angle = torch.arange(64)[:, None] * torch.ones(ROPE // 2)
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=-1)
    layer = RadixAttention(1, LATENT + ROPE, 0.05, 1, layer_id=0, v_head_dim=LATENT)
    unit = torch.zeros(1, 1, ROPE, dtype=torch.bfloat16)
    unit[..., 0] = 1
    zeros = torch.zeros(1, 1, LATENT, dtype=torch.bfloat16)

    def at(position):
        q, _, k_rope = rope_in_fp8(zeros, unit, zeros, unit, layer, torch.tensor([position]), cos_sin, False)
        return q[0, 0, LATENT:].float(), k_rope[0].float()

    for here, there in ((5, 5), (5, 4), (40, 39), (9, 2)):
        dot = at(here)[0] @ at(there)[1]
        assert dot == pytest.approx(float(torch.cos(torch.tensor(float(here - there)))), abs=0.08)


def test_the_workspace_is_allocated_once(emulator):
    config = AttentionConfig(device_sm=100, num_heads=HEADS, kv_cache_dtype=torch.bfloat16, index_topk=TOPK)
    first, second = trtllm.build(config), trtllm.build(config)
    assert first._workspace is second._workspace
    assert first._workspace.numel() == 4096
