"""Absorbed MLA over the paged cache, for any number of rows a sequence: what serves where FlashMLA does not.

A program has up to 64 (row, head) pairs of one sequence and a part of its keys (on an H200 64 keys at a time are 1.4 times as
fast as 32); where pairs are too few to fill the device
the keys are split, and a second kernel adds the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops import BLOCK_ROWS, Plans
from kernels.triton_ops.ragged import find_tile, most_tiles, power_of_two

PAIRS, KEYS = 64, 64  # of a program: (row, head) pairs at most, and keys at a time
PROGRAMS = 264  # twice the multiprocessors of an H200
MOST_PARTS = 32
LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q,
    cache,
    tables,
    contexts,
    bounds,
    out,
    log_sums,
    sequences,
    scale,
    q_stride,
    head_stride,
    block_stride,
    table_stride,
    part_stride,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # Pairs of a sequence are numbered row by row; `bounds` counts pairs.
    sequence, _start, stop, first = find_tile(tl.program_id(0), bounds, sequences, PAIRS, BATCH)
    if sequence >= sequences:
        return
    part = tl.program_id(1)
    pair = first + tl.arange(0, PAIRS)
    real = pair < stop
    context = tl.load(contexts + sequence)
    row = pair // HEADS
    last = stop // HEADS - 1
    visible = tl.where(real, context, 0)  # keys that a pair's row sees
    if CAUSAL:
        visible = tl.where(real, tl.maximum(context - (last - row), 0), 0)
    at = q + row.to(tl.int64) * q_stride + (pair % HEADS) * head_stride
    latent, shared = tl.arange(0, LATENT), tl.arange(0, SHARED)
    q_latent = tl.load(at[:, None] + latent[None, :], mask=real[:, None], other=0.0)
    q_shared = tl.load(at[:, None] + LATENT + shared[None, :], mask=real[:, None], other=0.0)

    steps = tl.cdiv(tl.max(visible, 0), KEYS)
    mine = tl.cdiv(steps, PARTS)
    most = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    mix = tl.zeros([PAIRS, LATENT], tl.float32)
    for step in range(part * mine, tl.minimum((part + 1) * mine, steps)):
        key = step * KEYS
        block = tl.load(tables + sequence.to(tl.int64) * table_stride + key // BLOCK_ROWS).to(tl.int64)
        keys = tl.arange(0, KEYS)
        rows = cache + block * block_stride + (key % BLOCK_ROWS + keys) * (LATENT + SHARED)
        there = key + keys < context
        k_latent = tl.load(rows[:, None] + latent[None, :], mask=there[:, None], other=0.0)
        k_shared = tl.load(rows[:, None] + LATENT + shared[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q_shared, tl.trans(k_shared))
        scores = tl.dot(q_latent, tl.trans(k_latent), scores) * scale
        scores = tl.where(key + keys[None, :] < visible[:, None], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        mix = tl.dot(weights.to(k_latent.dtype), k_latent, mix * shrink[:, None])
        most = higher
    mix = mix / tl.where(total > 0, total, 1.0)[:, None]
    place = part * part_stride + pair.to(tl.int64)
    tl.store(out + place[:, None] * LATENT + latent[None, :], mix, mask=real[:, None])
    if PARTS > 1:
        tl.store(log_sums + place, tl.where(total > 0, most + tl.log2(total), float("-inf")), mask=real)


@triton.jit
def _add_parts(parts, log_sums, out, pairs, PARTS: tl.constexpr, LATENT: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    number, latent = tl.arange(0, PARTS), tl.arange(0, LATENT)
    log_sum = tl.load(log_sums + number * pairs + pair)
    most = tl.max(log_sum, 0)
    weight = tl.exp2(log_sum - tl.where(most == float("-inf"), 0.0, most))
    weight = weight / tl.maximum(tl.sum(weight, 0), 1e-30)
    values = tl.load(parts + (number[:, None] * pairs + pair) * LATENT + latent[None, :])
    tl.store(out + pair * LATENT + latent, tl.sum(values * weight[:, None], 0))


def mla_attention(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    plans: Plans | None = None,
) -> Tensor:
    return _run(q, cache, block_tables, context_lens, cu_seqlens, scale, latent, causal=True)


def mla_block(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    plans: Plans | None = None,
) -> Tensor:
    return _run(q, cache, block_tables, context_lens, cu_seqlens, scale, latent, causal=False)


def _run(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    latent: int,
    causal: bool,
) -> Tensor:
    assert cache[0].is_contiguous() and q.stride(2) == 1, "a block's rows, and a row's columns, lie one after the other"
    rows, heads, width = q.shape
    sequences, pairs = len(context_lens), rows * heads
    out = torch.empty(rows, heads, latent, dtype=q.dtype, device=q.device)
    if not pairs:
        return out
    of_tile = min(PAIRS, max(16, power_of_two(pairs // sequences)))
    tiles = most_tiles(pairs, sequences, of_tile)
    parts = min(MOST_PARTS, power_of_two(PROGRAMS // tiles))
    into, log_sums = out, out
    if parts > 1:
        into = torch.empty(parts, pairs, latent, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(parts, pairs, dtype=torch.float32, device=q.device)
    _attend[(tiles, parts)](
        q,
        cache,
        block_tables,
        context_lens,
        cu_seqlens * heads,
        into,
        log_sums,
        sequences,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        block_tables.stride(0),
        pairs,
        causal,
        parts,
        heads,
        latent,
        width - latent,
        of_tile,
        KEYS,
        power_of_two(sequences),
        BLOCK_ROWS,
        num_warps=8 if of_tile == PAIRS else 4,
        num_stages=2,
    )
    if parts > 1:
        _add_parts[(pairs,)](into, log_sums, out, pairs, parts, latent, num_warps=4)
    return out
