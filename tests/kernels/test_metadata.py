"""Every metadata field of every mode: kernel and torch twin against plain Python, exactly, on poisoned buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from metadata_reference import POISON, Batch, expected_buffers
from properties import tried

from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.metadata_torch import write_metadata_torch

WRITERS = {"kernel": write_metadata, "twin": write_metadata_torch}
COMMON = tried(25, suppress_health_check=list(HealthCheck))


def make_plan(batch: Batch, requests: int | None = None) -> plans.MetadataPlan:
    requests = len(batch.seq_lens) if requests is None else requests
    if batch.mode == "decode":
        return plans.plan_decode(requests)
    if batch.mode == "draft_decode":
        return plans.plan_draft_decode(requests, batch.num_steps)
    if batch.mode == "target_verify":
        return plans.plan_target_verify(requests, batch.num_draft_tokens, batch.next_n)
    if batch.mode == "draft_extend_v2":
        return plans.plan_draft_extend_v2(requests, batch.num_draft_tokens)
    spare = (requests - len(batch.seq_lens)) * batch.num_draft_tokens
    return plans.plan_draft_extend_v1(requests, sum(batch.extend_lens) + batch.tail_rows + spare)


def poisoned(buffers: MetadataBuffers, plan: plans.MetadataPlan) -> MetadataBuffers:
    constant = set() if plan.ragged else {"cu_seqlens_q", "token_to_batch_idx"}
    for name, tensor in vars(buffers).items():
        if tensor is not None and name != "arange" and name not in constant:
            tensor.fill_(POISON)
    return buffers


def run_and_compare(
    batch: Batch, device: str, writer: str, dtype: torch.dtype, spare: int = 0, other_dtype: torch.dtype | None = None
) -> None:
    """Launch into buffers with room for `spare` requests more, and compare every storage as a whole.

    `dtype` is that of seq_lens, `other_dtype` that of request slots and accept counts.
    """
    plan = make_plan(batch)
    room = make_plan(batch, len(batch.seq_lens) + spare)
    table_width = batch.req_to_token.shape[1]
    buffers = MetadataBuffers.allocate(
        room, table_width=table_width, num_sms=batch.num_sms, device=device, wide=batch.wide, planned=batch.planned
    )
    poisoned(buffers, room)
    WRITERS[writer](
        plan,
        buffers,
        BatchInputs(
            torch.tensor(batch.seq_lens, dtype=dtype, device=device),
            torch.tensor(batch.slots, dtype=other_dtype or dtype, device=device),
            torch.tensor(batch.extend_lens, dtype=other_dtype or dtype, device=device) if plan.ragged else None,
        ),
        req_to_token=torch.from_numpy(batch.req_to_token).to(device),
        index_topk=batch.index_topk,
        surplus_last=batch.surplus_last,
    )
    got = {name: t.cpu().numpy() for name, t in vars(buffers).items() if t is not None}
    want = expected_buffers(batch, {name: array.shape for name, array in got.items()})
    written = [name for name in got if name != "arange" and (plan.ragged or name not in ("cu_seqlens_q", "token_to_batch_idx"))]
    for name in written:
        np.testing.assert_array_equal(got[name], want[name], err_msg=f"{batch.mode}: {name}")


def near_pages(draw, longest: int, reach: int) -> int:
    """A length at random, on a page boundary, or where a draft step opens a new page."""
    page = 64 * draw(st.integers(0, longest // 64))
    choices = [draw(st.integers(1, longest)), page + draw(st.integers(-2, 1)), page - draw(st.integers(0, reach + 1))]
    return min(max(draw(st.sampled_from(choices)), 1), longest)


@st.composite
def batches(draw, mode: str, longest: int = 700) -> Batch:
    requests = draw(st.one_of(st.integers(1, 6), st.integers(1, 130)))
    n, d = draw(st.integers(2, 9)), draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = [near_pages(draw, longest, n) for _ in range(min(requests, 8))]
    lengths += rng.integers(1, longest + 1, requests - len(lengths)).tolist()
    extend = rng.integers(1, d + 1, requests).tolist()
    if mode == "draft_extend_v2":
        lengths = [length + d for length in lengths]
    if mode == "draft_extend_v1":
        lengths = [length + a for length, a in zip(lengths, extend, strict=True)]
    slots = (1 + rng.permutation(2 * requests)[:requests]).tolist()
    padding = draw(st.integers(0, requests - 1))
    for r in range(requests - padding, requests):
        lengths[r], slots[r] = 1, 0
    pool = rng.integers(0, 2**20, (2 * requests + 1, longest + 10 + draw(st.integers(0, 9)))).astype(np.int32)
    return Batch(
        mode=mode,
        seq_lens=lengths,
        slots=slots,
        req_to_token=pool,
        index_topk=draw(st.sampled_from([16, lengths[0], lengths[0] + 1, 2048])),
        num_sms=draw(st.sampled_from([0, 1, 78, 132])),
        surplus_last=draw(st.booleans()),
        num_steps=n,
        num_draft_tokens=d,
        extend_lens=extend if mode == "draft_extend_v1" else [],
        tail_rows=draw(st.integers(0, d)) if mode == "draft_extend_v1" else 0,
        wide=draw(st.booleans()),
        next_n=draw(st.sampled_from([1, 2])) if mode == "target_verify" and d % 2 == 0 else 1,
        planned=mode != "draft_extend_v1" and draw(st.booleans()),
    )


MODES = ["decode", "draft_decode", "target_verify", "draft_extend_v2", "draft_extend_v1"]


@pytest.mark.parametrize("writer", ["kernel", "twin"])
@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
@COMMON
def test_random_batches(device, mode, writer, data):
    batch = data.draw(batches(mode))
    dtypes = st.sampled_from([torch.int32, torch.int64])
    spare = data.draw(st.integers(0, 3))
    run_and_compare(batch, device, writer, data.draw(dtypes), spare=spare, other_dtype=data.draw(dtypes))


@pytest.mark.parametrize("writer", ["kernel", "twin"])
@pytest.mark.parametrize("length", [62, 63, 64, 65, 126, 127, 128, 129])
@pytest.mark.parametrize("num_steps", [2, 3, 5, 9])
def test_draft_steps_around_a_new_page(device, writer, num_steps, length):
    pool = np.arange(4 * 200, dtype=np.int32).reshape(4, 200)[:, ::-1].copy()
    batch = Batch("draft_decode", [length, 1, length + 1], [2, 0, 3], pool, 2048, 132, num_steps=num_steps)
    run_and_compare(batch, device, writer, torch.int32)


@pytest.mark.parametrize("writer", ["kernel", "twin"])
@pytest.mark.parametrize("mode", MODES)
def test_context_limit_clips(device, writer, mode):
    """L + N beyond the table clips to its width; nothing is read or written past it."""
    pool = np.arange(3 * 130, dtype=np.int32).reshape(3, 130)
    batch = Batch(
        mode, [130, 129, 127], [2, 1, 0], pool, 64, 132, num_steps=6, num_draft_tokens=7,
        extend_lens=[7, 1, 3] if mode == "draft_extend_v1" else [],
    )  # fmt: skip
    run_and_compare(batch, device, writer, torch.int64)


@pytest.mark.parametrize("writer", ["kernel", "twin"])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_attends_to_one_token_at_least(device, writer, mode):
    """Requests of one and two tokens, and padding that says it has none."""
    pool = np.arange(3 * 130, dtype=np.int32).reshape(3, 130)
    extend = [1, 1, 2] if mode == "draft_extend_v1" else []
    run_and_compare(Batch(mode, [1, 0, 2], [2, 0, 1], pool, 64, 132, extend_lens=extend), device, writer, torch.int64)


@pytest.mark.parametrize("writer", ["kernel", "twin"])
def test_one_long_request_among_short_ones(device, writer):
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 2**30, (6, 20_000)).astype(np.int32)
    for next_n in (1, 2):
        batch = Batch("target_verify", [5, 19_990, 1, 64], [1, 5, 0, 3], pool, 2048, 132, next_n=next_n)
        run_and_compare(batch, device, writer, torch.int64)


def test_empty_batch(device):
    plan = plans.plan_decode(0)
    buffers = MetadataBuffers.allocate(plan, table_width=64, num_sms=132, device=device, wide=True, planned=True)
    poisoned(buffers, plan)
    write_metadata(
        plan,
        buffers,
        BatchInputs(torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.int64, device=device)),
        req_to_token=torch.zeros(1, 64, dtype=torch.int32, device=device),
        index_topk=2048,
    )
    assert buffers.cu_seqlens_k.tolist() == [[0]]
    assert buffers.schedule.abs().sum().item() == 0
