"""DeepGEMM's schedule and the top-k plan of many rows and long requests: kernel and torch twin against plain Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from long_rows import WRITERS, with_one_table_row, write
from metadata_reference import POISON, schedule, topk_plan

from nsa_backend.kernels import plan as plans


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
