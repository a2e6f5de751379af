"""Tiles of the CUDA kernel, and how they split the rows of a call."""

from __future__ import annotations

from dataclasses import dataclass

LATENT, ROPE = 512, 64
ROW_BYTES = 2 * (LATENT + ROPE)
MOST_PARTS = 128
"""Of a row, that the second kernel joins."""
MOST_SHARED_BYTES = 232448
"""Of a block, on Hopper."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class CudaTile:
    """What one block holds at a time, and how its warps share it: the constants of tile.h."""

    heads: int  # of a block: 16, 32 or 64
    tokens: int  # of a step
    stages: int  # steps in shared memory or on their way there
    warps_tokens: int  # that share the tokens in scores
    warps_values: int  # that share the 576 values of the dot product
    cluster: int = 1  # blocks of a row that join through distributed shared memory
    blocks: int = 1  # on an SM at a time
    bulk: bool = True  # a token comes as one bulk copy, or else in pieces of 16 bytes
    wgmma: bool = False  # products of warp groups: 64 heads, 64 tokens, two stages, eight warps

    @classmethod
    def of(cls, rows: int, heads: int) -> CudaTile:
        """By estimate: as few heads a block as reading the tokens again for each block allows."""
        if heads <= 16 or rows * heads <= 64:
            return TILES["h16"]
        return TILES["h32"] if heads <= 32 or rows * heads <= 128 else TILES["wgmma"]

    @property
    def threads(self) -> int:
        return 32 * self.warps_tokens * self.warps_values

    def macros(self) -> dict[str, int]:
        """What kernel.cu is compiled with."""
        return {
            "TILE_HEADS": self.heads,
            "TILE_TOKENS": self.tokens,
            "TILE_STAGES": self.stages,
            "TILE_WARPS_T": self.warps_tokens,
            "TILE_WARPS_D": self.warps_values,
            "TILE_CLUSTER": self.cluster,
            "TILE_BLOCKS": self.blocks,
            "TILE_BULK": int(self.bulk),
            "TILE_WGMMA": int(self.wgmma),
        }

    @property
    def shared_bytes(self) -> int:
        """SHARED_BYTES of the kernel."""
        if self.wgmma:
            rows = (self.stages * self.tokens + self.heads) * ROW_BYTES + self.heads * 2 * self.tokens
            return rows + 12 * self.heads + 4 * self.stages * self.tokens + 1024
        pitch = ROW_BYTES + 16
        query = _up(self.heads * pitch, 128)
        scores = _up(self.warps_values * self.heads * (self.tokens + 8) * 4, 128)
        tokens = _up(self.stages * self.tokens * pitch, 128)
        weights = _up(self.heads * (2 * self.tokens + 16), 128)
        return tokens + max(query, scores) + weights + 12 * self.heads + 4 * self.stages * self.tokens + 8 * (self.stages + 1)


TILES = {
    "h16": CudaTile(16, 32, 5, 2, 4),
    "h32": CudaTile(32, 32, 4, 2, 4),
    "wgmma": CudaTile(64, 64, 2, 2, 4, wgmma=True),
}
"""Those that `CudaTile.of` names, of 16, 32 and 64 heads a block."""


@dataclass(frozen=True)
class CudaSplit:
    """How the rows of one call are split; depends on shapes alone, so a shape's results do too."""

    parts: int  # of a row, that the second kernel joins; 1 where there is none
    blocks: int  # of a row: parts times the cluster
    chunk: int  # tokens of a block

    @classmethod
    def of(cls, rows: int, heads: int, topk: int, num_sms: int, tile: CudaTile) -> CudaSplit:
        """As many blocks as fit the GPU at once, or one cluster a row."""
        per_row = num_sms * tile.blocks // max(rows * -(-heads // tile.heads), 1)
        wanted = max(1, per_row // tile.cluster) * tile.cluster
        chunk = _up(-(-topk // min(wanted, MOST_PARTS * tile.cluster)), tile.tokens)
        blocks = _up(max(-(-topk // chunk), 1), tile.cluster)
        return cls(blocks // tile.cluster, blocks, chunk)


JOINS = (1, 4, 8)
"""Warps that share the parts of a row and head in the second kernel."""


def join_of(parts: int) -> int:
    """By estimate: a warp reads eight parts at once."""
    return 1 if parts <= 8 else 4 if parts <= 32 else 8
