"""How one call of sparse decode is run: what a program holds, and into how many parts a row is split; shapes alone decide."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_backend.kernels.blocks import blocks


@dataclass(frozen=True)
class Tile:
    """What one program holds at a time, and how it is run."""

    heads: int  # that a program serves
    tokens: int  # of one step, and the least stretch of a row; both at least 16, which tensor cores take
    warps: int
    stages: int  # one more than the steps whose tokens are on their way from memory
    programs: int = 1  # of an SM at a time

    @classmethod
    def of(cls, rows: int, heads: int, *, fp8: bool = False) -> Tile:
        """The fastest on an H200, of those in benchmarks/results/attention_0_5_23_h200.json (tiles), or nearly so.

        Few blocks of sixteen heads are split into the shortest stretches. More of them read longer ones, with more tokens on
        their way, and then read them for more heads at a time. FP8 values take registers to widen: many rows read less at once.
        """
        tiles = rows * blocks(heads, 16)
        if tiles <= (2 if fp8 else 4):
            return cls(16, 32, 4, 3)
        if tiles <= 8 or (fp8 and heads <= 16 and tiles <= 16):
            return cls(16, 64, 4, 3)
        if heads <= 16:
            if fp8:
                return cls(16, 32, 4, 3, programs=2)
            return cls(16, 64, 8, 3) if tiles <= 16 else cls(16, 64, 4, 2, programs=2)
        if tiles < 64 or (heads <= 32 and not fp8):
            return cls(32, 64, 8, 3)
        if fp8:
            return cls(32, 32, 4, 3, programs=2) if heads <= 32 else cls(64, 32, 8, 3)
        return cls(64, 64, 8, 2)


@dataclass(frozen=True)
class Join:
    """What one program of the second kernel holds at a time."""

    parts: int  # of a row, in one step
    latent: int  # of a head
    warps: int

    @classmethod
    def of(cls, rows: int, heads: int) -> Join:
        """The fastest on an H200; from the same file."""
        return cls(64, 128, 4) if rows * heads <= 64 else cls(16, 512, 4)


@dataclass(frozen=True)
class Split:
    """How the rows of one call are split; depends on shapes alone, so a shape's results do too."""

    parts: int  # of a row
    chunk: int  # tokens of a part

    @classmethod
    def of(cls, rows: int, heads: int, topk: int, num_sms: int, tile: Tile) -> Split:
        """As many parts as fill the GPU once with as many programs an SM as the tile says.

        Args:
            rows: query rows.
            heads: query heads.
            topk: most tokens of a row.
            num_sms: of the GPU.
            tile: of the call.
        """
        wanted = max(1, num_sms * tile.programs // max(rows * blocks(heads, tile.heads), 1))
        chunk = blocks(blocks(topk, wanted), tile.tokens) * tile.tokens
        return cls(blocks(topk, chunk), chunk)
