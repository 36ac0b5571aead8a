"""KDA's recurrence over prompt chunks by FlashKDA.

Its states are [value, key] and one after the other; ours are [key, value] in slots (the layout that is handed over and kept by
prefix caches), so they are turned on the way in and out: 0.8 MB a sequence, layer and rank each way, beside 100 us and more
for the scan.
"""

import torch
import triton
import triton.language as tl
from flash_kda import fwd
from torch import Tensor

SIDE = 64  # of the squares that are turned


@triton.jit
def _take(state, slots, fresh, before, after, slot_stride, DIM: tl.constexpr, SIDE: tl.constexpr):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    squares: tl.constexpr = DIM // SIDE
    key = tl.program_id(2) // squares * SIDE + tl.arange(0, SIDE)
    value = tl.program_id(2) % squares * SIDE + tl.arange(0, SIDE)
    slot = tl.load(slots + sequence)
    there = state + slot * slot_stride + head * DIM * DIM + key[:, None] * DIM + value[None, :]
    remembered = (slot != 0) & (tl.load(fresh + sequence) == 0) & (key >= 0)[:, None] & (value >= 0)[None, :]
    turned = tl.trans(tl.load(there, mask=remembered, other=0.0))
    here = (sequence * tl.num_programs(1) + head) * DIM * DIM + value[:, None] * DIM + key[None, :]
    tl.store(before + here, turned)
    tl.store(after + here, turned)  # a sequence without rows keeps what it had


@triton.jit
def _put(after, slots, state, slot_stride, DIM: tl.constexpr, SIDE: tl.constexpr):
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    squares: tl.constexpr = DIM // SIDE
    key = tl.program_id(2) // squares * SIDE + tl.arange(0, SIDE)
    value = tl.program_id(2) % squares * SIDE + tl.arange(0, SIDE)
    here = (sequence * tl.num_programs(1) + head) * DIM * DIM + value[:, None] * DIM + key[None, :]
    there = state + tl.load(slots + sequence) * slot_stride + head * DIM * DIM + key[:, None] * DIM + value[None, :]
    tl.store(there, tl.trans(tl.load(after + here)))


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
    rows, heads, dim = q.shape
    out = torch.empty(1, rows, heads, dim, dtype=q.dtype, device=q.device)
    if rows:
        before = torch.empty(len(slots), heads, dim, dim, dtype=torch.float32, device=q.device)
        after = torch.empty_like(before)
        grid = (len(slots), heads, (dim // SIDE) ** 2)
        _take[grid](state, slots, fresh, before, after, state.stride(0), dim, SIDE)
        one_batch = [x.contiguous().unsqueeze(0) for x in (q, k, v, decay, beta)]
        bounds = cu_seqlens.long()
        fwd(*one_batch, dim**-0.5, out, a_log, dt_bias.contiguous(), lower_bound, before, after, bounds)
        _put[grid](after, slots, state, state.stride(0), dim, SIDE)
    return out.squeeze(0)
