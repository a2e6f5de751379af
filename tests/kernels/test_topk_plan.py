"""The plan of SGLang's top-k kernel at its thresholds, for modes in which a request has several rows or steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from long_rows import WRITERS, with_one_table_row, write
from metadata_reference import POISON, topk_plan

from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.metadata_torch import topk_plan as plan_of_twin


@pytest.mark.parametrize("rows", [128, 129, 512])
def test_the_twins_plan_where_more_rows_are_long_than_any_cap_allows(rows):
    """The highest threshold serves then; `test_many_rows.py` compares the launch."""
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
