"""Rows into the paged MLA cache."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import BLOCK_ROWS
from kernels.triton_ops.ragged import as_rows, power_of_two


@triton.jit
def _write(rows, slots, cache, stride, block_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    slot = tl.load(slots + row)
    place = cache + slot // BLOCK_ROWS * block_stride + slot % BLOCK_ROWS * WIDTH
    tl.store(place + columns, tl.load(rows + row * stride + columns, mask=inside), mask=inside)


def mla_write(rows: Tensor, write_slots: Tensor, cache: Tensor) -> None:
    assert cache[0].is_contiguous(), "a block's rows lie one after the other"
    rows = as_rows(rows)
    count, width = rows.shape
    if count:
        block_stride, block = cache.stride(0), power_of_two(width)
        _write[(count,)](rows, write_slots, cache, rows.stride(0), block_stride, width, block, BLOCK_ROWS, num_warps=2)
