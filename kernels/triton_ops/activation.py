"""SiTU, K3's only activation (spec k3-model §3)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.ragged import as_rows

COLUMNS = 512


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def situ(gate, up, beta, linear_beta):
    """float32 -> float32, elementwise."""
    return beta * _tanh(gate / beta) * tl.sigmoid(gate) * (linear_beta * _tanh(up / linear_beta))


@triton.jit
def _situ_mul(gate_up, out, stride, inner, beta, linear_beta, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < inner
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + inner + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + columns, situ(gate, up, beta, linear_beta), mask=inside)


def situ_mul(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    rows, inner = as_rows(gate_up), gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], inner), dtype=gate_up.dtype, device=gate_up.device)
    if len(rows):
        grid = (len(rows), triton.cdiv(inner, COLUMNS))
        _situ_mul[grid](rows, out, rows.stride(0), inner, beta, linear_beta, COLUMNS, num_warps=2)
    return out
