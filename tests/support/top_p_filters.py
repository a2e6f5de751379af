"""FlashInfer's two top-p filters as their CUDA source has them, in float32 and in its order of sums, for one row.

`radix` is `air_top_p.cuh` of 0.6.15 and 0.7.2; `bisecting` is `TopPRenormProbKernel` without its shorter way for top-p 1, which
older ones do not have.
"""

from __future__ import annotations

import numpy as np

PASSES = ((21, 2047), (10, 2047), (0, 1023))
"""First bit and mask of the bits that a pass looks at."""
WARP, BUCKETS = 32, 2048
F = np.float32


def joined(values: np.ndarray) -> F:
    """A sum by halves, as a warp makes it."""
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def descending(probs: np.ndarray) -> np.ndarray:
    """uint32 that order positive floats from the largest to the least."""
    return ~(probs.view(np.uint32) | np.uint32(1 << 31))


def radix(probs: np.ndarray, top_p: float, rng: np.random.Generator) -> np.ndarray:
    """Which of float32 `probs` stay, bool of its shape; `rng` is for the order of the atomic additions."""
    keys, found, left = descending(probs), np.uint32(0), F(0)
    for number, (start, mask) in enumerate(PASSES):
        inside = (
            np.ones(len(probs), dtype=bool)
            if number == 0
            else (keys >> PASSES[number - 1][0]) == (found >> PASSES[number - 1][0])
        )
        buckets = (keys[inside] >> np.uint32(start)) & np.uint32(mask)
        sums, counts = np.zeros(BUCKETS, dtype=F), np.bincount(buckets, minlength=BUCKETS)
        for at in rng.permutation(len(buckets)):
            sums[buckets[at]] += probs[inside][at]
        warps = np.array([joined(warp) for warp in sums.reshape(-1, WARP)], dtype=F)
        if number == 0:
            left = (joined(warps[:WARP]) + joined(warps[WARP:])) * F(top_p)
        before, step = F(0), 0
        for at in np.flatnonzero(warps):
            step = at
            if before + warps[at] >= left:
                break
            before += warps[at]
        target = 0
        for at in step * WARP + np.flatnonzero(counts[step * WARP :]):
            target = at
            if before + sums[at] >= left:
                break
            before += sums[at]
        left -= before
        found |= np.uint32(target << start)
    return keys <= found


def bisecting(probs: np.ndarray, top_p: float) -> np.ndarray:
    """Which of float32 `probs` stay, bool of its shape."""
    low, high = F(0), probs.max()
    while True:
        pivots = (high + 2 * low) / F(3), (2 * high + low) / F(3)
        above = [probs[probs > pivot].sum(dtype=F) for pivot in pivots]
        least = min([high, *probs[probs > low]])
        most = max([low, *probs[probs <= high]])
        if above[1] >= top_p:
            low = pivots[1]
        elif above[0] >= top_p:
            low, high = pivots[0], min(pivots[1], most)
        else:
            high = min(pivots[0], most)
        if least == most:
            return probs > low
