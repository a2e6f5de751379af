"""What other models than DeepSeek-V3.2 ask of the kernels: learnable sinks, and dense prefill with heads of 256."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_attention import LATENT, RELATIVE_ERROR, assert_near, config_of, sparse_case

from nsa_backend.adapters.installed import adapter
from nsa_backend.attention.dense_prefill import DensePrefill
from nsa_backend.attention.implementations import build_attention
from nsa_backend.attention.torch_reference import TorchSparseAttention

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernel_adds_sinks():
    """Skips releases whose kernel adds none; they have no model with sinks either."""
    if "attn_sink" not in inspect.signature(adapter.flash_mla().flash_mla_sparse_fwd).parameters:
        pytest.skip("FlashMLA adds no sinks in this release")


@pytest.mark.usefixtures("kernel_adds_sinks")
@pytest.mark.parametrize("heads", [4, 8, 32, 64])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_flashmla_sparse_adds_sinks(heads, rows):
    config = config_of(heads, sinks=True)
    sink = 6 + torch.randn(heads, generator=torch.Generator().manual_seed(rows)).cuda()  # as much as a thousand keys
    inputs = replace(sparse_case(rows, heads), attn_sink=sink)
    out = build_attention("flashmla_sparse", "--dsa-decode-backend", config).forward(inputs).float()
    real = slice(1, None) if rows > 1 else slice(None)
    want = TorchSparseAttention().forward(inputs).float()[real]
    assert out.shape == (rows, heads, LATENT)
    assert out.isfinite().all()
    assert_near(out[real], want)
    without = TorchSparseAttention().forward(replace(inputs, attn_sink=None)).float()[real]
    assert (without - want).norm() / want.norm() > 10 * RELATIVE_ERROR


@pytest.mark.parametrize(("qk_dim", "v_dim"), [(192, 128), (256, 256)], ids=["deepseek-v3.2", "glm-5"])
@pytest.mark.parametrize("heads", [8, 64])
def test_dense_prefill_of_a_models_heads(qk_dim, v_dim, heads):
    """Two requests, one on a cached prefix, against float32."""
    new, all_tokens = [100, 37], [300, 37]
    generator = torch.Generator(device="cuda").manual_seed(heads)

    def random(tokens: int, width: int) -> torch.Tensor:
        return torch.randn(tokens, heads, width, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = random(sum(new), qk_dim), random(sum(all_tokens), qk_dim), random(sum(all_tokens), v_dim)
    layer = SimpleNamespace(
        tp_q_head_num=heads, tp_k_head_num=heads, tp_v_head_num=heads, head_dim=qk_dim, v_head_dim=v_dim, scaling=qk_dim**-0.5
    )
    ends = [torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0).int() for lengths in (new, all_tokens)]
    metadata = SimpleNamespace(cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], max_seq_len_q=100, max_seq_len_k=300)
    config = SimpleNamespace(attention=config_of(heads), split_prefill=False, divided_context=False)
    out = DensePrefill(config).forward(q, k, v, layer, metadata).float()
    want = []
    parts = (q.float().split(new), k.float().split(all_tokens), v.float().split(all_tokens))
    for rows, keys, values in zip(*parts, strict=True):
        scores = torch.einsum("qhd,khd->hqk", rows, keys) * layer.scaling
        seen = torch.ones_like(scores[0], dtype=torch.bool).tril(len(keys) - len(rows))
        want.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    want = torch.cat(want)
    assert_near(out.view_as(want), want)
