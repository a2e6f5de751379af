"""The torch twin of `prefill.write_prefill`: the same fields by their formulas. It synchronises."""

from __future__ import annotations

import torch

from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.plan import PAGE_SIZE
from nsa_backend.kernels.prefill_fields import PrefillFields
from nsa_backend.kernels.prefix_sums import exclusive_sum


def write_prefill_torch(
    inputs: BatchInputs,
    *,
    req_to_token: torch.Tensor,
    index_topk: int,
    num_rows: int,
    longest: int,
    flattened: int = 0,
) -> PrefillFields:
    """All fields of one prefill; arguments as `prefill.write_prefill` takes them."""
    seq_lens, extend_lens = inputs.seq_lens, inputs.extend_lens
    requests, pages = seq_lens.shape[0], -(-longest // PAGE_SIZE)
    fields = PrefillFields.allocate(requests, num_rows, pages, flattened, req_to_token.device)
    owner = torch.repeat_interleave(torch.arange(requests, device=seq_lens.device), extend_lens.long())
    cu_q, cu_k = exclusive_sum(extend_lens), exclusive_sum(seq_lens)
    row = torch.arange(num_rows, device=seq_lens.device)
    lens = (seq_lens - extend_lens)[owner] + 1 + row - cu_q[owner]
    fields.cache_seqlens.copy_(seq_lens)
    fields.cu_seqlens_q.copy_(cu_q)
    fields.cu_seqlens_k.copy_(cu_k)
    fields.seqlens_expanded.copy_(lens)
    fields.nsa_cache_seqlens.copy_(lens.clamp(max=index_topk))
    fields.nsa_cu_seqlens_q.copy_(torch.arange(num_rows + 1))
    fields.nsa_cu_seqlens_k.copy_(exclusive_sum(lens.clamp(max=index_topk)))
    fields.token_to_batch_idx.copy_(owner)
    fields.k_start.copy_(cu_k[owner])
    fields.k_end.copy_(cu_k[owner] + lens)
    slots = [req_to_token[int(slot), : int(tokens)] for slot, tokens in zip(inputs.req_pool_indices, seq_lens, strict=True)]
    for request, mine in enumerate(slots):
        fields.real_page_table[request] = 0
        fields.real_page_table[request, : -(-len(mine) // PAGE_SIZE)] = mine[::PAGE_SIZE] // PAGE_SIZE
    if flattened:
        fields.flattened_slots.copy_(torch.cat(slots))
    return fields
