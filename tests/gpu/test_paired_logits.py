"""Logits of pairs of rows, and of as many rows as there are SMs, against single rows, bit by bit, by DeepGEMM's own kernel."""

import pytest
import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata import write_metadata

pytestmark = pytest.mark.gpu

D, TOPK = 4, 2048


@pytest.mark.skipif(adapter.topk_v2() is None, reason="the release's indexer hands DeepGEMM one row at a time")
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("requests", [1, 8, 33, 70])
def test_pairs_score_and_select_what_single_rows_do(requests, heads):
    import deep_gemm

    pages, width = 2048, 20_000
    paged, _ = adapter.topk_v2()
    generator = torch.Generator(device="cuda").manual_seed(requests)
    lengths = torch.randint(1, width - D, (requests,), generator=generator, device="cuda", dtype=torch.int32)
    edges = torch.tensor([width - D, 1, 62, 253, 2046], device="cuda", dtype=torch.int32)[:requests]
    lengths[: len(edges)] = edges
    tables = [torch.randperm(pages, generator=generator, device="cuda")[: -(-width // 64)] for _ in range(requests)]
    slots = (64 * torch.stack(tables)[..., None] + torch.arange(64, device="cuda")).flatten(1)[:, :width].int().contiguous()
    keys = torch.randn(pages, 64 * 128, generator=generator, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(pages, 64, generator=generator, device="cuda").view(torch.uint8)
    index_k = torch.cat([keys, scales], dim=1).view(pages, 64, 1, 132)
    q = torch.randn(requests * D, heads, 128, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.rand(requests * D, heads, generator=generator, device="cuda")
    found = []
    for next_n in (1, 2):
        plan = plans.plan_target_verify(requests, D, next_n)
        buffers = MetadataBuffers.allocate(
            plan, table_width=width, num_sms=deep_gemm.get_num_sms(), device="cuda", wide=False, planned=True
        )
        write_metadata(
            plan, buffers, BatchInputs(lengths, torch.arange(requests, device="cuda")), req_to_token=slots, index_topk=TOPK,
            surplus_last=adapter.schedule_surplus_last(adapter.device_sm("cuda")),
        )  # fmt: skip
        lens = buffers.seqlens_expanded[0]
        assert torch.equal(buffers.schedule[0], adapter.deep_gemm_schedule(lens, next_n))
        logits = deep_gemm.fp8_paged_mqa_logits(
            q.view(-1, next_n, heads, 128), index_k, weights, lens.view(-1, next_n), buffers.real_page_table[::next_n],
            buffers.schedule[0], buffers.table_width, clean_logits=False,
        )  # fmt: skip
        chosen = torch.full((requests * D, TOPK), -7777, dtype=torch.int32, device="cuda")
        paged(logits, lens, buffers.real_page_table, chosen, 64, buffers.topk_plan[0])
        own = torch.arange(logits.shape[1], device="cuda") < lens[:, None]
        if next_n == 1:  # as SGLang's indexer cuts them
            for piece in torch.arange(len(lens), device="cuda").split(deep_gemm.get_num_sms()):
                alone = deep_gemm.fp8_paged_mqa_logits(
                    q[piece][:, None], index_k, weights[piece], lens[piece][:, None], buffers.real_page_table[piece],
                    adapter.deep_gemm_schedule(lens[piece]), buffers.table_width, clean_logits=False,
                )  # fmt: skip
                assert torch.equal(torch.where(own[piece], alone, 0), torch.where(own[piece], logits[piece], 0))
        found.append((torch.where(own, logits, 0), chosen.sort(dim=1).values))
    for single, paired in zip(*found, strict=True):
        assert torch.equal(single, paired)
