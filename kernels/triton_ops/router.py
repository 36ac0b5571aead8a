"""Expert selection (spec k3-model §8): logits in float32, then the choice in one kernel.

A decode round's slice has few rows, and 896 columns are few tiles: there the product is split along the hidden size as well,
and the choice adds the parts. Where rows are many it is the library's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.ragged import power_of_two

FEW_ROWS, PARTS = 64, 8
COLUMNS, DEPTH = 32, 128  # of a program, and of one of its steps
LEAST = tl.constexpr(-0x80000000)


@triton.jit
def _parts_of_logits(
    x,
    weight,
    parts,
    rows,
    x_stride,
    weight_stride,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row, expert = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, steps = tl.program_id(1), tl.cdiv(tl.cdiv(HIDDEN, DEPTH), PARTS)
    real, known = (row < rows)[:, None], (expert < EXPERTS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(part * steps, (part + 1) * steps):
        depth = step * DEPTH + tl.arange(0, DEPTH)
        inside = depth < HIDDEN
        a = tl.load(x + row[:, None] * x_stride + depth[None, :], mask=real & inside[None, :], other=0.0)
        b = tl.load(weight + expert[None, :] * weight_stride + depth[:, None], mask=known & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
    tl.store(parts + (part * rows + row[:, None]) * EXPERTS + expert[None, :], total, mask=real & known)


@triton.jit
def _logits_of(parts, place, stride, mask, PARTS: tl.constexpr):
    total = tl.load(parts + place, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * stride + place, mask=mask, other=0.0)
    return total


@triton.jit
def _choose(
    logits,
    bias,
    ids,
    weights,
    scaling,
    part_stride,
    PARTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    inside = experts < EXPERTS
    score = tl.sigmoid(_logits_of(logits, row * EXPERTS + experts, part_stride, inside, PARTS))
    bits = (score + tl.load(bias + experts, mask=inside, other=0.0)).to(tl.int32, bitcast=True)
    # A float's bits as an integer of the same order: a warp finds the largest of those in one instruction.
    order = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), LEAST)
    routes = tl.arange(0, ROUTES)
    chosen = tl.zeros([ROUTES], tl.int32)
    for route in tl.static_range(TOP_K):
        first = tl.min(tl.where(order == tl.max(order, 0), experts, BLOCK), 0)  # the smallest id among equals
        chosen = tl.where(routes == route, first, chosen)
        order = tl.where(experts == first, LEAST, order)
    real = routes < TOP_K
    weight = tl.sigmoid(_logits_of(logits, row * EXPERTS + chosen, part_stride, real, PARTS))  # the bias selects only
    if RENORMALIZE:
        weight = weight / (tl.sum(tl.where(real, weight, 0.0), 0) + 1e-20)
    tl.store(ids + row * TOP_K + routes, chosen, mask=real)
    tl.store(weights + row * TOP_K + routes, weight * scaling, mask=real)


def router(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float) -> tuple[Tensor, Tensor]:
    count, experts = x.shape[0], weight.shape[0]
    ids = torch.empty(count, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(count, top_k, dtype=torch.float32, device=x.device)
    if count:
        block, routes, logits = power_of_two(experts), power_of_two(top_k), _logits(x, weight)
        sizes = (count * experts, len(logits), renormalize, experts, top_k, block, routes)
        _choose[(count,)](logits, bias, ids, weights, scaling, *sizes, num_warps=1)
    return ids, weights


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """[parts, rows, experts], to be added up. Products of bfloat16 are exact in the float32 that they are summed in."""
    count, (experts, hidden) = x.shape[0], weight.shape
    if x.dtype == torch.float32:
        return (x @ weight.T).unsqueeze(0)
    if count > FEW_ROWS:
        return torch.mm(x, weight.T, out_dtype=torch.float32).unsqueeze(0)
    parts = torch.empty(PARTS, count, experts, dtype=torch.float32, device=x.device)
    strides = (x.stride(0), weight.stride(0))
    rows = max(16, power_of_two(count))
    grid = (triton.cdiv(experts, COLUMNS), PARTS)
    _parts_of_logits[grid](
        x, weight, parts, count, *strides, experts, hidden, PARTS, rows, COLUMNS, DEPTH, num_warps=4, num_stages=3
    )
    return parts
