"""A verify round's rows of KDA, and the states moved on by those that are accepted (window.cu)."""

from ctypes import Structure, c_float, c_int, c_int64
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.nvrtc import Module, compiled

DIM, MOST_ROWS = 128, 8  # as in window.cu


class _Shape(Structure):
    """As in window.cu."""

    _fields_ = (
        *((name, c_int64) for name in ("slot_stride", "conv_stride")),
        *((f"{name}_stride", c_int) for name in ("q", "k", "v", "decay", "beta")),
        ("heads", c_int),
        ("lower_bound", c_float),
    )


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
    rows, heads, _ = q.shape
    out = torch.empty(rows, heads, DIM, dtype=q.dtype, device=q.device)
    if rows:
        _check(rows, slots, state)
        q, k, v, decay, beta = (*(_packed(x) for x in (q, k, v, decay)), _dense(beta))
        _kernels(q.device).launch(
            "verify",
            len(slots) * heads,
            DIM,
            0,
            q,
            k,
            v,
            decay,
            beta,
            a_log,
            dt_bias.contiguous(),
            state,
            slots,
            cu_seqlens,
            out,
            _Shape(state.stride(0), 0, *(x.stride(0) for x in (q, k, v, decay, beta)), heads, lower_bound),
        )
    return out


def kda_commit(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_state: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    state: Tensor,
    slots: Tensor,
    cu_seqlens: Tensor,
    accepted: Tensor,
) -> None:
    if not len(qkv):
        return
    _check(len(qkv), slots, state)
    assert conv_state[0].is_contiguous(), "a channel's history lies side by side"
    heads, qkv, decay, beta = decay.shape[1], _dense(qkv), _packed(decay), _dense(beta)
    _kernels(qkv.device).launch(
        "commit",
        len(slots) * heads,
        DIM,
        0,
        qkv,
        conv_weight.contiguous(),
        conv_state,
        decay,
        beta,
        a_log,
        dt_bias.contiguous(),
        state,
        slots,
        cu_seqlens,
        accepted,
        _Shape(state.stride(0), conv_state.stride(0), *(x.stride(0) for x in (qkv, qkv, qkv, decay, beta)), heads, lower_bound),
    )


@cache
def _kernels(device: torch.device) -> Module:
    return compiled(Path(__file__).with_suffix(".cu").read_text(), device)


def _check(rows: int, slots: Tensor, state: Tensor) -> None:
    assert state[0].is_contiguous() and slots.is_contiguous(), "a slot's state is dense"
    if rows > MOST_ROWS * len(slots):
        raise ValueError(f"{rows} rows of {len(slots)} sequences: a verify round has at most {MOST_ROWS} of each")


def _packed(x: Tensor) -> Tensor:
    """[T, H, D] whose rows may stand apart by multiples of 16 bytes, and whose heads lie side by side."""
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned and x.stride(2) == 1 and x.stride(1) == DIM else x.contiguous()


def _dense(x: Tensor) -> Tensor:
    """[T, n] whose rows may stand apart."""
    return x if x.stride(1) == 1 else x.contiguous()
