"""Addresses past 2**31 elements: large KV pools, wide request tables and long prefills of many heads."""

from __future__ import annotations

import pytest
import torch
from far_memory import far_tensor

from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.join_query import join_query
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.prefill import write_prefill
from nsa_backend.kernels.sparse_decode import sparse_decode
from nsa_backend.kernels.topk_slots import topk_slots

PAST = 2**31


@pytest.mark.parametrize("part", ["q_nope", "q_rope"])
def test_heads_of_a_long_prefill_are_joined(device, part):
    """SGLang's q_nope has its heads rows * 512 apart: 32 heads of a prompt of 163840 tokens reach past 2**31 values."""
    widths = {"q_nope": 512, "q_rope": 64}
    stride = PAST // 2 + 16
    values = {name: torch.randn(1, 3, width, device=device).bfloat16() for name, width in widths.items()}
    far = far_tensor(device, PAST + 2 * stride + widths[part], dtype=torch.bfloat16)  # what 32 bits would reach is there too
    spread = far.as_strided((1, 3, widths[part]), (widths[part], stride, 1), PAST)
    spread.copy_(values[part])
    out = torch.zeros(1, 4, 576, dtype=torch.bfloat16, device=device)
    join_query(**{**values, part: spread}, out=out)
    assert torch.equal(out[:, :3], torch.cat(list(values.values()), dim=-1))


@pytest.mark.parametrize("fp8", [False, True])
def test_kv_of_the_last_slot_of_a_large_pool(device, fp8):
    """Millions of tokens: 3.7M of 576 values, and 6.6M where the FP8 layout's RoPE values are to lie past 2**31."""
    half = torch.bfloat16 if device == "cuda" else torch.float16
    dtype, width = (torch.float8_e4m3fn, 656) if fp8 else (half, 576)
    slots = PAST // (328 if fp8 else 576) + 2
    kv = far_tensor(device, slots, 1, width, dtype=dtype)
    last = torch.randn(512).to(device)
    kv[-1] = 0
    if fp8:
        kv[-1, 0, :512] = last.to(dtype)
        kv[-1, 0, 512:528].view(torch.float32).fill_(1.0)
    else:
        kv[-1, 0, :512] = last.to(dtype)
    query = torch.randn(1, 16, 576).to(device, half)
    chosen = torch.tensor([[slots - 1]], dtype=torch.int32, device=device)
    out = sparse_decode(query[..., :512], query[..., 512:], kv, chosen, torch.ones_like(chosen[0]), 0.1, num_sms=132)
    assert torch.equal(out, kv[-1, :, :512].to(half).expand(1, 16, 512))


def test_requests_in_the_last_row_of_a_large_request_table(device):
    """4097 requests of a model with a context of a million tokens: 4.3e9 entries, of which this takes half."""
    width = 2**20 + 4
    table = far_tensor(device, PAST // width + 2, width, dtype=torch.int32)
    row, tokens = len(table) - 1, 300
    table[row, :tokens] = torch.arange(640, 640 + tokens, device=device)
    inputs = BatchInputs(*(torch.tensor([value], device=device) for value in (tokens, row, tokens)))
    buffers = MetadataBuffers.allocate(
        plans.plan_decode(1), table_width=tokens, num_sms=0, device=device, wide=False, planned=False
    )
    write_metadata(plans.plan_decode(1), buffers, inputs, req_to_token=table, index_topk=2048)
    assert buffers.real_page_table[0, :5].tolist() == [10, 11, 12, 13, 14]
    fields = write_prefill(inputs, req_to_token=table, index_topk=2048, num_rows=tokens, longest=tokens, flattened=tokens)
    assert fields.real_page_table.tolist() == [[10, 11, 12, 13, 14]]
    assert fields.flattened_slots.tolist() == table[row, :tokens].tolist()


def test_slots_of_the_last_request_of_a_large_page_table(device):
    width = 2**20
    table = far_tensor(device, PAST // width + 1, width, dtype=torch.int32)
    table[-1, 1] = 7
    rows = torch.tensor([len(table) - 1], device=device)
    assert topk_slots(torch.tensor([[70, -1]], dtype=torch.int32, device=device), table, rows, 64).tolist() == [
        [7 * 64 + 6, -1]
    ]
