"""Sizes of launches in plain integers: Triton's own functions for them take more of the host's time, in every layer."""

from __future__ import annotations


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` hold `count` elements."""
    return -(-count // size)


def power_of_two(count: int) -> int:
    """The smallest one that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
