"""FlashMLA's view of our cache: pages of 64 rows in blocks of 128, and prompt chunks as many small queries."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import BLOCK_ROWS
from kernels.triton_ops.ragged import find_tile, most_tiles, power_of_two

PAGE_ROWS = 64
COLUMNS = 1024  # of a row, for a program


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
    tables,
    contexts,
    bounds,
    pages,
    seen,
    places,
    sources,
    sequences,
    step,
    columns,
    table_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Rows first .. first + ROWS of a sequence become query `group`. Padding goes before them, as the last row of a query is
    the one that sees all its keys."""
    group = tl.program_id(0).to(tl.int64)
    sequence, _start, stop, first = find_tile(tl.program_id(0), bounds, sequences, ROWS, BATCH)
    known = sequence < sequences
    count = tl.where(known, tl.minimum(stop - first, ROWS), 0)
    context = tl.load(contexts + sequence, mask=known, other=0)
    tl.store(seen + group, tl.where(count > 0, context - (stop - first - count), 0))
    rows = tl.arange(0, ROWS)
    source = first + rows - (ROWS - count)
    real = rows >= ROWS - count
    tl.store(places + source, group * ROWS + rows, mask=real)
    tl.store(sources + group * ROWS + rows, tl.where(real, source, -1))
    for at in range(0, columns, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        inside = column < columns
        block = tl.load(tables + sequence.to(tl.int64) * table_stride + column // 2, mask=inside & known, other=0)
        tl.store(pages + group * columns + column, block * step + column % 2, mask=inside)


@triton.jit
def _spread(q, sources, queries, stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(sources + row).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = tl.load(q + source * stride + column, mask=(column < WIDTH) & (source >= 0), other=0.0)
    tl.store(queries + row * WIDTH + column, value, mask=column < WIDTH)


@dataclass(frozen=True, slots=True)
class Cut:
    """T rows of sequences of any lengths as G queries of equally many rows."""

    rows: int  # of a query
    tables: Tensor  # [G, 2 M] pages
    seen: Tensor  # [G] int32, keys that a query's last row sees; 0: it is of padding alone
    places: Tensor  # [T] int64, where each row went, in G * rows
    sources: Tensor  # [G * rows] int32, what each row of a query is, -1 for padding

    def spread(self, q: Tensor) -> Tensor:
        """q [T, H, W] -> [G, rows, H, W], zero for padding."""
        _, heads, width = q.shape
        queries = torch.empty(len(self.seen), self.rows, heads, width, dtype=q.dtype, device=q.device)
        q = q.flatten(1)
        grid = (len(self.sources), triton.cdiv(heads * width, COLUMNS))
        _spread[grid](q, self.sources, queries, q.stride(0), heads * width, COLUMNS)
        return queries


def cut(count: int, block_tables: Tensor, context_lens: Tensor, cu_seqlens: Tensor, step: int, rows: int) -> Cut:
    """`count` rows by their sequences' bounds, `step` pages from one block to the next."""
    sequences, columns, device = len(context_lens), 2 * block_tables.shape[1], block_tables.device
    groups = most_tiles(count, sequences, rows)
    it = Cut(
        rows,
        tables=torch.empty(groups, columns, dtype=torch.int32, device=device),
        seen=torch.empty(groups, dtype=torch.int32, device=device),
        places=torch.empty(count, dtype=torch.int64, device=device),
        sources=torch.empty(groups * rows, dtype=torch.int32, device=device),
    )
    _cut[(groups,)](
        block_tables,
        context_lens,
        cu_seqlens,
        it.tables,
        it.seen,
        it.places,
        it.sources,
        sequences,
        step,
        columns,
        block_tables.stride(0),
        rows,
        256,
        power_of_two(sequences),
    )
    return it
