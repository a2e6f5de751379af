"""Rows over chosen slots of a small KV cache, for the tests of the kernels that attend to them."""

from __future__ import annotations

import torch

LATENT, ROPE = 64, 16
OVERLAPS = (0.0, 0.35, 0.5, 0.75, 0.95, 1.0)
"""What a row shares with the row before it."""
RELATIVE_ERROR = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def case(device, rows, heads, topk, lens, dtype, seed, latent=LATENT, rope=ROPE, holes=False):
    """Rows of these lengths over their own slots; of the others every byte is NaN. With `holes` a fifth of a row is -1."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.stack([torch.randperm(4 * topk, generator=generator)[:topk] for _ in range(rows)]).int()
    if holes:
        slots = torch.where(torch.rand(rows, topk, generator=generator) < 0.2, -1, slots)
    return over_slots(device, slots, lens, 4 * topk, heads, dtype, generator, latent, rope)


def over_slots(device, slots, lens, num_slots, heads, dtype, generator, latent=LATENT, rope=ROPE):
    """Queries, KV cache, slots and lengths of rows that chose `slots`; of slots that no row chose every byte is NaN."""
    rows, topk = slots.shape
    lens = torch.tensor(lens, dtype=torch.int32)
    used = slots[(torch.arange(topk) < lens[:, None]) & (slots >= 0)].unique().long()
    kv = torch.full((num_slots, 1, latent + rope), float("nan"))
    kv[used] = torch.randn(len(used), 1, latent + rope, generator=generator)
    nope = torch.randn(heads, rows, latent, generator=generator).transpose(0, 1)  # as a batched matmul leaves it
    query = torch.randn(rows, heads, 8 + rope, generator=generator)
    tensors = [t.to(device, dtype) for t in (nope, query, kv)]
    return tensors[0], tensors[1][..., 8:], tensors[2], slots.to(device), lens.to(device)


def quantised(kv, latent, dtype):
    """The same slots as FlashMLA's FP8 cache has them, and the values that they then hold."""
    quarters = kv[..., :latent].float().unflatten(-1, (4, -1))
    scales = quarters.abs().amax(-1) / torch.finfo(torch.float8_e4m3fn).max
    values = (quarters / scales[..., None]).to(torch.float8_e4m3fn)
    pieces = (values.flatten(-2), scales, kv[..., latent:].to(dtype))
    packed = torch.cat([piece.contiguous().view(torch.uint8) for piece in pieces], dim=-1).view(torch.float8_e4m3fn)
    return packed, torch.cat([(values.float() * scales[..., None]).flatten(-2), kv[..., latent:].float()], dim=-1)


def selections(generator, requests, rows_per_request, topk, overlap):
    """int32 [rows, topk], in any order: each row keeps so much of the one before it. And how many slots there are."""
    fresh = topk - round(overlap * topk)
    num_slots = requests * (topk + rows_per_request * fresh) + 8
    free = torch.randperm(num_slots, generator=generator).int()
    rows = []
    for _ in range(requests):
        row, free = free[:topk], free[topk:]
        for j in range(rows_per_request):
            if j:
                row = torch.cat([row[torch.randperm(topk, generator=generator)][fresh:], free[:fresh]])
                free = free[fresh:]
            rows.append(row[torch.randperm(topk, generator=generator)])
    return torch.stack(rows), num_slots


def assert_near(out, want, dtype):
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert (out.float().cpu() - want).norm() <= RELATIVE_ERROR[dtype] * want.norm()
    empty = (want == 0).flatten(1).all(1)
    assert (out.cpu()[empty] == 0).all()
