"""What enters the graph of a sampled speculative round: the batch, and how each of its requests samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nsa_backend.kernels.batch_inputs import PADDING_LENGTH, PADDING_SLOT
from nsa_backend.kernels.round_tensors import BLOCK, check_tensor, check_that_a_batch_fits

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

    def check(self, whose: str, rows: int) -> None:
        """Raises ValueError where a tensor has another dtype or layout than `rows` requests have; `whose` begins its name."""
        check_tensor(f"{whose}temperatures", self.temperatures, torch.float32, (rows, 1))
        check_tensor(f"{whose}top_ps", self.top_ps, torch.float32, (rows,))
        check_tensor(f"{whose}top_ks", self.top_ks, torch.int32, (rows,))


def keeping_all(top_ps: torch.Tensor) -> torch.Tensor:
    """The same, float32 [rows], with `KEEP_ALL_TOP_P` where every token is asked for."""
    return torch.where(top_ps >= 1.0, KEEP_ALL_TOP_P, top_ps)


BATCH = ["req_pool_indices_ptr", "seq_lens_ptr", "temperatures_ptr", "top_ps_ptr", "top_ks_ptr"]
"""Tensors that may lie anywhere: addresses that are no multiple of 16 must not compile the kernel again in a round."""


@triton.jit(do_not_specialize=[*BATCH, "num_requests", "num_rows"])
def fill_sampled_inputs_kernel(
    req_pool_indices_ptr,  # int64 [num_requests]
    seq_lens_ptr,  # int64 [num_requests]
    temperatures_ptr,  # float32 [num_requests]
    top_ps_ptr,  # float32 [num_requests]
    top_ks_ptr,  # int32 [num_requests]
    static_req_pool_indices_ptr,  # int64 [num_rows]
    static_seq_lens_ptr,  # int64 [num_rows]
    static_temperatures_ptr,  # float32 [num_rows]
    static_top_ps_ptr,  # float32 [num_rows]
    static_top_ks_ptr,  # int32 [num_rows]
    num_requests,
    num_rows,
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
        temperature = tl.load(temperatures_ptr + row, mask=real, other=PADDING_TEMPERATURE)
        top_p = tl.load(top_ps_ptr + row, mask=real, other=KEEP_ALL_TOP_P)
        top_p = tl.where(top_p >= 1.0, KEEP_ALL_TOP_P, top_p)
        top_k = tl.load(top_ks_ptr + row, mask=real, other=PADDING_TOP_K)
        tl.store(static_req_pool_indices_ptr + row, slot, mask=inside)
        tl.store(static_seq_lens_ptr + row, length, mask=inside)
        tl.store(static_temperatures_ptr + row, temperature, mask=inside)
        tl.store(static_top_ps_ptr + row, top_p, mask=inside)
        tl.store(static_top_ks_ptr + row, top_k, mask=inside)


def fill_sampled_round_inputs(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sampling: SamplingParameters,
    static_req_pool_indices: torch.Tensor,
    static_seq_lens: torch.Tensor,
    static_sampling: SamplingParameters,
) -> None:
    """`fill_round_inputs` of a sampled round: one launch with what its requests sample by.

    Args:
        req_pool_indices: int64 [requests], rows of the request pool.
        seq_lens: int64 [requests], tokens.
        sampling: of the requests.
        static_req_pool_indices: int64 [rows], at least as long; padding rows get `PADDING_SLOT`.
        static_seq_lens: int64 [rows]; padding rows get `PADDING_LENGTH`.
        static_sampling: of as many rows; it gets `KEEP_ALL_TOP_P` where a request asks for every token. Padding rows sample
            from the whole vocabulary, what they sample being read by nobody.

    Raises:
        ValueError: a tensor has another dtype or layout, or the batch does not fit.
    """
    requests, rows = len(seq_lens), len(static_seq_lens)
    check_that_a_batch_fits(req_pool_indices, seq_lens, static_req_pool_indices, static_seq_lens)
    sampling.check("", requests)
    static_sampling.check("static_", rows)
    fill_sampled_inputs_kernel[(1,)](
        req_pool_indices,
        seq_lens,
        sampling.temperatures,
        sampling.top_ps,
        sampling.top_ks,
        static_req_pool_indices,
        static_seq_lens,
        static_sampling.temperatures,
        static_sampling.top_ps,
        static_sampling.top_ks,
        requests,
        rows,
        PADDING_SLOT=PADDING_SLOT,
        PADDING_LENGTH=PADDING_LENGTH,
        PADDING_TEMPERATURE=PADDING_TEMPERATURE,
        PADDING_TOP_K=PADDING_TOP_K,
        KEEP_ALL_TOP_P=KEEP_ALL_TOP_P,
        BLOCK=BLOCK,
    )


def fill_sampled_round_inputs_torch(
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sampling: SamplingParameters,
    static_req_pool_indices: torch.Tensor,
    static_seq_lens: torch.Tensor,
    static_sampling: SamplingParameters,
) -> None:
    """The torch twin of `fill_sampled_round_inputs`."""
    for static, values, padding in (
        (static_req_pool_indices, req_pool_indices, PADDING_SLOT),
        (static_seq_lens, seq_lens, PADDING_LENGTH),
        (static_sampling.temperatures, sampling.temperatures, PADDING_TEMPERATURE),
        (static_sampling.top_ps, keeping_all(sampling.top_ps), KEEP_ALL_TOP_P),
        (static_sampling.top_ks, sampling.top_ks, PADDING_TOP_K),
    ):
        static[: len(values)], static[len(values) :] = values, padding
