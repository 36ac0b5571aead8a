"""FlashMLA's view of our cache: pages of 64 rows in blocks of 128, and prompt chunks as many small queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import BLOCK_ROWS
from kernels.triton_ops.ragged import find_tile, most_tiles, power_of_two

PAGE_ROWS = 64
COLUMNS = 1024  # pages that a program writes


def pages_of(cache: Tensor) -> tuple[Tensor, int]:
    """[blocks, 128, 1, W] -> the same memory as [pages, 64, 1, W], and pages from one block to the next."""
    blocks, width = cache.shape[0], cache.shape[3]
    page = PAGE_ROWS * width
    step = cache.stride(0) // page
    if cache.stride(0) % page or not cache[0].is_contiguous():
        raise ValueError(f"cache blocks {cache.stride(0)} elements apart are no whole pages of {PAGE_ROWS} x {width}")
    pages = (blocks - 1) * step + BLOCK_ROWS // PAGE_ROWS
    return cache.as_strided((pages, PAGE_ROWS, 1, width), (page, width, width, 1)), step


@triton.jit
def _page_tables(tables, pages, step, columns, stride, COLUMNS: tl.constexpr):
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.load(tables + sequence * stride + column // 2, mask=column < columns, other=0)
    tl.store(pages + sequence * columns + column, block * step + column % 2, mask=column < columns)


def page_tables(block_tables: Tensor, step: int) -> Tensor:
    """[B, M] blocks -> [B, 2 M] pages."""
    sequences, columns = block_tables.shape[0], 2 * block_tables.shape[1]
    pages = torch.empty(sequences, columns, dtype=torch.int32, device=block_tables.device)
    grid = (sequences, triton.cdiv(columns, COLUMNS))
    _page_tables[grid](block_tables, pages, step, columns, block_tables.stride(0), COLUMNS)
    return pages


@triton.jit
def _cut(
    q,
    tables,
    contexts,
    bounds,
    queries,
    pages,
    seen,
    places,
    sequences,
    step,
    columns,
    table_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Rows first .. first + ROWS of a sequence become query `group`; its last rows are padding, which see nobody's keys."""
    group = tl.program_id(0).to(tl.int64)
    sequence, _start, stop, first = find_tile(tl.program_id(0), bounds, sequences, ROWS, BATCH)
    count = tl.minimum(stop - first, ROWS)
    pad = ROWS - count  # before the rows: the last row of a query is the one that sees all its keys
    known = sequence < sequences
    context = tl.load(contexts + sequence, mask=known, other=0)
    tl.store(seen + group, tl.where(known & (count > 0), context - (stop - first - count), 0))
    for at in range(0, columns, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        inside = column < columns
        block = tl.load(tables + sequence.to(tl.int64) * table_stride + column // 2, mask=inside & known, other=0)
        tl.store(pages + group * columns + column, block * step + column % 2, mask=inside)
    for row in range(ROWS):
        real = known & (row >= pad)
        source = (first + row - pad).to(tl.int64)
        if real:
            tl.store(places + source, group * ROWS + row)
        for at in range(0, WIDTH, PIECE):
            column = at + tl.arange(0, PIECE)
            value = tl.load(q + source * WIDTH + column, mask=real & (column < WIDTH), other=0.0)
            tl.store(queries + (group * ROWS + row) * WIDTH + column, value, mask=column < WIDTH)


def cut(
    q: Tensor, block_tables: Tensor, context_lens: Tensor, cu_seqlens: Tensor, step: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequences of any lengths as queries of `rows` rows each.

    -> queries [G, rows, H, W], their page tables [G, 2 M], the keys that each query's last row sees [G] int32, and where each
    row of q went [T] int64, in G * rows. A query beyond the last is of padding alone and sees nothing.
    """
    count, heads, width = q.shape
    sequences, columns = len(context_lens), 2 * block_tables.shape[1]
    groups = most_tiles(count, sequences, rows)
    queries = torch.empty(groups, rows, heads, width, dtype=q.dtype, device=q.device)
    pages = torch.empty(groups, columns, dtype=torch.int32, device=q.device)
    seen = torch.empty(groups, dtype=torch.int32, device=q.device)
    places = torch.empty(count, dtype=torch.int64, device=q.device)
    _cut[(groups,)](
        q.contiguous(),
        block_tables,
        context_lens,
        cu_seqlens,
        queries,
        pages,
        seen,
        places,
        sequences,
        step,
        columns,
        block_tables.stride(0),
        rows,
        heads * width,
        power_of_two(min(heads * width, 2048)),
        256,
        power_of_two(sequences),
    )
    return queries, pages, seen, places
