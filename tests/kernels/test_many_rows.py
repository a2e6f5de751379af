"""DeepGEMM's schedule and the top-k plan of many rows and long requests: kernel and torch twin against plain Python."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from metadata_reference import POISON, schedule, topk_plan

from nsa_backend.kernels import metadata, metadata_kernel
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata_torch import topk_plan as plan_of_twin
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


@pytest.mark.parametrize("rows", [1, 2, 127, 128, 129, 500, 1024])
@pytest.mark.parametrize("longest", [1, 300, 5000, 163_840])
def test_schedule_of_many_rows(device, rows, longest):
    """Up to 1024 rows and 163840 tokens. All rows share one row of the page tables, which would be 670 MB otherwise."""
    rng = np.random.default_rng(rows)
    lengths = rng.integers(1, longest + 1, rows).tolist()
    lengths[rows // 2] = longest
    plan = plans.plan_decode(rows)
    buffers = with_one_table_row(plan, longest, device)
    for writer, surplus_last in itertools.product(WRITERS, (False, True)):
        buffers.schedule.fill_(POISON)
        write(writer, plan, buffers, torch.tensor(lengths, device=device), longest, surplus_last)
        np.testing.assert_array_equal(buffers.schedule[0].cpu().numpy(), schedule(lengths, 132, surplus_last))


@pytest.mark.parametrize("rows", [1, 30, 31, 60, 140, 512, 513])
@pytest.mark.parametrize("longest", [300, 70_000, 140_000, 500_000])
def test_topk_plan_of_many_rows(device, rows, longest):
    """Every threshold of the plan and every cap; of more than 512 rows nothing is planned."""
    rng = np.random.default_rng(rows)
    lengths = rng.integers(longest // 2, longest + 1, rows).tolist()
    plan = plans.plan_decode(rows)
    buffers = with_one_table_row(plan, longest, device)
    want = topk_plan(lengths)
    for writer in WRITERS:
        buffers.topk_plan.fill_(POISON)
        write(writer, plan, buffers, torch.tensor(lengths, device=device), longest)
        got = buffers.topk_plan[0].cpu().numpy()
        listed = len(want) if rows <= 512 else 0
        np.testing.assert_array_equal(got[:listed], want[:listed])
        assert (got[listed:] == POISON).all()


@pytest.mark.parametrize("rows", [128, 129, 512])
def test_the_twins_plan_where_more_rows_are_long_than_any_cap_allows(rows):
    """The highest threshold serves then; the launch is compared above."""
    lengths = [400_000] * rows
    np.testing.assert_array_equal(plan_of_twin(torch.tensor(lengths)).numpy(), topk_plan(lengths))


LONG_PLANS = {
    "target_verify": plans.plan_target_verify(3, 4),
    "draft_decode": plans.plan_draft_decode(3, 4),
    "draft_extend_v2": plans.plan_draft_extend_v2(3, 4),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("mode", LONG_PLANS)
def test_topk_plan_counts_the_tokens_of_each_row_and_step(device, writer, mode):
    """Requests a token or two from the lowest threshold, so that some of their rows or steps are beyond it and some are not."""
    plan, lengths = LONG_PLANS[mode], [65_535, 65_538, 65_534]
    longest = 65_700
    buffers = with_one_table_row(plan, longest, device)
    buffers.topk_plan.fill_(POISON)
    beyond = torch.tensor([*lengths, 500_000], device=device)  # what follows in memory is nobody's
    write(writer, plan, buffers, beyond[:3], longest)
    rows = plan.rows_per_request
    listed = []
    for step in range(plan.num_steps):
        want = topk_plan([length + plan.row_offset + step + j for length in lengths for j in range(rows)])
        listed.append(len(want) - 1)
        np.testing.assert_array_equal(buffers.topk_plan[step, : len(want)].cpu().numpy(), want)
        assert (buffers.topk_plan[step, len(want) :] == POISON).all()
    assert 0 < sum(listed) < plan.num_rows * plan.num_steps
