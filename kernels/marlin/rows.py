"""Rows around Marlin's products, in Triton: packed by expert and back, SiTU between the products, routes summed.

A schedule is known to the device alone: `routes` lists rows, in whole blocks of one expert each, a number past the end where a
block has no more; `owners` has each block's expert, -1 for none here; `total` says how far the list goes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 512


@triton.jit
def _extents(counts, experts: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Counts and ends of the experts' blocks, in rows."""
    number = tl.arange(0, PADDED)
    count = tl.load(counts + number, number < experts, other=0)
    return count, tl.cumsum(tl.cdiv(count, BLOCK) * BLOCK)


@triton.jit
def _block(counts, first, experts: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Of the block that begins at row `first`: its expert, its first row among the expert's, the expert's count; and the end
    of all blocks."""
    number = tl.arange(0, PADDED)
    count, ends = _extents(counts, experts, PADDED, BLOCK)
    expert = tl.sum((ends <= first).to(tl.int32))
    mine = number == expert
    begins = tl.sum(tl.where(mine, ends - tl.cdiv(count, BLOCK) * BLOCK, 0))
    return expert, first - begins, tl.sum(tl.where(mine, count, 0)), tl.max(ends)


@triton.jit
def _pack(
    x, counts, packed, routes, owners, total, pitch, most,
    experts: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    expert, row, count, end = _block(counts, first, experts, PADDED, BLOCK)
    tl.device_assert(end <= most, "more rows than the caller's bound")
    if first == 0:
        tl.store(total, tl.minimum(end, most))
    if first < end:
        rows = row + tl.arange(0, BLOCK)
        tl.store(owners + tl.program_id(0), expert)
        tl.store(routes + first + tl.arange(0, BLOCK), tl.where(rows < count, first + tl.arange(0, BLOCK), most))
        source = x + (expert * pitch + rows[:, None]).to(tl.int64) * WIDTH
        target = packed + (first + tl.arange(0, BLOCK)[:, None]).to(tl.int64) * WIDTH
        for start in range(0, WIDTH, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)[None, :]
            live = (rows[:, None] < count) & (columns < WIDTH)
            tl.store(target + columns, tl.load(source + columns, live), live)


@triton.jit
def _unpack(
    packed, counts, out, pitch,
    experts: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    expert, row, count, end = _block(counts, first, experts, PADDED, BLOCK)
    if first < end:
        rows = row + tl.arange(0, BLOCK)
        source = packed + (first + tl.arange(0, BLOCK)[:, None]).to(tl.int64) * WIDTH
        target = out + (expert * pitch + rows[:, None]).to(tl.int64) * WIDTH
        for start in range(0, WIDTH, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)[None, :]
            live = (rows[:, None] < count) & (columns < WIDTH)
            tl.store(target + columns, tl.load(source + columns, live), live)


@triton.jit
def _situ(
    gate_up, out, routes, owners, total, rows,
    WIDTH: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) >= tl.load(total):
        return
    if tl.load(owners + tl.program_id(0) // BLOCK) < 0:  # of no expert here
        return
    row = tl.load(routes + tl.program_id(0)).to(tl.int64)
    if row >= rows:
        return
    for start in range(0, WIDTH, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        live = columns < WIDTH
        gate = tl.load(gate_up + row * 2 * WIDTH + columns, live).to(tl.float32)
        up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, live).to(tl.float32)
        bent = (2 * tl.sigmoid(2 / BETA * gate) - 1) * BETA * tl.sigmoid(gate)  # 2 sigmoid(2 x) - 1 is tanh x
        value = bent * (2 * tl.sigmoid(2 / LINEAR_BETA * up) - 1) * LINEAR_BETA
        tl.store(out + row * WIDTH + columns, value.to(out.dtype.element_ty), live)


@triton.jit
def _combine(y, ids, weights, out, WIDTH: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for route in range(K):
        if tl.load(ids + row * K + route) >= 0:
            value = tl.load(y + (row * K + route) * WIDTH + columns, columns < WIDTH).to(tl.float32)
            sums += tl.load(weights + row * K + route) * value
    tl.store(out + row * WIDTH + columns, sums.to(out.dtype.element_ty), columns < WIDTH)


def pack(x: Tensor, counts: Tensor, most: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [experts, rows, width], counts [experts] int32, at most `most` rows with the filling of blocks -> packed
    [most, width], and the schedule: routes, owners, total."""
    experts, pitch, width = x.shape
    packed = torch.empty(most, width, dtype=x.dtype, device=x.device)
    routes = torch.empty(most, dtype=torch.int32, device=x.device)
    owners = torch.empty(most // block, dtype=torch.int32, device=x.device)
    total = torch.empty(1, dtype=torch.int32, device=x.device)
    padded = triton.next_power_of_2(experts)
    _pack[(most // block,)](x, counts, packed, routes, owners, total, pitch, most, experts, width, padded, block, COLUMNS)
    return packed, routes, owners, total


def unpack(packed: Tensor, counts: Tensor, out: Tensor, block: int) -> None:
    """The rows that `pack` took, back to where they came from in out [experts, rows, width]."""
    experts, pitch, width = out.shape
    padded = triton.next_power_of_2(experts)
    _unpack[(packed.shape[0] // block,)](packed, counts, out, pitch, experts, width, padded, block, COLUMNS)


def situ(gate_up: Tensor, schedule: Sequence[Tensor], block: int, beta: float, linear_beta: float) -> Tensor:
    """gate_up [rows, 2 n] -> [rows, n]: the scheduled rows, the others undefined."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    routes, owners, total = schedule
    _situ[(routes.shape[0],)](gate_up, out, routes, owners, total, rows, width, beta, linear_beta, block, 1024)
    return out


def combine(y: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """y [rows * k, width], ids and weights [rows, k] -> [rows, width], each row's live routes weighted and summed."""
    rows, k = ids.shape
    out = torch.empty(rows, y.shape[1], dtype=y.dtype, device=y.device)
    _combine[(rows, triton.cdiv(y.shape[1], 1024))](y, ids, weights, out, y.shape[1], k, 1024)
    return out
