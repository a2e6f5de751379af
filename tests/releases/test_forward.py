"""forward_decode and forward_extend through SGLang's RadixAttention, fused and unfused top-k alike."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention

from nsa_backend.adapters.installed import adapter
from nsa_backend.adapters.sglang_types import ForwardBatch, ForwardMode
from nsa_backend.attention import dense_prefill
from nsa_backend.registration import create_backend
from nsa_backend.testing.calls import calls
from nsa_backend.testing.pool import CpuKVPool

HEADS, LATENT, ROPE, TOPK = 4, 8, 4, 16


def prepared(make_runner, mode: ForwardMode) -> SimpleNamespace:
    """A backend with metadata for the forward of `batch`, which has `rows` query rows."""
    runner = make_runner(num_steps=1, index_topk=TOPK, table_width=64)
    table = runner.req_to_token_pool.req_to_token
    table.copy_(torch.randperm(table.numel())[: table.numel()].view_as(table) % 640)
    pool = CpuKVPool(10, LATENT + ROPE, 1)
    pool.kv.normal_()
    runner.token_to_kv_pool = pool
    backend = create_backend(runner)
    extend = [2, 2]
    rows = 2 if mode.is_decode() else 4
    lengths = torch.tensor([9, 30])
    batch = ForwardBatch(
        forward_mode=mode,
        batch_size=2,
        input_ids=None,
        req_pool_indices=torch.tensor([3, 7]),
        seq_lens=lengths,
        seq_lens_cpu=lengths.clone(),
        seq_lens_sum=39,
        out_cache_loc=torch.tensor([600, 601, 602, 603])[:rows],
        extend_seq_lens=torch.tensor(extend),
        extend_seq_lens_cpu=extend,
        **calls.batch_fields(SimpleNamespace(runner=runner, backend=backend)),
    )
    backend.init_forward_metadata(batch)
    return SimpleNamespace(backend=backend, batch=batch, rows=rows, pool=pool)


def attend(forward: SimpleNamespace, positions: torch.Tensor) -> torch.Tensor:
    rows = forward.rows
    generator = torch.Generator().manual_seed(1)
    layer = RadixAttention(HEADS, LATENT + ROPE, 0.4, 1, layer_id=0, v_head_dim=LATENT)
    k = torch.randn(rows, 1, LATENT, generator=generator)
    q = torch.randn(rows, HEADS * LATENT, generator=generator)
    q_rope = torch.randn(rows, HEADS * ROPE, generator=generator)
    k_rope = torch.randn(rows, 1, ROPE, generator=generator)
    with calls.running(forward.backend):
        return layer(q, k, k, forward.batch, q_rope=q_rope, k_rope=k_rope, topk_indices=positions)


@pytest.mark.parametrize(
    "mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.EXTEND]
)
def test_fused_and_unfused_topk_give_the_same_output(make_runner, mode):
    forward = prepared(make_runner, mode)
    metadata, rows = forward.backend.forward_metadata, forward.rows
    positions = torch.full((rows, TOPK), -1, dtype=torch.int32)
    for row, length in enumerate(metadata.nsa_seqlens_expanded.tolist()):
        count = min(length, TOPK)
        positions[row, :count] = torch.randperm(length)[:count].int()
    pages = metadata.real_page_table[metadata.table_rows.long()]
    slots = 64 * torch.gather(pages, 1, positions.clamp(min=0).long() // 64) + positions % 64
    slots = torch.where(positions < 0, -1, slots)
    assert forward.backend.fuse_topk
    fused = attend(forward, slots.int())
    forward.backend.fuse_topk = False
    unfused = attend(forward, positions)
    assert fused.shape == (rows, HEADS, LATENT)
    assert fused.isfinite().all()
    assert torch.equal(fused, unfused)


def test_a_prefill_knows_where_sglang_wants_it(make_runner, monkeypatch):
    forward, given = prepared(make_runner, ForwardMode.EXTEND), []
    room = torch.zeros(forward.rows, HEADS * LATENT)
    monkeypatch.setattr(adapter, "attention_output", lambda batch: room if batch is forward.batch else None)
    keep = SimpleNamespace(forward=lambda inputs: given.append(inputs.out) or inputs.out)
    monkeypatch.setattr(forward.backend, "prefill_attention", keep)
    out = attend(forward, torch.full((forward.rows, TOPK), -1, dtype=torch.int32))
    assert out.data_ptr() == given[0].data_ptr() == room.data_ptr()
    assert given[0].shape == (forward.rows, HEADS, LATENT)


def test_new_tokens_are_written_to_their_slots(make_runner):
    forward = prepared(make_runner, ForwardMode.DECODE)
    before = forward.pool.kv.clone()
    attend(forward, torch.full((forward.rows, TOPK), -1, dtype=torch.int32))
    changed = (before != forward.pool.kv).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == [600, 601]


def test_strided_locations_are_refused_before_anything_is_written(make_runner):
    forward = prepared(make_runner, ForwardMode.DECODE)
    forward.batch.out_cache_loc = torch.arange(4)[::2]
    before = forward.pool.kv.clone()
    with pytest.raises(ValueError, match="would land in wrong slots"):
        attend(forward, torch.full((forward.rows, TOPK), -1, dtype=torch.int32))
    assert torch.equal(before, forward.pool.kv)


def test_dense_prefill_only_on_hopper_and_only_when_short(make_runner, monkeypatch):
    forward = prepared(make_runner, ForwardMode.EXTEND)
    batch, config = forward.batch, forward.backend.config
    assert not forward.backend.use_mha
    attention = SimpleNamespace(device_sm=90, kv_cache_dtype=torch.bfloat16, sinks=False)
    hopper = SimpleNamespace(attention=attention, split_prefill=False, divided_context=False)
    assert not dense_prefill.DensePrefill(config).fits(batch)
    dense = dense_prefill.DensePrefill(hopper)
    monkeypatch.setattr(adapter, "dense_prefill_limit", lambda: 30)
    assert dense.fits(batch)
    monkeypatch.setattr(adapter, "dense_prefill_limit", lambda: 29)
    assert not dense.fits(batch)
    monkeypatch.setattr(adapter, "dense_prefill_limit", lambda: 30)
    with envs.SGLANG_MAX_KV_CHUNK_CAPACITY.override(38):
        assert not dense.fits(batch)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    assert not dense.fits(batch)
