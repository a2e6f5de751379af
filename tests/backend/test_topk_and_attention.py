"""The torch implementations that the demo runs and the GPU tests compare with, against loops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried

from nsa_backend.attention.sparse_inputs import SparseInputs, append_rows, sparse_inputs
from nsa_backend.attention.torch_reference import TorchSparseAttention
from nsa_backend.indexer.metadata import IndexerMetadata
from nsa_backend.indexer.topk import TorchTopK

NAN = float("nan")


def random_logits(rng, rows: int, width: int):
    """Logits with NaN wherever a row may not look, row starts and lengths."""
    starts = rng.integers(0, width, rows)
    lengths = np.array([rng.integers(1, width - s + 1) for s in starts])
    logits = np.full((rows, width), NAN, dtype=np.float32)
    for i in range(rows):
        logits[i, starts[i] : starts[i] + lengths[i]] = rng.permutation(lengths[i])
    return logits, starts.astype(np.int32), lengths.astype(np.int32)


@given(rows=st.integers(1, 9), width=st.integers(1, 60), topk=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
@tried(60)
def test_topk_reads_only_its_window(rows, width, topk, seed):
    logits, starts, lengths = random_logits(np.random.default_rng(seed), rows, width)
    got = TorchTopK().positions(torch.from_numpy(logits), torch.from_numpy(lengths), topk, torch.from_numpy(starts))
    assert got.shape == (rows, topk)
    assert got.dtype == torch.int32
    for i in range(rows):
        window = logits[i, starts[i] : starts[i] + lengths[i]]
        best = set(np.argsort(-window)[:topk].tolist())
        chosen = got[i].tolist()
        assert set(chosen) - {-1} == best
        assert chosen.count(-1) == topk - len(best)


def indexer(fuse: bool, **more) -> tuple[IndexerMetadata, torch.Tensor]:
    """Three rows of two requests, and the slots of the requests' first 128 tokens."""
    pages = torch.tensor([[7, 30], [16, 2]], dtype=torch.int32)
    slots = (64 * pages[..., None] + torch.arange(64)).flatten(1)
    attn_metadata = SimpleNamespace(
        nsa_seqlens_expanded=torch.tensor([3, 2, 4], dtype=torch.int32),
        page_table_1=None,
        real_page_table=pages,
        table_rows=torch.tensor([0, 0, 1], dtype=torch.int32),
        indexer_k_start_end=None,
        topk_indices_offset=None,
    )
    vars(attn_metadata).update(more)
    return IndexerMetadata(attn_metadata, TorchTopK(), fuse), slots


@pytest.mark.parametrize("fuse", [True, False])
def test_transform_gives_slots_where_fused_and_positions_where_not(fuse):
    metadata, slots = indexer(fuse)
    logits = torch.tensor([[1.0, 3, 2, NAN], [5, 1, NAN, NAN], [1, 2, 3, 4]])
    got = metadata.topk_transform(logits, 2)
    positions = torch.tensor([[1, 2], [0, 1], [3, 2]])
    want = slots[torch.tensor([[0], [0], [1]]), positions] if fuse else positions
    assert got.tolist() == want.tolist()


def test_a_chunk_of_a_prefill_finds_its_requests():
    metadata, slots = indexer(True)
    got = metadata.topk_transform(
        torch.tensor([[NAN, 5.0, 1, NAN]]),
        1,
        ks=torch.tensor([1], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([1]),
        ke_offset=torch.tensor([2], dtype=torch.int32),
        batch_idx_list=torch.tensor([1]),
    )
    assert got.tolist() == [[slots[1, 0].item()]]


def test_selections_are_written_where_they_are_to_lie():
    """Chunk after chunk, as SGLang's indexer copies them; behind them, and afterwards, nothing is."""
    metadata, slots = indexer(True)
    logits = torch.tensor([[1.0, 3, 2, NAN], [5, 1, NAN, NAN], [1, 2, 3, 4]])
    starts, lengths = torch.zeros(3, dtype=torch.int32), metadata.get_seqlens_expanded()
    out = torch.full((4, 2), -7, dtype=torch.int32)

    def chunk(rows: slice) -> torch.Tensor:
        chosen = {"ke_offset": lengths[rows], "batch_idx_list": metadata.attn_metadata.table_rows[rows]}
        return metadata.topk_transform(logits[rows], 2, ks=starts[rows], **chosen)

    with metadata.writing(out):
        first, last = chunk(slice(2)), chunk(slice(2, 3))
    assert (first.data_ptr(), last.data_ptr()) == (out.data_ptr(), out[2].data_ptr())
    assert out[:3].tolist() == slots[torch.tensor([[0], [0], [1]]), torch.tensor([[1, 2], [0, 1], [3, 2]])].tolist()
    assert out[3].tolist() == [-7, -7]
    with metadata.writing(out.long()):  # of another form
        assert chunk(slice(2)).tolist() == first.tolist()
    assert chunk(slice(2)).data_ptr() != out.data_ptr()


@pytest.mark.parametrize("chunk", [False, True])
def test_ragged_topk_counts_from_where_the_request_begins(chunk):
    """The whole forward takes the offsets of the metadata, a chunk those that SGLang cut for it."""
    offsets = torch.tensor([0, 0, 50], dtype=torch.int32)
    rows = slice(2, 3) if chunk else slice(None)
    metadata, _ = indexer(True, topk_indices_offset=torch.full_like(offsets, 9) if chunk else offsets)
    logits = torch.tensor([[1.0, 3, 2, NAN, NAN], [5, 1, NAN, NAN, NAN], [NAN, 1, 2, 4, 3]])
    more = {"topk_indices_offset_override": offsets[rows], "ke_offset": torch.tensor([4], dtype=torch.int32)} if chunk else {}
    got = metadata.topk_transform(logits[rows], 2, ks=torch.tensor([0, 0, 1], dtype=torch.int32)[rows], **more)
    assert got.tolist() == [[1, 2], [0, 1], [52, 53]][rows]


@pytest.mark.parametrize("fuse", [True, False])
def test_a_prefill_without_logits_keeps_every_token(fuse):
    """SGLang's indexer computes none where no row is longer than index_topk; the logits it hands over are nobody's."""
    metadata, slots = indexer(fuse, indexer_k_start_end=())
    got = metadata.topk_transform(torch.full((3, 5), NAN), 5)
    rows = torch.where(torch.tensor([[0], [0], [1]]) == 0, slots[0, :4], slots[1, :4]) if fuse else torch.arange(4).expand(3, 4)
    lengths = [3, 2, 4]
    want = [rows[i, :n].tolist() + [-1] * (5 - n) for i, n in enumerate(lengths)]
    assert got.tolist() == want
    assert metadata.topk_transform(torch.zeros(3, 5), 5) is got  # of the next layer


def test_a_prefill_without_logits_on_dequantised_kv():
    offsets = torch.tensor([0, 0, 50], dtype=torch.int32)
    metadata, _ = indexer(True, indexer_k_start_end=(), topk_indices_offset=offsets)
    got = metadata.topk_transform(torch.full((3, 4), NAN), 4)
    assert got.tolist() == [[0, 1, 2, -1], [0, 1, -1, -1], [50, 51, 52, 53]]


@given(rows=st.integers(1, 5), heads=st.integers(1, 3), topk=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
@tried(40)
def test_attention_against_a_loop_with_poison(rows, heads, topk, seed):
    rng = np.random.default_rng(seed)
    latent, rope, slots = 6, 4, 30
    chosen = np.full((rows, topk), -1, dtype=np.int32)
    for i in range(rows):
        count = rng.integers(0, topk + 1)
        chosen[i, :count] = rng.permutation(slots)[:count]
    kv = np.full((slots, 1, latent + rope), NAN, dtype=np.float32)
    used = np.unique(chosen[chosen >= 0])
    kv[used] = rng.normal(size=(len(used), 1, latent + rope))
    q = rng.normal(size=(rows, heads, latent + rope)).astype(np.float32)
    inputs = SparseInputs(
        q_nope=torch.from_numpy(q[..., :latent]), q_rope=torch.from_numpy(q[..., latent:]), kv_cache=torch.from_numpy(kv),
        topk_slots=torch.from_numpy(chosen), nsa_cache_seqlens=None, nsa_cu_seqlens_q=None, nsa_cu_seqlens_k=None, sm_scale=0.3,
        logit_cap=0.0,
    )  # fmt: skip
    got = TorchSparseAttention().forward(inputs).numpy()
    for i in range(rows):
        keys = kv[chosen[i][chosen[i] >= 0], 0]
        for h in range(heads):
            weights = [math.exp(0.3 * float(q[i, h] @ key)) for key in keys]
            want = sum(w * key[:latent] for w, key in zip(weights, keys, strict=True)) / sum(weights) if weights else 0
            np.testing.assert_allclose(got[i, h], want, rtol=1e-4, atol=1e-5)


def test_queries_are_split_the_same_way_joined_or_not():
    layer = SimpleNamespace(tp_q_head_num=2, v_head_dim=4, head_dim=6, scaling=0.5, logit_cap=0.0)
    lengths, sums = torch.tensor([4, 5, 6, 0], dtype=torch.int32), torch.tensor([0, 4, 9, 15, 15], dtype=torch.int32)
    metadata = SimpleNamespace(
        nsa_cache_seqlens_int32=lengths,
        nsa_cu_seqlens_q=torch.arange(5),
        nsa_cu_seqlens_k=sums,
        schedule=None,
        rows_per_request=1,
    )
    joined = torch.randn(3, 2, 6)
    split = joined[..., :4].reshape(3, 8), joined[..., 4:].reshape(3, 4)
    for q, q_rope in ((joined.view(3, 12), None), split):
        inputs = sparse_inputs(q, q_rope, layer, None, None, metadata)
        assert torch.equal(inputs.q_nope, joined[..., :4])
        assert torch.equal(inputs.q_rope, joined[..., 4:])
        # The metadata has a row that SGLang padded and did not hand over.
        assert inputs.nsa_cache_seqlens.tolist() == [4, 5, 6]
        assert inputs.nsa_cu_seqlens_q.tolist() == [0, 1, 2, 3]
        assert inputs.nsa_cu_seqlens_k.tolist() == [0, 4, 9, 15]
        out = torch.empty(4, 8)
        given = sparse_inputs(q, q_rope, layer, None, None, metadata, out=out[:3]).out
        assert (given.shape, given.data_ptr()) == ((3, 2, 4), out.data_ptr())
        for other in (out, out[:3].bfloat16(), torch.empty(3, 16)[:, ::2], None):
            assert sparse_inputs(q, q_rope, layer, None, None, metadata, out=other).out is None


def test_rows_the_indexer_did_not_see_choose_nothing():
    padded = append_rows(torch.ones(2, 3, dtype=torch.int32), 4, -1)
    assert padded.tolist() == [[1, 1, 1], [1, 1, 1], [-1, -1, -1], [-1, -1, -1]]
    assert append_rows(torch.ones(2, dtype=torch.int32), 3, 0).tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="rows would mix"):
        append_rows(torch.ones(2, 3, dtype=torch.int32), 1, -1)
