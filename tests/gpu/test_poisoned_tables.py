"""Page-table columns past a request's length are never used: poison them with slots and pages that do not exist."""

import pytest
import torch

from nsa_backend.adapters.installed import adapter
from nsa_backend.kernels import plan as plans
from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.metadata import write_metadata
from nsa_backend.kernels.topk_slots import topk_slots

pytestmark = pytest.mark.gpu

POISON = 2**30
WIDTH, TOPK = 6400, 2048


def paged_index(pages: int, seed: int = 0):
    """Random FP8 index keys in the pool's layout: 64 keys of 128 bytes, then 64 float32 scales."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    keys = torch.randn(pages, 64 * 128, generator=generator, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(pages, 64, generator=generator, device="cuda").view(torch.uint8)
    return torch.cat([keys, scales], dim=1).view(pages, 64, 1, 132)


def _through_pages(logits: torch.Tensor, lens: torch.Tensor, buffers) -> torch.Tensor:
    """Slots by SGLang's top-k v2 kernel; none where the release has none."""
    kernel = adapter.topk_v2()
    if kernel is None:
        return logits.new_empty(0, TOPK)
    out = torch.full((logits.shape[0], TOPK), POISON, dtype=torch.int32, device="cuda")
    kernel[0](logits, lens, buffers.real_page_table, out, 64, buffers.topk_plan[0])
    return out


def test_logits_and_topk():
    import deep_gemm
    from sgl_kernel import fast_topk_transform_fused, fast_topk_v2

    requests, d, heads = 6, 4, 64
    lengths = torch.tensor([1, 63, 64, 2500, 5000, 6300], dtype=torch.int32, device="cuda")
    table = torch.stack([torch.randperm(8192, device="cuda")[: WIDTH // 64] for _ in range(requests)])
    req_to_token = (table[..., None] * 64 + torch.arange(64, device="cuda")).flatten(1).int().contiguous()
    plan = plans.plan_target_verify(requests, d)
    index_k = paged_index(8192)
    q = torch.randn(plan.num_rows, 1, heads, 128, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.rand(plan.num_rows, heads, device="cuda")
    found = {}
    for fill in (0, POISON):
        buffers = MetadataBuffers.allocate(
            plan, table_width=WIDTH, num_sms=deep_gemm.get_num_sms(), device="cuda", wide=True, planned=True
        )
        buffers.page_table_1.fill_(fill)
        buffers.real_page_table.fill_(fill)
        write_metadata(
            plan, buffers, BatchInputs(lengths, torch.arange(requests, device="cuda")),
            req_to_token=req_to_token, index_topk=TOPK, surplus_last=adapter.schedule_surplus_last(adapter.device_sm("cuda")),
        )  # fmt: skip
        lens = buffers.seqlens_expanded[0]
        logits = deep_gemm.fp8_paged_mqa_logits(
            q, index_k, weights, lens[:, None], buffers.real_page_table, buffers.schedule[0], WIDTH, clean_logits=False
        )
        valid = torch.arange(logits.shape[1], device="cuda") < lens[:, None]
        slots = fast_topk_transform_fused(
            score=logits, lengths=lens, page_table_size_1=buffers.page_table_1, cu_seqlens_q=buffers.cu_seqlens_q, topk=TOPK
        )
        positions = fast_topk_v2(logits, lens, TOPK)
        unfused = topk_slots(positions, buffers.real_page_table, buffers.arange[: plan.num_rows], 64)
        found_slots = [*slots, *unfused, *_through_pages(logits, lens, buffers)]
        found[fill] = (torch.where(valid, logits, 0), slots.sort(dim=1).values)
        rows = buffers.token_to_batch_idx.long()
        for row, chosen in enumerate(found_slots):
            row %= plan.num_rows
            chosen = chosen[chosen >= 0]
            assert len(chosen) == min(int(lens[row]), TOPK)
            own = req_to_token[rows[row], : int(lens[row])]
            assert torch.isin(chosen, own).all(), f"row {row} attends to a slot that is not its own"
    for clean, poisoned in zip(found[0], found[POISON], strict=True):
        assert torch.equal(clean, poisoned)
