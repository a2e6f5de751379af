"""Many rows of up to hundreds of thousands of tokens: what the launch writes of their lengths, over tables without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa_backend.kernels import metadata, metadata_kernel
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata_torch import write_metadata_torch
from nsa_backend.kernels.plan import MetadataPlan

WRITERS = {"kernel": metadata.write_metadata, "twin": write_metadata_torch}


def with_one_table_row(plan: MetadataPlan, longest: int, device: str) -> MetadataBuffers:
    """Buffers of `plan` for rows of up to `longest` tokens, which share one row of the page table."""
    buffers = MetadataBuffers.allocate(plan, table_width=64, num_sms=132, device=device, wide=False, planned=True)
    row = torch.zeros(1, -(-longest // 256) * 4, dtype=torch.int32, device=device)
    return replace(buffers, real_page_table=row.expand(plan.num_rows, -1))


def write(
    writer: str, plan: MetadataPlan, buffers: MetadataBuffers, lengths: torch.Tensor, longest: int, surplus_last: bool = False
) -> None:
    """Metadata of requests of `lengths` tokens, all in one row of the request table, which is `longest` wide.

    In the interpreter no page table is copied: that takes minutes, and `test_metadata.py` looks at what is copied.
    """
    device = lengths.device
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setattr(metadata_kernel, "copy_page_tables", lambda *arguments, **options: None)
        WRITERS[writer](
            plan,
            buffers,
            BatchInputs(lengths, torch.zeros(len(lengths), dtype=torch.int64, device=device)),
            req_to_token=torch.zeros(1, longest, dtype=torch.int32, device=device),
            index_topk=2048,
            surplus_last=surplus_last,
        )
