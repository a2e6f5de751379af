"""Both products of experts in one launch: on a GPU as it is, and without one on emulated blocks."""

from __future__ import annotations

import re

import pytest
import torch
from emulated import emulator_of_whole_experts, whole_experts_emulated
from fp8_rows import NAN
from near_experts import expect_near
from rows_by_expert import with_more

from nsa_backend.kernels.cuda_source import compiled
from nsa_backend.kernels.expert_order import Order
from nsa_backend.kernels.few_experts import ExpertWeights
from nsa_backend.kernels.layer_front_weights import GROUP
from nsa_backend.kernels.whole_experts import ROWS, SOURCE, Form, problem, rows_for, whole_experts
from nsa_backend.kernels.whole_experts_torch import whole_experts_torch

pytestmark = pytest.mark.usefixtures("poisoned")

OF_SERVERS = [(7168, 256), (6144, 256), (7168, 2048)]


def inputs(tokens: int, form: Form, choices: int, experts: int, device: str, *, others: float = 0.0, hot: float = 0.0) -> dict:
    """Choices in blocks by expert, `hot` of them of one; `others` are of another GPU's experts. What nobody may read is NaN."""
    hidden, width, groups = form.hidden, form.width, form.hidden // GROUP
    generator = torch.Generator().manual_seed(tokens + hidden + experts)
    chosen = torch.randint(0, experts, (tokens * choices,), generator=generator)
    chosen[torch.rand(len(chosen), generator=generator) < hot] = experts - 1
    chosen[torch.rand(len(chosen), generator=generator) < others] = -1
    order = with_more(chosen, experts, form.rows, len(chosen) + 3)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.float8_e4m3fn)
    x.view(torch.uint8)[(chosen.view(tokens, choices) < 0).all(1)] = NAN
    weights = {
        "first": torch.randn(experts, 2 * width, hidden, generator=generator).to(torch.float8_e4m3fn),
        "first_scales": torch.rand(experts, 2 * width // GROUP, groups, generator=generator) / hidden**0.5,
        "second": torch.randn(experts, hidden, width, generator=generator).to(torch.float8_e4m3fn),
        "second_scales": torch.rand(experts, groups, width // GROUP, generator=generator),
    }
    unused = [expert for expert in range(experts) if not (chosen == expert).any()]
    for tensor in weights.values():
        (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor)[unused] = NAN
    counters = torch.zeros(1 + len(order["expert_ids"]) * width // GROUP, dtype=torch.int32)
    given = Order(x, torch.rand(tokens, groups, generator=generator), **order, counters=counters)
    return {
        "order": Order(*(tensor.to(device) for tensor in given)),
        "rows": form.rows,
        "weights": ExpertWeights(**{name: tensor.to(device) for name, tensor in weights.items()}),
        "shares": torch.rand(tokens, choices, generator=generator).to(device),
    }


def multiplied(given: dict, *, sms: int | None = None, seed: int = 0) -> torch.Tensor:
    """A call, on a GPU or on so many emulated blocks."""
    form = Form(given["order"].values.shape[1], given["weights"].width, given["rows"])
    out = torch.empty(*given["shares"].shape, form.hidden, dtype=torch.bfloat16, device=given["shares"].device)
    emulated = {} if out.is_cuda else whole_experts_emulated(form, seed)
    given["order"].counters.zero_()
    return whole_experts(**given, out=out, num_sms=sms, **emulated)


FORMS = {rows: Form(512, 256, rows) for rows in ROWS} | {"of expert parallel": Form(256, 512, 16)}


@pytest.mark.parametrize(
    ("form", "tokens", "choices", "experts", "others", "hot", "sms"),
    [
        (16, 1, 2, 3, 0.0, 0.0, 1),
        (16, 9, 2, 5, 0.3, 0.0, 3),
        (16, 6, 2, 3, 1.0, 0.0, 2),
        (32, 40, 2, 3, 0.0, 0.7, 4),
        (64, 20, 4, 3, 0.2, 0.7, 2),
        ("of expert parallel", 9, 2, 3, 0.3, 0.0, 3),
    ],
)
def test_every_choice_is_written(device, form, tokens, choices, experts, others, hot, sms):
    """With experts of no tile, of one and of several, and one block that does all or several that wait for one another."""
    given = inputs(tokens, FORMS[form], choices, experts, device, others=others, hot=hot)
    expect_near(multiplied(given, sms=sms, seed=tokens), whole_experts_torch(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tokens", [1, 8, 33, 128])
@pytest.mark.parametrize(("hidden", "width"), OF_SERVERS)
def test_experts_of_a_rank(hidden, width, tokens, rows):
    given = inputs(tokens, Form(hidden, width, rows), 4, 6, "cuda", others=0.1, hot=0.3)
    found = multiplied(given)
    expect_near(found, whole_experts_torch(**given))
    for _ in range(20):
        assert torch.equal(multiplied(given), found)


def test_no_rows_write_nothing(device):
    given = inputs(2, FORMS[16], 2, 3, device)
    given["order"] = given["order"]._replace(padded=torch.zeros(1, dtype=torch.int32, device=device))
    assert multiplied(given, sms=1).isnan().all()


def test_tiles_have_room_for_most_experts():
    assert [rows_for(choices, 256) for choices in (1, 128 * 8, 384 * 8, 512 * 8, 4096 * 8)] == [16, 16, 16, 32, 64]


@pytest.mark.parametrize("form", FORMS.values(), ids=str)
def test_shared_memory_is_the_sources(form):
    assert emulator_of_whole_experts(form).shared_bytes() == form.shared_bytes <= 232448


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("hidden", "width"), OF_SERVERS)
def test_it_compiles_for_hopper_with_all_in_registers(hidden, width, rows):
    _, said = compiled(SOURCE, Form(hidden, width, rows).constants)
    assert [int(count) for count in re.findall(r"(\d+) bytes spill", said)] == [0, 0]
    assert "serialized" not in said  # products that the compiler would make wait for each other


def test_what_cannot_be_served_says_so(device):
    given = inputs(2, FORMS[16], 2, 3, device)
    order, weights = given["order"], given["weights"]
    assert problem(640, 256) == (
        "experts of 256 on hidden states of 640: 256 to 2048 in powers of two on multiples of 256 are served"
    )
    out = torch.empty(2, 2, 512, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="experts of 128 on hidden states of 512"):
        whole_experts(**given | {"weights": weights._replace(first=weights.first[:, :256].contiguous())}, out=out)
    with pytest.raises(ValueError, match=r"scales must be contiguous torch.float32 \[2, 4\]"):
        whole_experts(**given | {"order": order._replace(scales=order.scales.half())}, out=out)
    with pytest.raises(ValueError, match=r"second must be contiguous torch.float8_e4m3fn \[3, 512, 256\]"):
        whole_experts(**given | {"weights": weights._replace(second=weights.second[:, :256])}, out=out)
    with pytest.raises(ValueError, match=r"out must be contiguous torch.bfloat16 \[2, 2, 512\]"):
        whole_experts(**given, out=out.float())
    with pytest.raises(ValueError, match="expert_ids must be of at least"):
        none = order._replace(expert_ids=order.expert_ids[:0], counters=order.counters[:1])
        whole_experts(**given | {"order": none}, out=out)
