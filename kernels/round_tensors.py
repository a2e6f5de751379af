"""What enters and leaves the graph of a whole speculative round: a batch into static tensors, results into a pinned ring.

Both are one program: a round has some hundred rows at most, and what they cost is the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, PADDING_SLOT
from nsa_backend.kernels.checks import check_tensor, require

BLOCK = 256
KEEP_ALL_TOP_P = 4.0
"""Top-p that keeps every token, whatever rounding does; padding has it too.

FlashInfer's filter (`air_top_p.cuh` of 0.6.15 and 0.7.2) looks, in three passes over the bits of the probabilities, for the
one with which a running sum reaches top-p times the sum of the row. With top-p 1 rounding may let the running sum of a pass
miss that by its last bits, and the next pass then keeps the largest of the least likely tokens alone. A pass takes at most the
sum of the row off what is left to reach, so above 3 every pass misses it, and all tokens stay.
"""
PADDING_TEMPERATURE = 1.0
PADDING_TOP_K = 1 << 30
"""Keeps every token of any vocabulary."""


@dataclass(frozen=True)
class SamplingParameters:
    """How the requests of a batch sample; a greedy one has temperature 1 and top-k 1."""

    temperatures: torch.Tensor  # float32 [rows, 1]; above 0
    top_ps: torch.Tensor  # float32 [rows]; 1 asks for every token, and `KEEP_ALL_TOP_P` gets them
    top_ks: torch.Tensor  # int32 [rows]; at least a vocabulary's size keeps every token

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> SamplingParameters:
        """All rows padding."""
        return cls(
            torch.full((rows, 1), PADDING_TEMPERATURE, dtype=torch.float32, device=device),
            torch.full((rows,), KEEP_ALL_TOP_P, dtype=torch.float32, device=device),
            torch.full((rows,), PADDING_TOP_K, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class RoundInputs:
    """A batch, or the static tensors that a captured round reads, whose rows beyond the real requests are padding."""

    req_pool_indices: torch.Tensor  # int64 [rows]
    seq_lens: torch.Tensor  # int64 [rows]; tokens before the round
    sampling: SamplingParameters | None = None  # of a sampled round
    num_requests: torch.Tensor | None = None  # int32 [1], rows that are no padding; of static tensors alone

    @classmethod
    def allocate(cls, size: int, device: torch.device | str, *, sampled: bool = False) -> RoundInputs:
        """Static tensors, all rows padding."""
        return cls(
            torch.full((size,), PADDING_SLOT, dtype=torch.int64, device=device),
            torch.full((size,), PADDING_LENGTH, dtype=torch.int64, device=device),
            SamplingParameters.allocate(size, device) if sampled else None,
            torch.zeros(1, dtype=torch.int32, device=device),
        )

    def check(self, whose: str) -> None:
        """Raises ValueError where a tensor has another dtype or layout than the kernel reads; `whose` begins its name."""
        rows = len(self.seq_lens)
        check_tensor(f"{whose}req_pool_indices", self.req_pool_indices, torch.int64, (rows,))
        check_tensor(f"{whose}seq_lens", self.seq_lens, torch.int64, (rows,))
        if self.sampling is not None:
            check_tensor(f"{whose}temperatures", self.sampling.temperatures, torch.float32, (rows, 1))
            check_tensor(f"{whose}top_ps", self.sampling.top_ps, torch.float32, (rows,))
            check_tensor(f"{whose}top_ks", self.sampling.top_ks, torch.int32, (rows,))


BATCH = ["req_pool_indices_ptr", "seq_lens_ptr", "temperatures_ptr", "top_ps_ptr", "top_ks_ptr"]
"""Tensors that may lie anywhere: addresses that are no multiple of 16 must not compile the kernel again in a round."""


@triton.jit(do_not_specialize=[*BATCH, "num_requests", "num_rows"])
def fill_inputs_kernel(
    req_pool_indices_ptr,  # int64 [num_requests]
    seq_lens_ptr,  # int64 [num_requests]
    temperatures_ptr,  # float32 [num_requests]; this and the next two are read where SAMPLED
    top_ps_ptr,  # float32 [num_requests]
    top_ks_ptr,  # int32 [num_requests]
    static_req_pool_indices_ptr,  # int64 [num_rows]
    static_seq_lens_ptr,  # int64 [num_rows]
    static_temperatures_ptr,  # float32 [num_rows]
    static_top_ps_ptr,  # float32 [num_rows]
    static_top_ks_ptr,  # int32 [num_rows]
    static_num_requests_ptr,  # int32 [1]
    num_requests,
    num_rows,
    SAMPLED: tl.constexpr,
    PADDING_SLOT: tl.constexpr,
    PADDING_LENGTH: tl.constexpr,
    PADDING_TEMPERATURE: tl.constexpr,
    PADDING_TOP_K: tl.constexpr,
    KEEP_ALL_TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        real, inside = row < num_requests, row < num_rows
        slot = tl.load(req_pool_indices_ptr + row, mask=real, other=PADDING_SLOT)
        length = tl.load(seq_lens_ptr + row, mask=real, other=PADDING_LENGTH)
        tl.store(static_req_pool_indices_ptr + row, slot, mask=inside)
        tl.store(static_seq_lens_ptr + row, length, mask=inside)
        if SAMPLED:
            temperature = tl.load(temperatures_ptr + row, mask=real, other=PADDING_TEMPERATURE)
            top_p = tl.load(top_ps_ptr + row, mask=real, other=KEEP_ALL_TOP_P)
            top_k = tl.load(top_ks_ptr + row, mask=real, other=PADDING_TOP_K)
            tl.store(static_temperatures_ptr + row, temperature, mask=inside)
            tl.store(static_top_ps_ptr + row, tl.where(top_p >= 1.0, KEEP_ALL_TOP_P, top_p), mask=inside)
            tl.store(static_top_ks_ptr + row, top_k, mask=inside)
    tl.store(static_num_requests_ptr, num_requests)


# Where the compiler knows that results are aligned, threads load neighbours, and hand them on through shared memory to store.
@triton.jit(
    do_not_specialize=["next_token_ids_ptr", "accept_lens_ptr", "logprobs_ptr", "num_tokens", "num_requests", "slot_stride"]
)
def store_results_kernel(
    next_token_ids_ptr,  # int32 [num_tokens]
    accept_lens_ptr,  # int32 [num_requests]
    logprobs_ptr,  # int32 [num_tokens], the bits of float32
    ring_ptr,  # int32 [DEPTH, slot_stride] in pinned host memory: tokens, accept lengths, log-probabilities
    launches_ptr,  # int64 [1]
    num_tokens,
    num_requests,
    slot_stride,
    LOGPROBS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    launches = tl.load(launches_ptr)
    slot_ptr = ring_ptr + (launches % DEPTH) * slot_stride
    for start in range(0, tl.maximum(num_tokens, num_requests), BLOCK):
        item = start + tl.arange(0, BLOCK)
        tokens = tl.load(next_token_ids_ptr + item, mask=item < num_tokens)
        lens = tl.load(accept_lens_ptr + item, mask=item < num_requests)
        tl.store(slot_ptr + item, tokens, mask=item < num_tokens)
        tl.store(slot_ptr + num_tokens + item, lens, mask=item < num_requests)
        if LOGPROBS:
            logprobs = tl.load(logprobs_ptr + item, mask=item < num_tokens)
            tl.store(slot_ptr + num_tokens + num_requests + item, logprobs, mask=item < num_tokens)
    tl.debug_barrier()  # every warp has read the counter
    tl.store(launches_ptr, launches + 1)


def fill_round_inputs(batch: RoundInputs, static: RoundInputs) -> None:
    """Copy a batch into the static tensors of a captured round and make the rows beyond it padding; one launch.

    Padding rows get `PADDING_SLOT` and `PADDING_LENGTH`, and sample from the whole vocabulary, which nobody reads. A request
    that asks for every token gets `KEEP_ALL_TOP_P`. `static.num_requests` gets the number of requests.

    Args:
        batch: its own tensors, of as many rows as it has requests.
        static: of at least as many rows; both are sampled, or neither is.

    Raises:
        ValueError: a tensor has another dtype or layout, or the batch does not fit.
    """
    requests, rows = len(batch.seq_lens), len(static.seq_lens)
    batch.check("")
    static.check("static_")
    assert (batch.sampling is None) == (static.sampling is None)
    if requests > rows:
        raise ValueError(f"a batch of {requests} requests does not fit a round captured for {rows}: rows would be lost")
    unread = SamplingParameters(static.seq_lens, static.seq_lens, static.seq_lens)
    theirs, ours = batch.sampling or unread, static.sampling or unread
    fill_inputs_kernel[(1,)](
        batch.req_pool_indices,
        batch.seq_lens,
        theirs.temperatures,
        theirs.top_ps,
        theirs.top_ks,
        static.req_pool_indices,
        static.seq_lens,
        ours.temperatures,
        ours.top_ps,
        ours.top_ks,
        static.num_requests,
        requests,
        rows,
        SAMPLED=batch.sampling is not None,
        PADDING_SLOT=PADDING_SLOT,
        PADDING_LENGTH=PADDING_LENGTH,
        PADDING_TEMPERATURE=PADDING_TEMPERATURE,
        PADDING_TOP_K=PADDING_TOP_K,
        KEEP_ALL_TOP_P=KEEP_ALL_TOP_P,
        BLOCK=BLOCK,
    )


def fill_round_inputs_torch(batch: RoundInputs, static: RoundInputs) -> None:
    """The torch twin of `fill_round_inputs`."""
    requests = len(batch.seq_lens)
    pairs = [
        (static.req_pool_indices, batch.req_pool_indices, PADDING_SLOT),
        (static.seq_lens, batch.seq_lens, PADDING_LENGTH),
    ]
    if batch.sampling is not None:
        top_ps = torch.where(batch.sampling.top_ps >= 1.0, KEEP_ALL_TOP_P, batch.sampling.top_ps)
        pairs += [
            (static.sampling.temperatures, batch.sampling.temperatures, PADDING_TEMPERATURE),
            (static.sampling.top_ps, top_ps, KEEP_ALL_TOP_P),
            (static.sampling.top_ks, batch.sampling.top_ks, PADDING_TOP_K),
        ]
    for into, values, padding in pairs:
        into[:requests], into[requests:] = values, padding
    static.num_requests.fill_(requests)


def store_round_results(
    next_token_ids: torch.Tensor,
    accept_lens: torch.Tensor,
    ring: torch.Tensor,
    launches: torch.Tensor,
    logprobs: torch.Tensor | None = None,
) -> None:
    """Write the results of a round into the slot of the ring that is this launch's turn, and count the launch.

    A graph always writes to the same addresses, and the host reads a round's results while the next one runs. The slot comes
    from a counter on the GPU that every launch advances; the host counts its launches too.

    Args:
        next_token_ids: int32 [tokens].
        accept_lens: int32 [requests].
        ring: int32 [depth, at least tokens + requests, and tokens more with log-probabilities]; pinned host memory, which the
            GPU writes through.
        launches: int64 [1]; rounds so far, on the device of the results.
        logprobs: float32 [tokens], log-probabilities of the tokens, or None. Their bits follow the accept lengths.

    Raises:
        ValueError: a tensor has another dtype or layout, or a slot is too small.
    """
    check_tensor("next_token_ids", next_token_ids, torch.int32, (len(next_token_ids),))
    check_tensor("accept_lens", accept_lens, torch.int32, (len(accept_lens),))
    check_tensor("launches", launches, torch.int64, (1,))
    tokens, requests = len(next_token_ids), len(accept_lens)
    if logprobs is not None:
        check_tensor("logprobs", logprobs, torch.float32, (tokens,))
    values = slot_size(tokens, requests, logprobs=logprobs is not None)
    fits = ring.dtype == torch.int32 and ring.is_contiguous() and ring.shape[1] >= values
    form = f"contiguous int32 [depth, at least {values}]"
    require(fits, "ring", ring, form, "results would run into the next slot")
    store_results_kernel[(1,)](
        next_token_ids,
        accept_lens,
        next_token_ids if logprobs is None else logprobs.view(torch.int32),
        ring,
        launches,
        tokens,
        requests,
        ring.stride(0),
        LOGPROBS=logprobs is not None,
        DEPTH=ring.shape[0],
        BLOCK=BLOCK,
    )


def store_round_results_torch(
    next_token_ids: torch.Tensor,
    accept_lens: torch.Tensor,
    ring: torch.Tensor,
    launches: torch.Tensor,
    logprobs: torch.Tensor | None = None,
) -> None:
    """The torch twin of `store_round_results`."""
    parts = [next_token_ids, accept_lens, *([] if logprobs is None else [logprobs.view(torch.int32)])]
    values = torch.cat(parts).to(ring.device)
    ring[int(launches) % ring.shape[0], : len(values)] = values
    launches += 1


def slot_size(tokens: int, requests: int, *, logprobs: bool) -> int:
    """int32 values that the results of a round take."""
    return tokens + requests + tokens * logprobs


def read_slot(
    slot: torch.Tensor, tokens: int, requests: int, *, logprobs: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Views of a slot that `store_round_results` has written: tokens, accept lengths, log-probabilities (None without)."""
    ids, lens, rest = slot[:tokens], slot[tokens : tokens + requests], slot[tokens + requests :]
    return ids, lens, rest[:tokens].view(torch.float32) if logprobs else None
