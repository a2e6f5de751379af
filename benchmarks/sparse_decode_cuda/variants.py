"""What measure.py measures."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nsa_backend.benchmarks.sparse_decode_cuda.launch import sparse_decode_cuda
from nsa_backend.benchmarks.sparse_decode_cuda.tiles import TILES, CudaSplit, CudaTile
from nsa_backend.kernels.sparse_decode import Parts

MOST_BLOCKS = 32
"""Of heads, over all rows, where a row has several: each reads the row's tokens again."""


@dataclass(frozen=True)
class Variant:
    """A tile, and the part of the SMs that a call's blocks are to fill."""

    tile: CudaTile
    share: float = 1.0

    def split(self, rows: int, heads: int, topk: int, num_sms: int) -> CudaSplit:
        return CudaSplit.of(rows, heads, topk, int(self.share * num_sms), self.tile)

    def call(
        self, inputs: tuple, scale: float, num_sms: int, *, parts: Parts | None = None, join_warps: int | None = None
    ) -> torch.Tensor:
        sms = int(self.share * num_sms)
        return sparse_decode_cuda(*inputs, scale, num_sms=sms, tile=self.tile, parts=parts, join_warps=join_warps)

    def has(self, heads: int) -> bool:
        """Whether so many heads do not leave half a block empty."""
        return self.tile.heads < 2 * max(heads, 16)

    def is_worth_a_measurement(self, rows: int, heads: int) -> bool:
        """Whether tokens are not read too often besides."""
        blocks = -(-heads // self.tile.heads)
        return self.has(heads) and (blocks == 1 or rows * blocks <= MOST_BLOCKS or self.tile.wgmma)


H16, H32, WGMMA = TILES["h16"], TILES["h32"], TILES["wgmma"]
LONG = CudaTile(16, 64, 2, 4, 2)
VARIANTS = {
    "h16": Variant(H16),
    "h16 half": Variant(H16, 0.5),
    "h16 c2": Variant(replace(H16, cluster=2)),
    "h16 c4": Variant(replace(H16, cluster=4)),
    "h16 c8": Variant(replace(H16, cluster=8)),
    "h16 pieces": Variant(replace(H16, bulk=False)),
    "h16 pieces c8": Variant(replace(H16, bulk=False, cluster=8)),
    "h16 t64": Variant(LONG),
    "h16 t64 c8": Variant(replace(LONG, cluster=8)),
    "h16 t64 pieces": Variant(replace(LONG, bulk=False)),
    "h16 b2": Variant(CudaTile(16, 32, 2, 2, 4, blocks=2)),
    "h16 w4 b2": Variant(CudaTile(16, 32, 2, 2, 2, blocks=2)),
    "h32": Variant(H32),
    "h32 half": Variant(H32, 0.5),
    "h32 pieces": Variant(replace(H32, bulk=False)),
    "h32 c4": Variant(replace(H32, cluster=4)),
    "h32 c8": Variant(replace(H32, cluster=8)),
    "wgmma": Variant(WGMMA),
    "wgmma half": Variant(WGMMA, 0.5),
    "wgmma c2": Variant(replace(WGMMA, cluster=2)),
    "wgmma c4": Variant(replace(WGMMA, cluster=4)),
    "wgmma c8": Variant(replace(WGMMA, cluster=8)),
}
"""By name: c is for the blocks of a cluster, t for the tokens of a step, w for warps, b for blocks on an SM; `half` fills half
the SMs, and `pieces` copies tokens by 16 bytes."""
