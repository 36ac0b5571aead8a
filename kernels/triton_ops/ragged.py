"""Sequences of unequal length, cut into tiles of equally many rows: which rows a tile has is found on the device, so that
nothing waits for lengths."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def find_tile(tile, bounds, sequences, ROWS: tl.constexpr, BATCH: tl.constexpr):
    """Tile number -> its sequence, that one's rows `start` to `stop`, and the tile's first row.

    An empty sequence has one tile, of no rows; a tile too many is one of sequence `sequences`. BATCH is a power of two, at
    least `sequences`.
    """
    every = tl.arange(0, BATCH)
    known = every < sequences
    starts = tl.load(bounds + every, mask=known, other=0)
    stops = tl.load(bounds + every + 1, mask=known, other=0)
    tiles = tl.where(known, tl.maximum(tl.cdiv(stops - starts, ROWS), 1), 0)
    ends = tl.cumsum(tiles, 0)
    sequence = tl.sum((known & (ends <= tile)).to(tl.int32), 0)
    mine = every == sequence
    start = tl.sum(tl.where(mine, starts, 0), 0)
    stop = tl.sum(tl.where(mine, stops, 0), 0)
    first = start + (tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)) * ROWS
    return sequence, start, stop, first


def most_tiles(rows: int, sequences: int, size: int) -> int:
    """No batch of so many rows and sequences has more tiles of `size` rows."""
    return rows // size + sequences


def power_of_two(value: int) -> int:
    """The next one."""
    return triton.next_power_of_2(max(value, 1))


def as_rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n], dense along n; a view where that is possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
