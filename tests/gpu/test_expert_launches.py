"""SGLang's Triton experts with one launch before both products and one between give the bits that they give with SGLang's.

The launches have SGLang's fast exponential and divisions, and the products are SGLang's own. A row's sums do not depend on
where in a block it lies, so the order that atomics give rows of an expert changes nothing. Products of ours are near SGLang's.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

import pytest
import torch
from near_experts import expect_near

from nsa_backend.adapters import expert_products, experts, shared_expert
from nsa_backend.benchmarks.tuning.experts import RANKS, Config, Rank, config, looked_up, lookup_of, shipped
from nsa_backend.kernels import whole_experts
from nsa_backend.kernels.expert_activation import activate
from nsa_backend.kernels.expert_order import order, problem
from nsa_backend.testing.process import start_sglang

pytestmark = pytest.mark.gpu

TOKENS = (8, 16, 33, 64, 128)
OF_PREFILLS = (2048, 5001)
PLAIN, BULK = (config(16, 128, 128, 1, 4, 3, bulk=bulk) for bulk in (False, True))
OTHER_TILES = {"plain": (PLAIN, PLAIN), "the first in bulk": (BULK, PLAIN), "bulk": (PLAIN, BULK), "alone": (PLAIN, None)}


@pytest.fixture(scope="module", params=["v3.2-tp8", "glm-5-tp8"])
def rank(request):
    start_sglang()
    return Rank(RANKS[request.param])


def inputs(rank: Rank, tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states and choices, some of them of no expert here."""
    torch.manual_seed(tokens)
    shares, chosen = rank.routed(tokens)
    chosen[torch.rand(chosen.shape, device="cuda") < 0.1] = -1
    return torch.randn(tokens, rank.shape.hidden, device="cuda").bfloat16(), (shares, chosen)


@pytest.fixture
def ours(monkeypatch):
    """Returns a function of a call of SGLang's experts to what it gives with our launches around products, which have run."""
    module, served = import_module(experts.RUNNER), []
    hooked = partial(experts.experts, module.fused_experts_impl)
    for tell in ("tell", "tell_of_many"):
        monkeypatch.setattr(expert_products, tell, lambda *shape: served.append(shape))

    def run(call) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(module, "fused_experts_impl", hooked)
            served.clear()
            found = call()
            assert served
        return found

    return run


@pytest.fixture
def sglangs_products(monkeypatch):
    """Some tokens have SGLang's products where a server has both in one launch."""
    monkeypatch.setattr(whole_experts, "problem", lambda *_: "SGLang's are compared")


def tiles_of(rank: Rank, tokens: int, tiles: str) -> tuple[Config, Config | None]:
    """Of both products."""
    of_table = {"sglang": looked_up, "shipped": shipped}
    pair = of_table[tiles](rank.shape, tokens) if tiles in of_table else OTHER_TILES[tiles]
    if pair is None:
        pytest.skip("this package has no tiles of so many tokens on this GPU")
    return pair


@pytest.mark.usefixtures("sglangs_products")
@pytest.mark.parametrize("tiles", ["sglang", "shipped", *OTHER_TILES])
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_have_the_bits_of_sglangs(rank, ours, tokens, tiles):
    x, routed = inputs(rank, tokens)
    call = rank.call(x, routed, lookup_of(*tiles_of(rank, tokens, tiles)))
    found = ours(call)  # before SGLang's, whose memory would fake a pass
    assert torch.equal(found, call())


@pytest.mark.parametrize("tokens", [*TOKENS, 400, 700, 1024])
def test_experts_of_one_launch_are_near_those_of_sglangs(rank, ours, monkeypatch, tokens):
    """In tiles of every number of rows. Tensor cores keep some 14 bits of a sum, as SGLang has them otherwise."""
    monkeypatch.setattr(expert_products, "tiles_for", None)  # of SGLang's products alone
    x, routed = inputs(rank, tokens)
    call = rank.call(x, routed, lookup_of(*tiles_of(rank, tokens, "sglang")))
    found, again = ours(call), ours(call)
    assert torch.equal(found, again)
    expect_near(found, call())


@pytest.mark.parametrize("tiles", ["sglang", "shipped", *OTHER_TILES])
@pytest.mark.parametrize("tokens", OF_PREFILLS)
def test_experts_of_prefills_are_near_those_of_sglangs(rank, ours, monkeypatch, tokens, tiles):
    """Within the last bit of bfloat16: tensor cores keep some 14 bits of a sum of FP8 values, as SGLang has them otherwise."""
    monkeypatch.setattr(expert_products, "BOTH", tokens + 1)
    x, routed = inputs(rank, tokens)
    call = rank.call(x, routed, lookup_of(*tiles_of(rank, tokens, tiles)))
    found, wanted = ours(call).float(), call().float()
    assert float((found - wanted).norm() / wanted.norm()) < 2**-9


@pytest.mark.parametrize("tokens", [1024, *OF_PREFILLS])
def test_experts_of_prefills_with_both_products_ours_are_near_those_of_sglangs(rank, ours, monkeypatch, tokens):
    """Twice, as a launch walks over tiles in any order that the GPU has."""
    monkeypatch.setattr(expert_products, "BOTH", 1024)
    monkeypatch.setattr(shared_expert, "MANY", 1024)
    x, routed = inputs(rank, tokens)
    call = rank.call(x, routed, lookup_of(*tiles_of(rank, tokens, "sglang")))
    found, again, wanted = ours(call).float(), ours(call).float(), call().float()
    assert torch.equal(found, again)
    assert float((found - wanted).norm() / wanted.norm()) < 2**-9


@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_between_has_the_bits_of_sglangs(tokens):
    """Each step alone, with large values among small ones: what SGLang activates and quantises in two launches."""
    from sglang.kernels.ops.activation.activation import silu_and_mul
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    torch.manual_seed(tokens)
    chosen = torch.zeros(tokens, 8, dtype=torch.int32, device="cuda")
    both = torch.randn(tokens * 8, 512, device="cuda") * 10 ** torch.empty(tokens * 8, 1, device="cuda").uniform_(-3, 3)
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    both = both.bfloat16()
    values, scales = activate(both, chosen, none, none, block=16)
    wanted, wanted_scales = sglang_per_token_group_quant_fp8(silu_and_mul(both), 128)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_before_has_the_bits_of_sglangs(rank, tokens):
    """SGLang's order may have rows of an expert otherwise."""
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    x, (_, chosen) = inputs(rank, tokens)
    if problem(*chosen.shape, rank.shape.hidden):
        pytest.skip("SGLang tells so many rows by expert")
    found = order(x, chosen, 16, rank.shape.experts)
    sorted_ids, expert_ids, padded = moe_align_block_size(chosen, 16, rank.shape.experts)
    values, scales = sglang_per_token_group_quant_fp8(x, 128)
    rows = int(padded)
    assert torch.equal(found.padded, padded)
    assert found.sorted_ids.shape == sorted_ids.shape
    assert torch.equal(found.expert_ids[: rows // 16], expert_ids[: rows // 16])
    of_expert = expert_ids[: rows // 16].repeat_interleave(16).long() * 10_000
    ours, sglangs = (torch.sort(of_expert + ids[:rows]).values for ids in (found.sorted_ids, sorted_ids))
    assert torch.equal(ours, sglangs)
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.values.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("products", ["SGLang's products", "one launch"])
@pytest.mark.parametrize("tokens", [8, 64, 128])
def test_replays_of_a_graph_have_them_too(rank, ours, request, tokens, products):
    """Many layers in a row, each launch of which may begin before the one ahead has ended.

    One launch has the bits of its calls outside of a graph.
    """
    if products == "SGLang's products":
        request.getfixturevalue("sglangs_products")
    cells = [inputs(rank, tokens) for _ in range(4)]
    for cell, (shares, chosen) in enumerate(routed for _, routed in cells):
        shares.copy_(shares.roll(cell, 0))
        chosen.copy_(chosen.roll(cell, 0))
    calls = [rank.call(x, routed, lookup_of(PLAIN, BULK)) for x, routed in cells]
    ours(calls[0])  # compiles
    wanted = [ours(call) if products == "one launch" else call() for call in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [ours(call) for call in calls]
    for _ in range(10):
        for tensor in found:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
