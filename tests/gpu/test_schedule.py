"""DeepGEMM's schedule, bit for bit against DeepGEMM itself."""

import pytest
import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.indexer.schedule_check import check_schedule
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.metadata_torch import paged_mqa_schedule

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("longest", [1, 256, 257, 5000, 163_840])
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 127, 128, 129, 256, 500, 777, 1024])
def test_schedule_equals_deep_gemm(rows, longest):
    num_sms = adapter.deep_gemm_num_sms()
    plan = plans.plan_decode(rows)
    buffers = MetadataBuffers.allocate(plan, table_width=longest, num_sms=num_sms, device="cuda", wide=False, planned=True)
    req_to_token = torch.zeros(1, longest, dtype=torch.int32, device="cuda")
    slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
    for seed in range(20):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        lens = torch.randint(1, longest + 1, (rows,), generator=generator, device="cuda")
        if seed % 3 == 0:
            lens = torch.where(torch.rand(rows, generator=generator, device="cuda") < 0.9, 1, lens)
        write_metadata(
            plan, buffers, BatchInputs(lens, slots), req_to_token=req_to_token, index_topk=2048,
            surplus_last=adapter.schedule_surplus_last(adapter.device_sm("cuda")),
        )  # fmt: skip
        assert torch.equal(buffers.schedule[0], adapter.deep_gemm_schedule(lens.to(torch.int32)))


@pytest.mark.parametrize("longest", [1, 257, 163_840])
@pytest.mark.parametrize("requests", [1, 16, 33, 200])
def test_schedule_of_pairs_equals_deep_gemm(requests, longest):
    sms, surplus_last = adapter.deep_gemm_num_sms(), adapter.schedule_surplus_last(adapter.device_sm("cuda"))
    for seed in range(20):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        lens = torch.randint(1, longest + 1, (requests, 1), generator=generator, device="cuda", dtype=torch.int32)
        rows = (lens + torch.arange(4, dtype=torch.int32, device="cuda")).flatten()
        assert torch.equal(paged_mqa_schedule(rows[1::2], sms, surplus_last), adapter.deep_gemm_schedule(rows, 2))


def test_another_rule_is_refused_at_start():
    check_schedule(adapter.deep_gemm_num_sms(), adapter.schedule_surplus_last(adapter.device_sm("cuda")))
    with pytest.raises(ValueError, match="divides paged-MQA work by a rule that nsa_backend does not know"):
        check_schedule(adapter.deep_gemm_num_sms(), not adapter.schedule_surplus_last(adapter.device_sm("cuda")))
