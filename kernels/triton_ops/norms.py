"""RMSNorm, and the mix over depth (spec k3-model §2): a program has a whole row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.ragged import as_rows, power_of_two

STAGES, MIX_WARPS = 3, 4  # candidates of a mix that are on their way at once; the best of those tried on an H200


@triton.jit
def _rms_norm(x, weight, out, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value = value * factor * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * WIDTH + columns, value, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, out = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, width = rows.shape
    if count:
        _rms_norm[(count,)](rows, weight, out, rows.stride(0), eps, width, power_of_two(width), num_warps=_warps(width))
    return out


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _attn_res_mix(
    blocks,
    prefix,
    weight,
    out,
    block_stride,
    row_stride,
    prefix_stride,
    eps,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    query = tl.load(weight + columns, mask=inside, other=0.0)
    mix = tl.zeros([BLOCK], tl.float32)
    most, total = float("-inf"), 0.0
    # Softmax over the candidates as they come: each is read once, while those before it are weighed.
    for number in tl.range(COUNT + 1, num_stages=STAGES):
        block = blocks + tl.cast(number, tl.int64) * block_stride + row * row_stride
        candidate = tl.where(number < COUNT, block, prefix + row * prefix_stride)
        value = tl.load(candidate + columns, mask=inside, other=0.0).to(tl.float32)
        dot, square = tl.reduce((value * query, value * value), 0, _add_both)
        score = dot * tl.rsqrt(square / WIDTH + eps)
        higher = tl.maximum(most, score)
        old, new = tl.exp(most - higher), tl.exp(score - higher)
        mix = mix * old + new * value
        total = total * old + new
        most = higher
    tl.store(out + row * WIDTH + columns, mix / total, mask=inside)


def attn_res_mix(blocks: Tensor, prefix: Tensor, weight: Tensor, eps: float) -> Tensor:
    count, width = prefix.shape
    out = torch.empty(prefix.shape, dtype=prefix.dtype, device=prefix.device)
    assert blocks.stride(2) == prefix.stride(1) == 1, "rows are dense"
    if count:
        _attn_res_mix[(count,)](
            blocks,
            prefix,
            weight,
            out,
            blocks.stride(0),
            blocks.stride(1),
            prefix.stride(0),
            eps,
            blocks.shape[0],
            width,
            power_of_two(width),
            STAGES,
            num_warps=MIX_WARPS,
        )
    return out


def _warps(width: int) -> int:
    return min(8, max(1, power_of_two(width) // 1024))
