"""Argument checks of the metadata launch, from shapes, dtypes, devices and strides alone: no synchronisation."""

from __future__ import annotations

import torch

from nsa_backend.kernels.batch_inputs import BatchInputs
from nsa_backend.kernels.buffers import MetadataBuffers
from nsa_backend.kernels.plan import MetadataPlan

INDEX_DTYPES = (torch.int32, torch.int64)


def check_arguments(
    plan: MetadataPlan,
    buffers: MetadataBuffers,
    inputs: BatchInputs,
    req_to_token: torch.Tensor,
) -> None:
    """Refuse what the kernel would read or write out of bounds; raises ValueError with the consequence."""
    device = buffers.real_page_table.device
    vectors = {"seq_lens": inputs.seq_lens, "req_pool_indices": inputs.req_pool_indices}
    if plan.ragged and inputs.extend_lens is None:
        raise ValueError("a ragged plan needs extend_lens: without them the rows of a request are unknown")
    if plan.ragged:
        vectors["extend_lens"] = inputs.extend_lens
    for name, tensor in vectors.items():
        check_vector(name, tensor, plan.num_requests)
        check_device(name, tensor, device)
    check_pool(req_to_token)
    check_device("req_to_token", req_to_token, device)
    _check_room(plan, buffers)


def check_pool(req_to_token: torch.Tensor) -> None:
    """Refuse a request-to-token pool whose rows the kernels would misread."""
    if req_to_token.dim() != 2 or req_to_token.dtype != torch.int32 or req_to_token.stride(1) != 1:
        raise ValueError(
            "req_to_token must be int32 [pool, width] with contiguous rows, got "
            f"{req_to_token.dtype} {tuple(req_to_token.shape)} with strides {req_to_token.stride()}: "
            "the kernel would copy other requests' slots"
        )


def check_vector(name: str, tensor: torch.Tensor, length: int) -> None:
    """Refuse anything but `length` contiguous integers."""
    if tensor.dim() != 1 or tensor.shape[0] != length:
        raise ValueError(f"{name} must be [{length}], got {tuple(tensor.shape)}: the kernel would read past its end")
    if tensor.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}: the kernel would misread its bits")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got stride {tensor.stride(0)}: the kernel would read other requests' values"
        )


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor on another device than what the kernel writes."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and the metadata on {device}: the kernel cannot reach both")


def _check_room(plan: MetadataPlan, buffers: MetadataBuffers) -> None:
    steps, requests = buffers.cache_seqlens.shape
    rows = buffers.nsa_cache_seqlens.shape[1]
    if plan.num_steps > steps or plan.num_requests > requests or plan.num_rows > rows:
        raise ValueError(
            f"the buffers hold {steps} steps of {requests} requests and {rows} rows, the plan wants {plan.num_steps} steps of "
            f"{plan.num_requests} requests and {plan.num_rows} rows: the kernel would write past their end"
        )
    if not plan.ragged and plan.num_rows != plan.num_requests * plan.rows_per_request:
        raise ValueError(
            f"{plan.num_requests} requests of {plan.rows_per_request} rows are not {plan.num_rows} rows: "
            "some rows would keep the lengths of an earlier batch"
        )
    if plan.rows_per_request % plan.next_n:
        raise ValueError(
            f"{plan.rows_per_request} rows of a request are no groups of {plan.next_n}: the logits would mix requests"
        )
    rows_are_requests = buffers.seqlens_expanded is buffers.cache_seqlens
    if rows_are_requests == plan.expanded:
        raise ValueError(
            f"the plan has {plan.rows_per_request or 'ragged'} rows a request, the buffers were allocated for "
            f"{'one' if rows_are_requests else 'several'}: row lengths would be lost or overwrite request lengths"
        )
