"""The rows of a verify round: what a scan would give, from a state that is read once and left alone (see kda_rows)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.kda_rows import ROWS, log_decay, triangle, unit
from kernels.triton_ops.kda_scan import packed_heads

VALUES = 64  # columns of a program


@triton.jit
def _verify(
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
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    keys, rows = tl.arange(0, DIM), tl.arange(0, ROWS)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    slot = tl.load(slots + sequence)
    place = state + slot * slot_stride + head * DIM * DIM + keys[:, None] * DIM + values[None, :]
    remembered = (slot != 0) & (keys >= 0)[:, None] & (values >= 0)[None, :]
    s = tl.load(place, mask=remembered, other=0.0)  # the first to be asked for and the last to be used

    first = tl.load(bounds + sequence)
    real = rows < tl.load(bounds + sequence + 1) - first
    at = (first + rows).to(tl.int64)
    wide, narrow = real[:, None] & (keys >= 0)[None, :], real[:, None] & (values >= 0)[None, :]
    of_keys, of_values = head * DIM + keys[None, :], head * DIM + values[None, :]
    qn = unit(tl.load(q + at[:, None] * q_stride + of_keys, mask=wide, other=0.0).to(tl.float32), 1) * DIM**-0.5
    kn = unit(tl.load(k + at[:, None] * k_stride + of_keys, mask=wide, other=0.0).to(tl.float32), 1)
    value = tl.load(v + at[:, None] * v_stride + of_values, mask=narrow, other=0.0).to(tl.float32)
    raw = tl.load(decay + at[:, None] * decay_stride + of_keys, mask=wide, other=0.0).to(tl.float32)
    rate = tl.sigmoid(tl.load(beta + at * beta_stride + head, mask=real, other=0.0).to(tl.float32))
    shift = tl.load(dt_bias + head * DIM + keys)[None, :]
    log = tl.cumsum(tl.where(wide, log_decay(raw, tl.load(a_log + head), shift, lower_bound), 0.0), 0)

    grown = tl.exp(log)
    kg, qg, ki = kn * grown, qn * grown, kn * tl.exp(-log)
    inverse = triangle(kg, ki, rate, WIDTH, ROWS, PRECISION)
    seen = tl.where(rows[:, None] >= rows[None, :], tl.dot(qg, tl.trans(ki), input_precision=PRECISION), 0.0)
    error = tl.dot(inverse, rate[:, None] * (value - tl.dot(kg, s, input_precision=PRECISION)), input_precision=PRECISION)
    o = tl.dot(qg, s, input_precision=PRECISION) + tl.dot(seen, error, input_precision=PRECISION)
    tl.store(out + at[:, None] * (HEADS * DIM) + of_values, o, mask=narrow)


def kda_verify(
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
) -> Tensor:
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    q, k, v, decay = (packed_heads(x) for x in (q, k, v, decay))
    beta = beta if beta.stride(1) == 1 else beta.contiguous()
    if len(slots):
        values = min(VALUES, dim)
        _verify[(len(slots), heads, dim // values)](
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
            cu_seqlens,
            out,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            decay.stride(0),
            beta.stride(0),
            state.stride(0),
            heads,
            dim,
            values,
            window_rows(rows, len(slots)),
            ROWS,
            precision(q.dtype),
            num_warps=4,
        )
    return out


def window_rows(rows: int, sequences: int) -> int:
    """Of each sequence of a verify round."""
    width = rows // sequences
    if width * sequences != rows or width > ROWS:
        raise ValueError(f"{rows} rows of {sequences} sequences: a verify round has equally many rows of each, at most {ROWS}")
    return width


def precision(dtype: torch.dtype) -> str:
    """Of products whose operands are float32: tf32's error is below bfloat16's rounding; three of them give float32's."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
