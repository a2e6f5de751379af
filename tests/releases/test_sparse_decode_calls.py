"""sparse_decode as the backend calls it: through Triton's interpreter, against the torch reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from chosen_slots import TOPK, config, inputs, same_as_the_reference

from nsa_backend.attention.implementations import implementation
from nsa_backend.attention.inputs import SparseInputs


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


def test_reserved_memory_changes_nothing():
    case, reserved = given(3, [5, 12, 1]), attention(3)
    reserved.reserve(8)
    assert torch.equal(reserved.forward(case), attention(3).forward(case))


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
