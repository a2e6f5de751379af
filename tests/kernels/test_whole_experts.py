"""Both products of experts in one launch: on a GPU as it is, and without one on emulated clusters."""

from __future__ import annotations

import re

import pytest
import torch
from emulated import emulator_of_whole_experts, whole_experts_emulated
from fp8_rows import NAN
from rows_by_expert import with_more

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.expert_order import Order
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.kernels.whole_experts import BLOCK, SOURCE, WIDTH, constants, problem, shared_bytes, whole_experts
from nsa_backend.kernels.whole_experts_torch import whole_experts_torch

pytestmark = pytest.mark.usefixtures("poisoned")


def inputs(tokens: int, hidden: int, choices: int, experts: int, device: str, others: float = 0.0, hot: float = 0.0) -> dict:
    """Choices in blocks by expert, `hot` of them of one; `others` are of another GPU's experts. What nobody may read is NaN."""
    generator = torch.Generator().manual_seed(tokens + hidden + experts)
    chosen = torch.randint(0, experts, (tokens * choices,), generator=generator)
    chosen[torch.rand(len(chosen), generator=generator) < hot] = experts - 1
    chosen[torch.rand(len(chosen), generator=generator) < others] = -1
    order = with_more(chosen, experts, BLOCK, len(chosen) + 3)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.float8_e4m3fn)
    x.view(torch.uint8)[(chosen.view(tokens, choices) < 0).all(1)] = NAN
    groups = hidden // GROUP
    weights = {
        "first": torch.randn(experts, 2 * WIDTH, hidden, generator=generator).to(torch.float8_e4m3fn),
        "first_scales": torch.rand(experts, 2 * WIDTH // GROUP, groups, generator=generator) / hidden**0.5,
        "second": torch.randn(experts, hidden, WIDTH, generator=generator).to(torch.float8_e4m3fn),
        "second_scales": torch.rand(experts, groups, WIDTH // GROUP, generator=generator),
    }
    unused = [expert for expert in range(experts) if not (chosen == expert).any()]
    for tensor in weights.values():
        (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor)[unused] = NAN
    counters = torch.zeros(1 + len(order["expert_ids"]), dtype=torch.int32)
    given = Order(x, torch.rand(tokens, groups, generator=generator), **order, counters=counters)
    return {
        "order": Order(*(tensor.to(device) for tensor in given)),
        "weights": ExpertWeights(**{name: tensor.to(device) for name, tensor in weights.items()}),
        "shares": torch.rand(tokens, choices, generator=generator).to(device),
    }


def multiplied(given: dict, *, sms: int | None = None, seed: int = 0) -> torch.Tensor:
    """A call, on a GPU or on so many emulated blocks."""
    hidden = given["order"].values.shape[1]
    out = torch.empty(*given["shares"].shape, hidden, dtype=torch.bfloat16, device=given["shares"].device)
    emulated = {} if out.is_cuda else whole_experts_emulated(hidden, seed)
    given["order"].counters.zero_()
    return whole_experts(**given, out=out, num_sms=sms, **emulated)


def expect_right(given: dict, found: torch.Tensor) -> None:
    wanted = whole_experts_torch(**given, block=BLOCK)
    assert not wanted.isnan().any()
    # An activation that falls to the other side moves a sum by a step of FP8 of one of its 256 products.
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-3)
    apart = (found.float() - wanted.float()).abs() > 2**-7 * wanted.float().abs() + 2**-6
    assert float(apart.float().mean()) < 0.03


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "others", "hot", "sms"),
    [(1, 2, 3, 0.0, 0.0, 1), (9, 2, 5, 0.3, 0.0, 3), (40, 2, 3, 0.0, 0.7, 4), (6, 2, 3, 1.0, 0.0, 2)],
)
def test_every_choice_is_written(device, tokens, choices, experts, others, hot, sms):
    """With experts of no block, of one and of several, and one block that does all or several that wait for one another."""
    given = inputs(tokens, 1024, choices, experts, device, others, hot)
    expect_right(given, multiplied(given, sms=sms, seed=tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 8, 32, 64, 128])
@pytest.mark.parametrize(("hidden", "experts", "choices"), [(7168, 24, 8), (6144, 25, 9)])
def test_experts_of_a_rank(tokens, hidden, experts, choices):
    given = inputs(tokens, hidden, choices, experts, "cuda", hot=1 / 9 if choices == 9 else 0)
    found = multiplied(given)
    expect_right(given, found)
    for _ in range(20):
        assert torch.equal(multiplied(given), found)


def test_no_rows_write_nothing(device):
    given = inputs(2, 1024, 2, 3, device)
    given["order"] = given["order"]._replace(padded=torch.zeros(1, dtype=torch.int32, device=device))
    assert multiplied(given, sms=1).isnan().all()


def test_shared_memory_is_the_sources():
    source = emulator_of_whole_experts(1024)
    assert source.shared_bytes() == shared_bytes() <= 232448


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [7168, 6144])
def test_it_compiles_for_hopper_with_all_in_registers(hidden):
    _, said = compiled(SOURCE, constants(hidden))
    assert [int(count) for count in re.findall(r"(\d+) bytes spill", said)] == [0, 0]
    assert "serialized" not in said  # products that the compiler would make wait for each other


def test_what_cannot_be_served_says_so(device):
    given = inputs(2, 1024, 2, 3, device)
    order, weights = given["order"], given["weights"]
    assert problem(1280, 256) == "experts of 256 on hidden states of 1280: 256 on multiples of 1024 are served"
    out = torch.empty(2, 2, 1024, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="experts of 128 on hidden states of 1024"):
        whole_experts(**given | {"weights": weights._replace(first=weights.first[:, :256].contiguous())}, out=out)
    with pytest.raises(ValueError, match=r"scales must be contiguous torch.float32 \[2, 8\]"):
        whole_experts(**given | {"order": order._replace(scales=order.scales.half())}, out=out)
    with pytest.raises(ValueError, match=r"second must be contiguous torch.float8_e4m3fn \[3, 1024, 256\]"):
        whole_experts(**given | {"weights": weights._replace(second=weights.second[:, :256])}, out=out)
    with pytest.raises(ValueError, match=r"out must be contiguous torch.bfloat16 \[2, 2, 1024\]"):
        whole_experts(**given, out=out.float())
    with pytest.raises(ValueError, match="expert_ids must be of at least"):
        none = order._replace(expert_ids=order.expert_ids[:0], counters=order.counters[:1])
        whole_experts(**given | {"order": none}, out=out)
