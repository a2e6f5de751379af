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


@pytest.mark.parametrize("scales", list(Scales))
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_an_input_that_was_quantised_once_gives_the_products_of_one_that_a_projection_quantises(scales, rows):
    """DeepGEMM's products are the same bits whoever quantises, which two projections of one input rely on."""
    from sglang.srt.layers.quantization import fp8_utils

    from nsa_backend.kernels.layer_front import quantise

    x = torch.randn(rows, 1536, device="cuda").bfloat16()
    weight = torch.randn(2112, 1536, device="cuda").to(torch.float8_e4m3fn)
    weight_scale = torch.rand(17, 12, device="cuda")
    run = fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    own = run(x, weight, [128, 128], weight_scale, act_scale_ue8m0=scales is Scales.POWERS_OF_TWO)
    values, found = quantise(x, scales)
    assert torch.equal(own, run(values, weight, [128, 128], weight_scale, input_scale=found))
