"""Metadata that a captured graph writes on a GPU, against the twin, field by field."""

from __future__ import annotations

from dataclasses import fields

import torch
from metadata_reference import POISON

from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata_torch import write_metadata_torch
from nsa_backend.kernels.plan import MetadataPlan
from nsa_backend.metadata.views import step_metadata
from nsa_backend.testing.shape import TOPK

CONSTANT = {"nsa_cu_seqlens_q", "cu_seqlens_q", "token_to_batch_idx", "table_rows"}
"""What no launch writes."""


def poison(metadata) -> None:
    """Fill all that a launch writes."""
    for field in fields(metadata):
        tensor = getattr(metadata, field.name)
        if isinstance(tensor, torch.Tensor) and field.name not in CONSTANT:
            tensor.fill_(POISON)


def compare(
    got: list, plan: MetadataPlan, inputs: BatchInputs, req_to_token: torch.Tensor, num_sms: int, width: int | None = None
) -> None:
    """Every field of every step of `got`, poisoned before; page tables reach the longest request, or `width` tokens."""
    wide, planned = adapter.TOPK_READS_PAGE_TABLE_1, adapter.topk_v2() is not None
    buffers = MetadataBuffers.allocate(
        plan, table_width=width or req_to_token.shape[1], num_sms=num_sms, device="cuda", wide=wide, planned=planned
    )
    for tensor in (buffers.page_table_1, buffers.real_page_table, buffers.topk_plan):
        if tensor is not None:
            tensor.fill_(POISON)
    write_metadata_torch(
        plan,
        buffers,
        inputs,
        req_to_token=req_to_token,
        index_topk=TOPK,
        surplus_last=adapter.schedule_surplus_last(adapter.device_sm("cuda")),
    )
    for step, metadata in enumerate(got):
        want = step_metadata(plan, buffers, step)
        for field in fields(metadata):
            mine, theirs = getattr(metadata, field.name), getattr(want, field.name)
            if isinstance(mine, torch.Tensor) and field.name != "schedule":
                assert torch.equal(mine, theirs), f"step {step}: {field.name}"
