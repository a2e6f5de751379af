"""sparse_decode as the backend calls it: through Triton's interpreter, against the torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from chosen_slots import TOPK, config, inputs, same_as_the_reference

from nsa_backend.attention.implementations import implementation
from nsa_backend.attention.sparse_decode import SMS_WITHOUT_A_GPU
from nsa_backend.attention.sparse_inputs import SparseInputs
from nsa_backend.kernels.sparse_decode import Parts
from nsa_backend.kernels.sparse_decode_plan import Split, Tile


def attention(heads: int):
    return implementation("sparse_decode").build(config(heads))


def given(heads: int, lengths: list[int], **options) -> SparseInputs:
    """In float32: the interpreter multiplies matrices of bfloat16 as if they were integers."""
    case = inputs(heads, lengths, **options)
    return replace(case, q_nope=case.q_nope.float(), q_rope=case.q_rope.float(), kv_cache=case.kv_cache.float())


@pytest.mark.parametrize("lengths", [[TOPK], [5, 1, TOPK, 0]])
@pytest.mark.parametrize("heads", [3, 20])
@pytest.mark.parametrize("logit_cap", [0.0, 3.0])
def test_what_the_indexer_chose_is_attended_to(heads, lengths, logit_cap):
    case = given(heads, lengths, logit_cap=logit_cap)
    assert same_as_the_reference(attention(heads).forward(case), case)


@pytest.mark.parametrize(("rows", "parts"), [(1, 3), (3, 3), (SMS_WITHOUT_A_GPU, 2), (SMS_WITHOUT_A_GPU + 1, 1)])
def test_no_call_allocates_memory_of_its_own_for_parts(monkeypatch, rows, parts):
    """Captured or not, reserved for or not: else some megabytes of zeros would be written in every layer."""
    case = given(3, [5, 12, 1] * (rows // 3) + [7] * (rows % 3))
    wide = replace(case, topk_slots=torch.nn.functional.pad(case.topk_slots, (0, 96 - TOPK), value=-1))
    assert Split.of(rows, 3, 96, SMS_WITHOUT_A_GPU, Tile.of(rows, 3)).parts == parts
    splitting = implementation("sparse_decode").build(replace(config(3), index_topk=96))
    monkeypatch.setattr(Parts, "of", None)
    assert same_as_the_reference(splitting.forward(wide), wide)


def test_rows_padded_beyond_the_metadata():
    """They have no length, and slots of -1."""
    case = given(3, [5, 12, 1])
    padded = replace(
        case,
        q_nope=torch.cat([case.q_nope, case.q_nope[:1]]),
        q_rope=torch.cat([case.q_rope, case.q_rope[:1]]),
        topk_slots=torch.cat([case.topk_slots, torch.full_like(case.topk_slots[:1], -1)]),
    )
    out = attention(3).forward(padded)
    assert same_as_the_reference(out[:3], case)
    assert (out[3] == 0).all()
