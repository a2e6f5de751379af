"""What decodes bfloat16 against float32, padded heads and padding rows included; NaN in every slot nobody chose."""

from dataclasses import replace

import pytest
import torch
from joined_parts import joined

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.context_part import ContextPart
from nsa_backend.attention.flashmla_kv import FlashMlaKv
from nsa_backend.attention.implementations import build_attention
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.attention.torch_reference import TorchSparseAttention
from nsa_backend.benchmarks.calls.overlapping import overlapping
from nsa_backend.benchmarks.calls.timing import captured_graph
from nsa_backend.config import AttentionConfig
from nsa_backend.testing.calls import calls
from nsa_backend.testing.shape import LATENT, ROPE, TOPK

pytestmark = pytest.mark.gpu

RELATIVE_ERROR = 5e-3  # bfloat16 output of a float32 softmax: 2.2e-3 was measured for either kernel


def assert_near(out: torch.Tensor, want: torch.Tensor) -> None:
    error = (out - want).norm() / want.norm()
    assert error < RELATIVE_ERROR, f"relative error {error:.2e}"


def config_of(heads: int, kv_cache_dtype: torch.dtype = torch.bfloat16, **facts):
    """Of a rank with so many heads on this GPU."""
    return AttentionConfig(
        device_sm=90, num_heads=heads, kv_cache_dtype=kv_cache_dtype, index_topk=TOPK, device=torch.device("cuda"), **facts
    )


def sparse_case(rows: int, heads: int, slots: int = 1 << 15):
    """Random rows of all lengths; unchosen slots are NaN.

    Where there are enough rows, row 0 is a padding row without slots and row 1 one of a captured batch: length 1, slot 0.
    """
    generator = torch.Generator(device="cuda").manual_seed(rows * 1000 + heads)
    lens = torch.randint(1, TOPK + 1, (rows,), generator=generator, device="cuda", dtype=torch.int32)
    lens[-1] = TOPK
    if rows > 1:
        lens[0] = 0
    chosen = torch.stack([torch.randperm(slots, generator=generator, device="cuda")[:TOPK] for _ in range(rows)]).int()
    chosen = torch.where(torch.arange(TOPK, device="cuda") < lens[:, None], chosen, -1)
    if rows > 1:
        chosen[0] = -1
    if rows > 2:
        lens[1] = 1
        chosen[1] = -1
        chosen[1, 0] = 0
    kv = torch.full((slots, 1, LATENT + ROPE), float("nan"), dtype=torch.bfloat16, device="cuda")
    used = chosen[chosen >= 0].unique().long()
    kv[used] = torch.randn(len(used), 1, LATENT + ROPE, generator=generator, device="cuda").bfloat16()
    q = torch.randn(rows, heads, LATENT + ROPE, generator=generator, device="cuda").bfloat16()
    cu = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    cu[1:] = lens.cumsum(0)
    return SparseInputs(
        q_nope=q[..., :LATENT].contiguous(),
        q_rope=q[..., LATENT:].contiguous(),
        kv_cache=kv,
        topk_slots=chosen,
        nsa_cache_seqlens=lens,
        nsa_cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device="cuda"),
        nsa_cu_seqlens_k=cu,
        sm_scale=(LATENT + ROPE) ** -0.5,
        logit_cap=0.0,
    )


def on_fp8(inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The case's KV as an FP8 cache has it, NaN where nobody chose, and what that holds in bfloat16."""
    kv = inputs.kv_cache
    used = inputs.topk_slots[inputs.topk_slots >= 0].unique().long()
    packed = torch.full((len(kv), 1, 656), 0x7F, dtype=torch.uint8, device="cuda")  # NaN in fp8, bfloat16 and float32 alike
    nope, rope = calls.quantize_k_cache()(kv[used, :, :LATENT].contiguous(), kv[used, :, LATENT:])
    packed[used] = torch.cat([nope.view(torch.uint8), rope.view(torch.uint8)], dim=-1)
    # FlashMLA rounds a scale to bfloat16 before it multiplies, which alone moves a score by up to 0.4 %.
    scales = packed[..., LATENT : LATENT + 16].view(torch.float32)
    scales.copy_(scales.bfloat16())
    fp8, bf16 = packed.view(torch.float8_e4m3fn), torch.zeros_like(kv)
    bf16[used] = adapter.dequantize_k_cache_paged(fp8, used.int())
    return fp8, bf16


def unrounded(fp8: torch.Tensor) -> torch.Tensor:
    """What an FP8 cache holds in float32, as sparse_decode reads it, which scales scores and no values."""
    scales = fp8[..., LATENT : LATENT + 16].view(torch.float32)
    latent = fp8[..., :LATENT].float().unflatten(-1, (4, -1)) * scales[..., None]
    return torch.cat([latent.flatten(-2), fp8[..., LATENT + 16 :].view(torch.bfloat16).float()], dim=-1)


@pytest.mark.parametrize("name", ["fa3", "flashmla_sparse", "sparse_decode"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 140])
def test_against_float32(name, heads, rows):
    inputs = sparse_case(rows, heads)
    out = build_attention(name, "--nsa-decode-backend", config_of(heads)).forward(inputs).float()
    assert out.shape == (rows, heads, LATENT)
    real = slice(1, None) if rows > 1 else slice(None)
    want = TorchSparseAttention().forward(inputs).float()[real]
    assert out.isfinite().all()
    assert_near(out[real], want)


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize(("requests", "rows_per_request"), [(1, 4), (8, 4), (33, 4), (8, 2), (8, 6), (140, 4)])
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.95, 1.0])
def test_rows_of_requests_together(heads, requests, rows_per_request, overlap):
    """sparse_verify beside fa3 and float32, twice: the first call's marks are gone."""
    rows, slots = requests * rows_per_request, 1 << 15
    config = config_of(heads)
    generator = torch.Generator(device="cuda").manual_seed(rows)
    given = sparse_case(rows, heads, slots)
    found = overlapping(requests, rows_per_request, TOPK, overlap, slots, generator)
    found = torch.where(torch.arange(TOPK, device="cuda") < given.nsa_cache_seqlens[:, None], found, -1)
    kv = torch.full_like(given.kv_cache, float("nan"))
    used = found[found >= 0].unique().long()
    kv[used] = torch.randn(len(used), *kv.shape[1:], generator=generator, device="cuda").bfloat16()
    given = replace(given, topk_slots=found, kv_cache=kv, rows_per_request=rows_per_request)
    real = given.nsa_cache_seqlens > 0
    together = build_attention("sparse_verify", "--nsa-decode-backend", config)
    outs = [together.forward(given) for _ in range(2)]
    assert torch.equal(*outs)
    assert (outs[0][~real] == 0).all()
    fa3 = build_attention("fa3", "--nsa-decode-backend", config).forward(given)
    for part in torch.arange(rows, device="cuda")[real].split(64):
        names = ("q_nope", "q_rope", "topk_slots", "nsa_cache_seqlens")
        want = TorchSparseAttention().forward(replace(given, **{name: getattr(given, name)[part] for name in names})).float()
        for out in (outs[0], fa3):
            assert_near(out[part].float(), want)


@pytest.mark.parametrize("name", ["fa3", "flashmla_sparse", "sparse_decode"])
@pytest.mark.parametrize("heads", [8, 64])
def test_graphs_share_the_padded_query(name, heads):
    """Two graphs of one implementation, replayed in turn after garbage went through the eager path."""
    config = config_of(heads)
    attention = build_attention(name, name, config)
    attention.reserve(33)
    cases = {rows: sparse_case(rows, heads) for rows in (7, 33)}
    want = {rows: build_attention(name, name, config).forward(inputs) for rows, inputs in cases.items()}
    outputs = {}

    def run(rows):
        outputs[rows] = attention.forward(cases[rows])

    graphs = {rows: captured_graph(lambda rows=rows: run(rows)) for rows in cases}
    for rows in (7, 33, 7, 33):
        attention.forward(replace(cases[33], q_nope=cases[33].q_nope * 100))
        for out in outputs.values():
            out.fill_(float("nan"))
        graphs[rows].replay()
        assert torch.equal(outputs[rows], want[rows])


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (2, 0), (7, 0), (33, 0), (7, 5)])
def test_flashmla_kv_on_fp8_pages(heads, rows, padding):
    """Against float32 on the values that the FP8 cache holds; unchosen tokens are NaN in scale and RoPE.

    `padding` rows of the metadata have no query, as where SGLang hands over the real rows alone.
    """
    inputs = sparse_case(rows, heads)
    fp8, bf16 = on_fp8(inputs)
    attention = FlashMlaKv(config_of(heads, torch.float8_e4m3fn))
    # Of metadata with other rows than the query's, `sparse_inputs` hands on no schedule.
    tiles = None if padding else attention._tiles(inputs.nsa_cache_seqlens)
    out = attention.forward(replace(inputs, kv_cache=fp8, schedule=tiles)).float()
    real = slice(1, None) if rows > 1 else slice(None)
    want = TorchSparseAttention().forward(replace(inputs, kv_cache=bf16)).float()[real]
    assert out.shape == (rows, heads, LATENT)
    assert out.isfinite().all()
    assert_near(out[real], want)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize(
    ("name", "fp8"),
    [("fa3", False), ("flashmla_sparse", False), ("sparse_decode", False), ("flashmla_kv", True), ("sparse_decode", True)],
)
def test_parts_of_ranks_joined_are_the_whole(name, fp8, rows, heads, ranks):
    """And each part's log-sum-exp is the reference's: in base 2, -inf where a rank has nothing of a row."""
    inputs = sparse_case(rows, heads)
    served, exact = on_fp8(inputs) if fp8 else (inputs.kv_cache, inputs.kv_cache)
    if fp8 and name == "sparse_decode":
        exact = unrounded(served)
    parts = []
    for rank in range(ranks):
        config = config_of(heads, served.dtype, context_ranks=ranks, context_rank=rank)
        attention, part = build_attention(name, "--nsa-decode-backend", config), ContextPart(ranks, rank)
        mine = replace(inputs, kv_cache=served[rank::ranks].contiguous())
        out, lse = attention.forward_part(mine, part.at(inputs.topk_slots, None, 0))
        want = replace(inputs, kv_cache=exact[rank::ranks].contiguous())
        wanted, wanted_lse = TorchSparseAttention().forward_part(want, ContextPart(ranks, rank).at(inputs.topk_slots, None, 0))
        empty = wanted_lse.isneginf()
        assert torch.equal(lse.isneginf(), empty)
        assert (out[empty] == 0).all()
        torch.testing.assert_close(lse[~empty], wanted_lse[~empty], atol=5e-3, rtol=0)
        assert (out.float() - wanted.float()).norm() <= RELATIVE_ERROR * wanted.float().norm()
        parts.append((out, lse))
    want = TorchSparseAttention().forward(replace(inputs, kv_cache=exact)).float()
    assert (joined(parts).float() - want).norm() < RELATIVE_ERROR * want.norm()
