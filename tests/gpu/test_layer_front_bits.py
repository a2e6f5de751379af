"""The front of a layer in two launches writes SGLang's bits: its own kernels on the same rows, ordinary and hard ones."""

import pytest
import torch

from nsa_backend.kernels.layer_front_weights import Scales
from nsa_backend.releases import layer_front_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(layer_front_problem() is not None, reason="the layers of this release are others"),
]


@pytest.fixture(scope="module", autouse=True)
def _sglang(make_runner):
    """SGLang with the plugin, and options published for this process, which its layers read."""
    make_runner(num_steps=1, context=64)


@pytest.mark.parametrize("q_rank", [1536, 2048])
@pytest.mark.parametrize("heads", [8, 16, 20, 128])
@pytest.mark.parametrize("scales", [None, *Scales])
@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 3, 48, 200])
@pytest.mark.parametrize("fused", [False, True], ids=["deepseek", "glm"])
def test_bits(q_rank, heads, scales, packed, rows, fused):
    from nsa_backend.adapters.dsa.layer_front.same_bits import differing_parts
    from nsa_backend.testing.front_layer import front_layer

    torch.manual_seed(rows)
    kv = torch.empty(1, 1, 656 if packed else 576, dtype=torch.float8_e4m3fn if packed else torch.bfloat16, device="cuda")
    assert differing_parts(front_layer(q_rank, heads, fused), kv, scales, rows) == []


def test_scales_of_index_queries_whose_largest_value_is_any():
    """Each bfloat16 is one head's only value: SGLang rounds a logarithm up, and our kernels an exponent."""
    from nsa_backend.adapters.dsa.layer_front import builtin
    from nsa_backend.adapters.dsa.layer_front.rule import weights_of
    from nsa_backend.kernels.rope_quantise import index_queries, rope_quantise
    from nsa_backend.testing.front_layer import front_layer

    attention = front_layer(1536, 16, False)
    weights, heads = weights_of(attention), attention.indexer.n_heads
    every = torch.arange(0x7F80, dtype=torch.int16, device="cuda").view(torch.bfloat16).view(-1, heads)
    query = torch.zeros(*every.shape, 128, dtype=torch.bfloat16, device="cuda")
    query[..., -1] = every
    gates, positions = torch.randn(every.shape, device="cuda"), torch.arange(len(every), device="cuda") % len(weights.cos_sin)
    q_rope = torch.zeros(len(every), 16, 64, dtype=torch.bfloat16, device="cuda")
    theirs = builtin.rope_quantise(attention, query.clone(), gates, q_rope.clone(), positions)[:2]
    alone = index_queries(query, gates, weights, positions)
    in_front = rope_quantise(query, gates, q_rope, weights, positions)[:2]
    for ours in (alone, in_front):
        for found, wanted in zip(ours, theirs, strict=True):
            assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("scales", list(Scales))
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_an_input_that_was_quantised_once_gives_the_products_of_one_that_a_projection_quantises(scales, rows):
    """DeepGEMM's products are the same bits whoever quantises, which two projections of one input rely on."""
    from sglang.srt.layers.quantization import fp8_utils

    from nsa_backend.kernels.projection_inputs import quantise

    x = torch.randn(rows, 1536, device="cuda").bfloat16()
    weight = torch.randn(2112, 1536, device="cuda").to(torch.float8_e4m3fn)
    weight_scale = torch.rand(17, 12, device="cuda")
    run = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    own = run(x, weight, [128, 128], weight_scale, act_scale_ue8m0=scales is Scales.POWERS_OF_TWO)
    values, found = quantise(x, scales)
    assert torch.equal(own, run(values, weight, [128, 128], weight_scale, input_scale=found))
