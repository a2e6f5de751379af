"""Sizes of launches are those that Triton's own functions give."""

from __future__ import annotations

import triton
from hypothesis import given
from hypothesis import strategies as st

from nsa_backend.kernels.blocks import blocks, power_of_two


@given(count=st.integers(0, 2**31), size=st.integers(1, 2**20))
def test_blocks(count, size):
    assert blocks(count, size) == triton.cdiv(count, size)


@given(count=st.integers(1, 2**31))
def test_powers_of_two(count):
    assert power_of_two(count) == triton.next_power_of_2(count)
