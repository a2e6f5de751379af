"""Launches of what multiplies rows of experts in tiles, in CUDA C++: gate_up_rows and down_blocks, over expert_tiles.cuh."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.cuda_source import CudaKernel
from nsa_backend.kernels.expert_order import check_blocks

BLOCK = 128
"""Rows of a tile, all of one expert."""
PANEL = BLOCK * 128
"""Bytes of 128 FP8 values of each."""
BESIDE_PANELS = 1024
"""Bytes of shared memory that its alignment may take."""
THREADS = 384

Launch = Callable[[tuple[int, int], ctypes.Structure], None]
"""Runs a kernel for (blocks, 1)."""


@dataclass(frozen=True)
class Kernel:
    """One source, for experts of one width."""

    source: Path
    hidden: int
    width: int
    parts: int  # of a block's rows
    shared_bytes: int
    apart: int = 0  # nanoseconds by which one warpgroup begins a tile after the other, where the source has that

    @property
    def constants(self) -> dict[str, int]:
        """Macros of the source."""
        return {"HIDDEN": self.hidden, "WIDTH": self.width, "PARTS": self.parts, "APART": self.apart}

    def run(
        self, rows: int, device: torch.device, arguments: ctypes.Structure, num_sms: int | None, launch: Launch | None
    ) -> None:
        """Have every tile of up to `rows` rows computed: on a GPU if `launch` is None, in as many blocks as it has SMs.

        Raises:
            RuntimeError: NVRTC or the driver refuses.
        """
        if rows:
            launch = launch or compiled_on(self, device.index).launch
            num_sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
            launch((min(num_sms, blocks(rows, BLOCK) * self.parts), 1), arguments)


@functools.cache
def compiled_on(kernel: Kernel, device: int) -> CudaKernel:
    """The kernel, compiled at its first call on a device."""
    with torch.cuda.device(device):
        return CudaKernel(kernel.source, "multiply", kernel.constants, THREADS, kernel.shared_bytes)


def check_order(rows: int, sorted_ids: torch.Tensor, expert_ids: torch.Tensor, padded: torch.Tensor) -> None:
    """Refuse an order of `rows` rows in blocks that a kernel would misread."""
    check_tensor("padded", padded, torch.int32, (1,))
    check_tensor("expert_ids", expert_ids, torch.int32, (len(expert_ids),))
    check_blocks(rows, BLOCK, sorted_ids, expert_ids)
    if rows % BLOCK:
        raise ValueError(f"{rows} rows: blocks have {BLOCK} each")
