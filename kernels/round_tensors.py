"""What enters and leaves the graph of a whole speculative round: a batch into static tensors, results into a pinned ring.

Both are one program: a round has some hundred rows at most, and what they cost is the launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, PADDING_SLOT

BLOCK = 256


# A batch's tensors may lie anywhere: addresses that are no multiple of 16 must not compile a kernel again in a round.
@triton.jit(do_not_specialize=["req_pool_indices_ptr", "seq_lens_ptr", "num_requests", "num_rows"])
def fill_inputs_kernel(
    req_pool_indices_ptr,  # int64 [num_requests]
    seq_lens_ptr,  # int64 [num_requests]
    static_req_pool_indices_ptr,  # int64 [num_rows]
    static_seq_lens_ptr,  # int64 [num_rows]
    num_requests,
    num_rows,
    PADDING_SLOT: tl.constexpr,
    PADDING_LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        real, inside = row < num_requests, row < num_rows
        slot = tl.load(req_pool_indices_ptr + row, mask=real, other=PADDING_SLOT)
        length = tl.load(seq_lens_ptr + row, mask=real, other=PADDING_LENGTH)
        tl.store(static_req_pool_indices_ptr + row, slot, mask=inside)
        tl.store(static_seq_lens_ptr + row, length, mask=inside)


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


def fill_round_inputs(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    static_req_pool_indices: torch.Tensor,
    static_seq_lens: torch.Tensor,
) -> None:
    """Copy a batch into the static tensors of a captured round and make the rows beyond it padding; one launch.

    Args:
        req_pool_indices: int64 [requests], rows of the request pool.
        seq_lens: int64 [requests], tokens.
        static_req_pool_indices: int64 [rows], at least as long; padding rows get `PADDING_SLOT`.
        static_seq_lens: int64 [rows]; padding rows get `PADDING_LENGTH`.

    Raises:
        ValueError: a tensor has another dtype or layout, or the batch does not fit.
    """
    check_that_a_batch_fits(req_pool_indices, seq_lens, static_req_pool_indices, static_seq_lens)
    fill_inputs_kernel[(1,)](
        req_pool_indices,
        seq_lens,
        static_req_pool_indices,
        static_seq_lens,
        len(seq_lens),
        len(static_seq_lens),
        PADDING_SLOT=PADDING_SLOT,
        PADDING_LENGTH=PADDING_LENGTH,
        BLOCK=BLOCK,
    )


def fill_round_inputs_torch(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    static_req_pool_indices: torch.Tensor,
    static_seq_lens: torch.Tensor,
) -> None:
    """The torch twin of `fill_round_inputs`."""
    requests = len(seq_lens)
    static_req_pool_indices[:requests], static_req_pool_indices[requests:] = req_pool_indices, PADDING_SLOT
    static_seq_lens[:requests], static_seq_lens[requests:] = seq_lens, PADDING_LENGTH


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
    if ring.dtype != torch.int32 or not ring.is_contiguous() or ring.shape[1] < values:
        raise ValueError(
            f"ring must be contiguous int32 [depth, at least {values}], got {ring.dtype} {tuple(ring.shape)}: "
            "results would run into the next slot"
        )
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


def check_that_a_batch_fits(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    static_req_pool_indices: torch.Tensor,
    static_seq_lens: torch.Tensor,
) -> None:
    """Raises ValueError where an argument of `fill_round_inputs` has another dtype or layout, or the rows are too few."""
    requests, rows = len(seq_lens), len(static_seq_lens)
    named = {
        "req_pool_indices": (req_pool_indices, requests),
        "seq_lens": (seq_lens, requests),
        "static_req_pool_indices": (static_req_pool_indices, rows),
        "static_seq_lens": (static_seq_lens, rows),
    }
    for name, (tensor, length) in named.items():
        check_tensor(name, tensor, torch.int64, (length,))
    if requests > rows:
        raise ValueError(f"a batch of {requests} requests does not fit a round captured for {rows}: rows would be lost")


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError where a tensor is not contiguous, of this dtype and of this shape."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)}, got {tensor.dtype} {tuple(tensor.shape)} with stride "
            f"{tensor.stride()}: the kernel would misread it"
        )
