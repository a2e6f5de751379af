"""Every wrong argument of the metadata launch raises before anything is launched, and says what would have happened."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import tried

from nsa_backend.kernels import metadata
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    class Refuse:
        def __getitem__(self, grid):
            pytest.fail("the kernel was launched with wrong arguments")

    monkeypatch.setattr(metadata, "metadata_kernel", Refuse())


def arguments(requests: int = 3, ragged: bool = False) -> dict:
    plan = plans.plan_draft_extend_v1(requests, 2 * requests) if ragged else plans.plan_target_verify(requests, 2)
    return {
        "plan": plan,
        "buffers": MetadataBuffers.allocate(plan, table_width=128, num_sms=0, device="cpu", wide=True, planned=True),
        "seq_lens": torch.ones(requests, dtype=torch.int64),
        "req_pool_indices": torch.zeros(requests, dtype=torch.int64),
        "req_to_token": torch.zeros(5, 128, dtype=torch.int32),
        "index_topk": 64,
        "extend_lens": torch.ones(requests, dtype=torch.int32) if ragged else None,
    }


def launch(call: dict) -> None:
    """`write_metadata` with these arguments, the tensors of the batch among them by name."""
    batch = {name: call[name] for name in ("seq_lens", "req_pool_indices", "extend_lens")}
    metadata.write_metadata(inputs=BatchInputs(**batch), **{name: call[name] for name in call.keys() - batch.keys()})


VECTORS = st.sampled_from(["seq_lens", "req_pool_indices", "extend_lens"])


WRONG = {
    "length": (
        st.integers(0, 9).filter(lambda n: n != 3).map(lambda n: torch.ones(n, dtype=torch.int64)),
        lambda given: rf"must be \[3\], got torch.int64 \({len(given)},\) .*: the kernel would read past its end",
    ),
    "dtype": (
        st.sampled_from([torch.int16, torch.uint8, torch.float32, torch.float64, torch.bool]).map(torch.ones(3).to),
        lambda given: rf"must be int32 or int64, got {given.dtype} .*: the kernel would misread its bits",
    ),
    "stride": (
        st.integers(2, 5).map(lambda stride: torch.ones(3 * stride, dtype=torch.int64)[::stride]),
        lambda given: (
            rf"must be contiguous, got .* with strides \({given.stride(0)},\).*: the kernel would read other requests"
        ),
    ),
    "device": (
        st.just(torch.ones(3, dtype=torch.int64, device="meta")),
        lambda given: "is on meta and the metadata on cpu",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@given(name=VECTORS, data=st.data())
@tried()
def test_a_vector(what, name, data):
    vectors, sentence = WRONG[what]
    vector = data.draw(vectors)
    with pytest.raises(ValueError, match=f"{name} {sentence(vector)}"):
        launch(arguments(ragged=True) | {name: vector})


@pytest.mark.parametrize(
    "table",
    [
        torch.zeros(128, 5, dtype=torch.int32).t(),
        torch.zeros(5, 128, dtype=torch.int64),
        torch.zeros(640, dtype=torch.int32),
        torch.zeros(5, 256, dtype=torch.int32)[:, ::2],
    ],
)
def test_request_table(table):
    with pytest.raises(ValueError, match="would copy other requests' slots"):
        launch(arguments() | {"req_to_token": table})


def test_a_request_table_on_another_device():
    with pytest.raises(ValueError, match="req_to_token is on meta and the metadata on cpu"):
        launch(arguments() | {"req_to_token": torch.zeros(5, 128, dtype=torch.int32, device="meta")})


@given(requests=st.integers(1, 8), steps=st.integers(1, 4), rows=st.integers(1, 4))
@tried()
def test_room(requests, steps, rows):
    call = arguments()
    plan = replace(call["plan"], num_requests=requests, num_rows=requests * rows, rows_per_request=rows, num_steps=steps)
    assume(requests > 3 or requests * rows > 6 or steps > 1)
    call |= {"plan": plan, "seq_lens": torch.ones(requests).long(), "req_pool_indices": torch.zeros(requests).long()}
    with pytest.raises(ValueError, match="the kernel would write past their end"):
        launch(call)


def test_rows_that_do_not_add_up():
    call = arguments()
    with pytest.raises(ValueError, match="some rows would keep the lengths of an earlier batch"):
        launch(call | {"plan": replace(call["plan"], num_rows=5)})


def test_ragged_rows_without_their_counts():
    with pytest.raises(ValueError, match="the rows of a request are unknown"):
        launch(arguments(ragged=True) | {"extend_lens": None})


def test_buffers_of_another_mode():
    call = arguments()
    plan = plans.plan_decode(3)
    with pytest.raises(ValueError, match="row lengths would be lost or overwrite request lengths"):
        launch(call | {"plan": plan})
    one_row = MetadataBuffers.allocate(plans.plan_decode(6), table_width=64, num_sms=0, device="cpu", wide=True, planned=True)
    with pytest.raises(ValueError, match="row lengths would be lost or overwrite request lengths"):
        launch(call | {"buffers": one_row})


def test_page_tables_past_what_the_kernel_reaches():
    """4096 requests of 16 drafts and a context of two million tokens; nothing is allocated."""
    plan = plans.plan_target_verify(4096, 16)
    options = {"num_sms": 0, "device": "meta", "wide": False, "planned": True}
    MetadataBuffers.allocate(plan, table_width=2**21 - 256, **options)
    with pytest.raises(ValueError, match="65536 rows of 32768 pages has more entries than the kernel reaches: serve fewer"):
        MetadataBuffers.allocate(plan, table_width=2**21, **options)
