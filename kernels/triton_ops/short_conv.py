"""KDA's short convolution with carried history (spec k3-model §5): a program has some rows of one sequence, some channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.ragged import as_rows, find_tile, most_tiles, power_of_two

CHANNELS = 128
MOST_ROWS = 16  # of a program


@triton.jit
def _convolve(
    x,
    weight,
    state,
    slots,
    fresh,
    accepted,
    bounds,
    out,
    sequences,
    channels,
    stride,
    slot_stride,
    UPDATE: tl.constexpr,
    COMMIT: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BATCH: tl.constexpr,
):
    sequence, start, stop, first = find_tile(tl.program_id(0), bounds, sequences, ROWS, BATCH)
    if sequence >= sequences:
        return
    past: tl.constexpr = TAPS - 1
    slot = tl.load(slots + sequence)
    remembered = slot != 0
    if COMMIT:
        if slot == 0:
            return
        stop = tl.minimum(stop, start + tl.load(accepted + sequence).to(tl.int32))
    elif UPDATE:
        remembered = remembered & (tl.load(fresh + sequence) == 0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    rows = first + tl.arange(0, ROWS)
    history = state + slot * slot_stride + channel * past

    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        source = rows - past + tap
        taken = (source >= start) & (rows < stop)
        value = tl.load(
            x + source.to(tl.int64)[:, None] * stride + channel[None, :], mask=taken[:, None] & real[None, :], other=0.0
        ).to(tl.float32)
        back = source - start + past  # place in the history, of a row before the sequence's first
        old = (source < start) & (rows < stop) & remembered
        value += tl.load(history[None, :] + back[:, None], mask=old[:, None] & real[None, :], other=0.0).to(tl.float32)
        total += value * tl.load(weight + channel * TAPS + tap, mask=real, other=0.0)[None, :]
    total = total * tl.sigmoid(total)
    place = out + rows.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(place, total, mask=(rows < stop)[:, None] & real[None, :])

    if UPDATE:
        if first == start:  # the only program that reads the history: nobody is overtaken
            steps = tl.arange(0, 4)
            kept = real[:, None] & (steps < past)[None, :]
            last = stop - past + steps
            newer = (last >= start)[None, :]
            new_place = x + last.to(tl.int64)[None, :] * stride + channel[:, None]
            new = tl.load(new_place, mask=kept & newer, other=0.0)
            old_place = history[:, None] + (last - start + past)[None, :]
            older = tl.load(old_place, mask=kept & (last < start)[None, :] & remembered, other=0.0)
            tl.debug_barrier()  # every thread has read
            tl.store(history[:, None] + steps[None, :], tl.where(newer, new.to(older.dtype), older), mask=kept)


def short_conv(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, fresh: Tensor, cu_seqlens: Tensor) -> Tensor:
    return run(x, weight, state, slots, cu_seqlens, update=True, fresh=fresh)


def short_conv_verify(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor, cu_seqlens: Tensor) -> Tensor:
    return run(x, weight, state, slots, cu_seqlens, update=False)


def run(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    *,
    update: bool,
    fresh: Tensor | None = None,
    accepted: Tensor | None = None,
) -> Tensor:
    """With `accepted` [B] the histories move on by so many rows of each sequence, those of the null slot stay, and other rows
    come back undefined."""
    assert state[0].is_contiguous(), "a channel's history lies side by side"
    x, weight, sequences = as_rows(x), weight.contiguous(), len(slots)
    count, channels = x.shape
    out = torch.empty(count, channels, dtype=x.dtype, device=x.device)
    if sequences:
        rows = min(MOST_ROWS, power_of_two(count // sequences))
        grid = (most_tiles(count, sequences, rows), triton.cdiv(channels, CHANNELS))
        _convolve[grid](
            x,
            weight,
            state,
            slots,
            slots if fresh is None else fresh,
            slots if accepted is None else accepted,
            cu_seqlens,
            out,
            sequences,
            channels,
            x.stride(0),
            state.stride(0),
            update,
            accepted is not None,
            weight.shape[1],
            rows,
            CHANNELS,
            power_of_two(sequences),
            num_warps=4 if rows > 4 else 1,
        )
    return out
