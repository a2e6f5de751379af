"""Sparse decode against float32 PyTorch, with NaN in every slot, entry and part that may not be read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import tried
from sparse_rows import LATENT, assert_near, case, quantised

from nsa_backend.kernels.sparse_decode import Parts, sparse_decode
from nsa_backend.kernels.sparse_decode_plan import Join, Split, Tile
from nsa_backend.kernels.sparse_decode_torch import sparse_decode_torch

SMS = 132


@st.composite
def shapes(draw):
    rows = draw(st.integers(1, 5))
    topk = draw(st.sampled_from([33, 64, 100, 256]))
    return rows, topk, [draw(st.integers(0, topk)) for _ in range(rows)]


@given(
    shape=shapes(), heads=st.sampled_from([1, 4, 8, 16, 24, 40]), sms=st.sampled_from([1, 3, 132]), holes=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
@tried(30)
def test_rows_of_any_length_split_in_any_way(device, shape, heads, sms, holes, seed):
    rows, topk, lens = shape
    inputs = case(device, rows, heads, topk, lens, torch.float32, seed, holes=holes)
    parts = Parts.allocate(rows, heads, LATENT, topk, sms, device)
    parts.out.fill_(float("nan"))
    parts.lse.fill_(float("nan"))
    out = sparse_decode(*inputs, 0.1, num_sms=sms, parts=parts)
    assert_near(out, sparse_decode_torch(*inputs, 0.1), torch.float32)


@pytest.mark.parametrize("heads", [3, 16, 40])
@pytest.mark.parametrize("sms", [1, SMS])
@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_an_fp8_cache(device, half, heads, sms, logit_cap):
    """Scales of quarters far apart; every byte of a slot that no row names is NaN."""
    q_nope, q_rope, kv, slots, lens = case(device, 3, heads, 100, [100, 0, 37], half, 4, latent=128, holes=True)
    kv[..., :64] *= 50
    packed, values = quantised(kv, 128, half)
    want = sparse_decode_torch(q_nope, q_rope, values, slots, lens, 0.02, logit_cap)
    out = sparse_decode(q_nope, q_rope, packed, slots, lens, 0.02, num_sms=sms, logit_cap=logit_cap)
    assert_near(out, want, half)
    unscaled = sparse_decode_torch(q_nope, q_rope, kv, slots, lens, 0.02, logit_cap)
    assert (out.float().cpu() - unscaled).norm() > 5e-3 * want.norm()
    assert torch.equal(sparse_decode_torch(q_nope, q_rope, packed, slots, lens, 0.02, logit_cap), want)


@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_the_models_shape_in_fp8(device, half, heads):
    q_nope, q_rope, kv, slots, lens = case(device, 3, heads, 2048, [2048, 1, 300], half, 6, latent=512, rope=64)
    packed, values = quantised(kv, 512, half)
    assert packed.shape[-1] == 656
    out = sparse_decode(q_nope, q_rope, packed, slots, lens, 576**-0.5, num_sms=SMS)
    assert_near(out, sparse_decode_torch(q_nope, q_rope, values, slots, lens, 576**-0.5), half)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("sms", [1, SMS])
def test_the_models_shape_in_sixteen_bits(device, half, heads, sms):
    inputs = case(device, 3, heads, 2048, [2048, 0, 300], half, heads, latent=512, rope=64)
    out = sparse_decode(*inputs, 576**-0.5, num_sms=sms)
    assert_near(out, sparse_decode_torch(*inputs, 576**-0.5), half)


def test_capped_scores(device):
    inputs = case(device, 2, 16, 64, [64, 50], torch.float32, 3)
    out = sparse_decode(*inputs, 2.0, num_sms=SMS, logit_cap=5.0)
    assert_near(out, sparse_decode_torch(*inputs, 2.0, 5.0), torch.float32)
    assert not torch.allclose(out.cpu(), sparse_decode_torch(*inputs, 2.0), atol=1e-2)


def test_scores_far_apart_keep_the_best(device):
    """One token of a part outweighs all others by more than float32 holds."""
    inputs = case(device, 1, 8, 128, [128], torch.float32, 5)
    assert_near(sparse_decode(*inputs, 1e3, num_sms=SMS), sparse_decode_torch(*inputs, 1e3), torch.float32)


def test_equal_shapes_give_equal_bits_whatever_the_memory(device, half):
    inputs = case(device, 3, 16, 256, [256, 100, 7], half, 9)
    roomy = Parts.allocate(8, 16, LATENT, 256, SMS, device)
    roomy.out.fill_(float("nan"))
    assert torch.equal(sparse_decode(*inputs, 0.1, num_sms=SMS), sparse_decode(*inputs, 0.1, num_sms=SMS, parts=roomy))


@pytest.mark.parametrize("tile", [Tile(16, 16, 4, 1), Tile(32, 64, 4, 2), Tile(64, 64, 8, 2), Tile(16, 32, 4, 3, programs=2)])
@pytest.mark.parametrize("join", [Join(2, 64, 4), Join(16, 32, 2)])
def test_other_tiles_compute_the_same(device, tile, join):
    inputs = case(device, 2, 20, 256, [256, 31], torch.float32, 8)
    out = sparse_decode(*inputs, 0.1, num_sms=SMS, tile=tile, join=join)
    assert_near(out, sparse_decode_torch(*inputs, 0.1), torch.float32)


def test_no_rows(device):
    inputs = case(device, 1, 8, 64, [64], torch.float32, 1)
    out = sparse_decode(inputs[0][:0], inputs[1][:0], inputs[2], inputs[3][:0], inputs[4][:0], 0.1, num_sms=SMS)
    assert out.shape == (0, 8, LATENT)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 33, 64, 132, 133, 500])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_split_covers_a_row_and_fills_the_gpu_once(rows, heads, fp8):
    tile = Tile.of(rows, heads, fp8=fp8)
    split = Split.of(rows, heads, 2048, SMS, tile)
    assert split.chunk % tile.tokens == 0
    assert (split.parts - 1) * split.chunk < 2048 <= split.parts * split.chunk
    programs = rows * -(-heads // tile.heads)
    assert split.parts == 1 or split.parts * programs <= tile.programs * SMS + programs


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_memory_for_every_smaller_batch(heads, fp8):
    parts = Parts.allocate(64, heads, 512, 2048, SMS, "cpu", fp8=fp8)
    for rows in range(1, 65):
        split = Split.of(rows, heads, 2048, SMS, Tile.of(rows, heads, fp8=fp8))
        assert split.parts == 1 or parts.hold(rows * split.parts * heads)
    assert parts.out.numel() == 512 * parts.lse.numel() <= 512 * 16 * 4 * SMS


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, lambda t: t[..., ::2]),
        (1, lambda t: t[:1]),
        (2, lambda t: t.half()),
        (2, lambda t: t[..., :-1]),
        (2, lambda t: t.to(torch.float8_e4m3fn)),
        (3, lambda t: t.long()),
        (3, lambda t: t[:1]),
        (4, lambda t: t.long()),
        (4, lambda t: t.repeat_interleave(2)[::2]),
    ],
    ids=[
        "query by twos",
        "rows",
        "dtype",
        "width",
        "fp8 without scales",
        "slots int64",
        "rows of slots",
        "lens int64",
        "strided lens",
    ],
)
def test_what_would_be_misread_is_refused(device, index, change):
    inputs = list(case(device, 2, 8, 64, [64, 3], torch.float32, 2))
    inputs[index] = change(inputs[index])
    with pytest.raises(ValueError, match="the kernel would misread it"):
        sparse_decode(*inputs, 0.1, num_sms=SMS)


def test_heads_past_what_the_kernel_reaches_are_refused():
    """Of 128 heads that lie rows * 512 apart 32768 rows are too many."""
    _, rope, kv, slots, lens = (tensor.to("meta") for tensor in case("cpu", 2, 8, 64, [64, 3], torch.float32, 2))
    query = torch.empty_strided((2, 8, LATENT), (LATENT, 2**28, 1), device="meta")
    with pytest.raises(ValueError, match=r"q_nope must be .* strides .*268435456.*the kernel would misread it"):
        sparse_decode(query, rope, kv, slots, lens, 0.1, num_sms=SMS)
