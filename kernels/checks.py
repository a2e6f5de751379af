"""Argument checks of the launchers, from shapes, dtypes, devices and strides alone: no synchronisation.

Every refusal is one sentence: what a tensor must be, what it is, and what the kernel would do with it.
"""

from __future__ import annotations

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


def require(fits: bool, name: str, tensor: torch.Tensor, form: str, consequence: str) -> None:
    """Raise ValueError unless `tensor` fits: it must be `form`, and `consequence` is what would happen."""
    if not fits:
        raise ValueError(
            f"{name} must be {form}, got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device}: {consequence}"
        )


def check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse anything but a contiguous tensor of this dtype and shape."""
    fits = tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    require(fits, name, tensor, f"contiguous {dtype} {list(shape)}", "the kernel would misread it")


def check_vector(name: str, tensor: torch.Tensor, length: int) -> None:
    """Refuse anything but `length` contiguous integers."""
    require(tensor.shape == (length,), name, tensor, f"[{length}]", "the kernel would read past its end")
    require(tensor.dtype in INDEX_DTYPES, name, tensor, "int32 or int64", "the kernel would misread its bits")
    require(tensor.is_contiguous(), name, tensor, "contiguous", "the kernel would read other requests' values")


def check_pool(req_to_token: torch.Tensor) -> None:
    """Refuse a request-to-token pool whose rows the kernels would misread."""
    fits = req_to_token.dim() == 2 and req_to_token.dtype == torch.int32 and req_to_token.stride(1) == 1
    form = "int32 [pool, width] with contiguous rows"
    require(fits, "req_to_token", req_to_token, form, "the kernel would copy other requests' slots")


def check_device(name: str, tensor: torch.Tensor, other: str, device: torch.device) -> None:
    """Refuse a tensor on another device than `other`, which is on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and {other} on {device}: the kernel cannot reach both")
