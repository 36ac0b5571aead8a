"""The gated norm of each head's output (spec k3-model §6)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.kda_scan import packed_heads
from kernels.triton_ops.ragged import power_of_two


@triton.jit
def _gated_norm(o, gate, weight, out, o_stride, gate_stride, eps, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, BLOCK), tl.arange(0, DIM)
    inside = (heads < HEADS)[:, None] & (dims >= 0)[None, :]
    place = heads[:, None] * DIM + dims[None, :]
    value = tl.load(o + row * o_stride + place, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(gate + row * gate_stride + place, mask=inside, other=0.0).to(tl.float32))
    factor = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)
    value = value * factor[:, None] * tl.load(weight + dims)[None, :] * opened
    tl.store(out + row * (HEADS * DIM) + place, value, mask=inside)


def kda_output(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, heads, dim = o.shape
    o, gate = packed_heads(o), packed_heads(gate)
    out = torch.empty(rows, heads * dim, dtype=o.dtype, device=o.device)
    if rows:
        block = power_of_two(heads)
        _gated_norm[(rows,)](o, gate, weight, out, o.stride(0), gate.stride(0), eps, heads, dim, block, num_warps=4)
    return out
