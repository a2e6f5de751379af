"""What both products have that multiply rows of experts in tiles: room for their blocks, and registers."""

from __future__ import annotations

import pytest
from emulated import multiply_emulator

from nsa_backend.kernels import down_blocks, gate_up_rows
from nsa_backend.kernels.cuda_source import compiled


@pytest.mark.parametrize("kernel", [gate_up_rows.kernel_for(640), down_blocks.kernel_for(512)])
def test_blocks_have_room_in_shared_memory(kernel):
    assert multiply_emulator(kernel).shared_bytes() == kernel.shared_bytes <= 232448


@pytest.mark.parametrize("hidden", [7168, 6144])
@pytest.mark.parametrize("product", [gate_up_rows, down_blocks])
def test_it_compiles_for_hopper_with_all_in_registers(product, hidden):
    kernel = product.kernel_for(hidden)
    _, said = compiled(kernel.source, kernel.constants)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said
