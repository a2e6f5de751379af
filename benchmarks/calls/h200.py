"""What an H200 can do, as measured on one: the floors that times are compared with."""

from __future__ import annotations

MEMORY_BYTES_PER_S = 4.3e12  # device copies, read and written bytes together
BF16_FLOPS = 790e12  # an 8192 x 8192 x 8192 matrix product
LAUNCH_US = 1.3  # of a kernel in a captured graph
