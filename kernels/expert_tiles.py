"""Launches of what multiplies rows of experts in tiles, in CUDA C++: gate_up_rows and down_blocks, over expert_tiles.cuh."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_backend.kernels.blocks import blocks
from nsa_backend.kernels.checks import check_tensor
from nsa_backend.kernels.cuda_source import ALIGNMENT, CudaKernel, Launch
from nsa_backend.kernels.expert_order import check_blocks
from nsa_backend.kernels.layer_front_weights import GROUP

BLOCK = 128
"""Rows of a tile, all of one expert."""
WIDTH = 2 * GROUP
"""Of the experts that are served."""
PANEL = BLOCK * GROUP
"""Bytes of 128 FP8 values of each row."""
THREADS = 384
BOX_ROWS = 64
"""Of a tensor, that come at once."""


@dataclass(frozen=True)
class Kernel:
    """One source, whose kernel has its name, for hidden states of one width."""

    source: Path
    hidden: int
    panels: int  # of shared memory, each PANEL bytes
    barriers: int
    beside: int = 0  # bytes of shared memory that are neither

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.panels * PANEL + self.barriers * 8 + self.beside + ALIGNMENT

    @property
    def constants(self) -> dict[str, int]:
        """Macros of the source."""
        return {"HIDDEN": self.hidden}

    def run(
        self, rows: int, device: torch.device, arguments: ctypes.Structure, num_sms: int | None, launch: Launch | None
    ) -> None:
        """Have every tile of up to `rows` rows computed: on a GPU if `launch` is None, by pairs of its SMs.

        Raises:
            RuntimeError: NVRTC or the driver refuses.
        """
        launch = launch or compiled_on(self, device.index).launch
        num_sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
        launch((2 * min(num_sms // 2, blocks(rows, BLOCK)), 1), arguments)


@functools.cache
def compiled_on(kernel: Kernel, device: int) -> CudaKernel:
    """The kernel, compiled at its first call on a device."""
    with torch.cuda.device(device):
        return CudaKernel(kernel.source, kernel.source.stem, kernel.constants, THREADS, kernel.shared_bytes)


def check_order(rows: int, sorted_ids: torch.Tensor, expert_ids: torch.Tensor, padded: torch.Tensor) -> None:
    """Refuse an order of `rows` rows in blocks that a kernel would misread."""
    check_tensor("padded", padded, torch.int32, (1,))
    check_tensor("expert_ids", expert_ids, torch.int32, (len(expert_ids),))
    check_blocks(rows, BLOCK, sorted_ids, expert_ids)
    if rows % BLOCK:
        raise ValueError(f"{rows} rows: blocks have {BLOCK} each")
