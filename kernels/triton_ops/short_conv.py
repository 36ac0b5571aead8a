"""KDA's short convolution with carried history (spec k3-model §5): a program has some rows of one sequence, some channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.ragged import as_rows, find_tile, most_tiles, power_of_two

CHANNELS, WARPS = 128, 2
MOST_ROWS = 16  # of a program


@triton.jit
def _three(places, step, mask):
    """float32, as what is loaded may be history or rows, of one dtype each."""
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + step, mask=mask, other=0.0).to(tl.float32)
    return first, second, tl.load(places + 2 * step, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _four(places, step, mask):
    first, second, third = _three(places, step, mask)
    return first, second, third, tl.load(places + 3 * step, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _move_history(history, x0, x1, x2, rows, start, stop, stride, real):
    """The last three of the old history x0, x1, x2 and the rows start to stop."""
    count = stop - start
    last = rows + tl.cast(stop, tl.int64) * stride
    new0 = tl.load(last - 3 * stride, mask=real & (count > 2), other=0.0).to(tl.float32)
    new1 = tl.load(last - 2 * stride, mask=real & (count > 1), other=0.0).to(tl.float32)
    new2 = tl.load(last - stride, mask=real & (count > 0), other=0.0).to(tl.float32)
    tl.debug_barrier()  # every thread has read
    tl.store(history, tl.where(count > 2, new0, tl.where(count > 1, x2, tl.where(count > 0, x1, x0))), mask=real)
    tl.store(history + 1, tl.where(count > 1, new1, tl.where(count > 0, x2, x1)), mask=real)
    tl.store(history + 2, tl.where(count > 0, new2, x2), mask=real)


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
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BATCH: tl.constexpr,
):
    sequence, start, stop, first = find_tile(tl.program_id(0), bounds, sequences, ROWS, BATCH)
    if sequence >= sequences:
        return
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
    history = state + slot * slot_stride + channel * 3
    w0, w1, w2, w3 = _four(weight + channel * 4, 1, real)
    rows = x + tl.cast(first, tl.int64) * stride + channel
    if first == start:  # the only tile that reads the history, so it is the one that may write it
        x0, x1, x2 = _three(history, 1, real & remembered)
    else:
        x0, x1, x2 = _three(rows - 3 * stride, stride, real)
    if UPDATE:
        if first == start:
            _move_history(history, x0, x1, x2, x + channel, start, stop, stride, real)
    for row in tl.static_range(ROWS):  # each row is read once
        x3 = tl.load(rows + row * stride, mask=real & (first + row < stop), other=0.0)
        total = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3.to(tl.float32)
        place = out + (tl.cast(first, tl.int64) + row) * channels + channel
        tl.store(place, total * tl.sigmoid(total), mask=real & (first + row < stop))
        x0, x1, x2 = x1, x2, x3.to(tl.float32)


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
            rows,
            CHANNELS,
            power_of_two(sequences),
            num_warps=WARPS,
        )
    return out
