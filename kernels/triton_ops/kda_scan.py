"""The KDA recurrence row after row: decode rounds of one row, rows that a verify round
has accepted, and prompts where no library scans them. A program has some
value columns of one head, which no other column's state enters."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.kda_rows import log_decay, unit

VALUES = 32  # columns of a program


@triton.jit
def _scan(
    q,
    k,
    v,
    decay,
    beta,
    a_log,
    dt_bias,
    lower_bound,
    state,
    slots,
    fresh,
    accepted,
    bounds,
    out,
    q_stride,
    k_stride,
    v_stride,
    decay_stride,
    beta_stride,
    slot_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,
    COMMIT: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    keys = tl.arange(0, DIM)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    slot = tl.load(slots + sequence)
    place = state + slot * slot_stride + head * DIM * DIM + keys[:, None] * DIM + values[None, :]
    first, stop = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    if COMMIT:
        if slot == 0:
            return
        remembered = slot != 0
        stop = tl.minimum(stop, first + tl.load(accepted + sequence).to(tl.int32))
    else:
        remembered = (slot != 0) & (tl.load(fresh + sequence) == 0)
    s = tl.load(place, mask=remembered & (keys >= 0)[:, None] & (values >= 0)[None, :], other=0.0)
    rate = tl.load(a_log + head)
    shift = tl.load(dt_bias + head * DIM + keys)
    for row in range(first, stop):
        at = tl.cast(row, tl.int64)
        kn = unit(tl.load(k + at * k_stride + head * DIM + keys).to(tl.float32), 0)
        value = tl.load(v + at * v_stride + head * DIM + values).to(tl.float32)
        raw = tl.load(decay + at * decay_stride + head * DIM + keys).to(tl.float32)
        s = s * tl.exp(log_decay(raw, rate, shift, lower_bound))[:, None]
        error = tl.sigmoid(tl.load(beta + at * beta_stride + head).to(tl.float32)) * (value - tl.sum(s * kn[:, None], 0))
        s = s + kn[:, None] * error[None, :]
        if not COMMIT:
            qn = unit(tl.load(q + at * q_stride + head * DIM + keys).to(tl.float32), 0) * DIM**-0.5
            tl.store(out + (at * HEADS + head) * DIM + values, tl.sum(s * qn[:, None], 0))
    tl.store(place, s)


def kda_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    slots: Tensor,
    fresh: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run(q, k, v, decay, beta, a_log, dt_bias, lower_bound, state, slots, cu_seqlens, out=out, fresh=fresh)
    return out


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    *,
    out: Tensor | None = None,
    fresh: Tensor | None = None,
    accepted: Tensor | None = None,
) -> None:
    """With `accepted` [B] the states move on by so many rows of each sequence, those of the null slot stay, and no row is
    computed."""
    assert state[0].is_contiguous(), "a slot's state is dense"
    _, heads, dim = q.shape
    q, k, v, decay = (packed_heads(x) for x in (q, k, v, decay))
    beta = beta if beta.stride(1) == 1 else beta.contiguous()
    if len(slots):
        values = min(VALUES, dim)
        _scan[(len(slots), heads, dim // values)](
            q,
            k,
            v,
            decay,
            beta,
            a_log,
            dt_bias.contiguous(),
            lower_bound,
            state,
            slots,
            slots if fresh is None else fresh,
            slots if accepted is None else accepted,
            cu_seqlens,
            q if out is None else out,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            decay.stride(0),
            beta.stride(0),
            state.stride(0),
            heads,
            dim,
            values,
            accepted is not None,
            num_warps=4,
        )


def packed_heads(x: Tensor) -> Tensor:
    """[T, H, D] whose rows may stand apart, but whose heads lie side by side."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
