"""Expert selection (spec k3-model §8): the library's matrix product with float32 results, then the choice in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.ragged import power_of_two


@triton.jit
def _choose(
    logits,
    bias,
    ids,
    weights,
    scaling,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUTES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    inside = experts < EXPERTS
    score = tl.sigmoid(tl.load(logits + row * EXPERTS + experts, mask=inside, other=0.0))
    bits = (score + tl.load(bias + experts, mask=inside, other=0.0)).to(tl.int32, bitcast=True)
    # A float's bits as an integer of the same order, and below them the id, counted down: no two keys are equal, and among
    # equal scores the smallest id is the largest key.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where(inside, (order << 16) | (0xFFFF - experts), -0x7FFFFFFFFFFFFFFF)
    routes = tl.arange(0, ROUTES)
    chosen = tl.zeros([ROUTES], tl.int64)
    for route in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        chosen = tl.where(routes == route, 0xFFFF - (best & 0xFFFF), chosen)
        keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)
    real = routes < TOP_K
    weight = tl.sigmoid(tl.load(logits + row * EXPERTS + chosen, mask=real, other=0.0))  # the bias selects only
    if RENORMALIZE:
        weight = weight / (tl.sum(tl.where(real, weight, 0.0), 0) + 1e-20)
    tl.store(ids + row * TOP_K + routes, chosen, mask=real)
    tl.store(weights + row * TOP_K + routes, weight * scaling, mask=real)


def router(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, renormalize: bool, scaling: float) -> tuple[Tensor, Tensor]:
    count, experts = x.shape[0], weight.shape[0]
    ids = torch.empty(count, top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(count, top_k, dtype=torch.float32, device=x.device)
    if count:
        block, routes = power_of_two(experts), power_of_two(top_k)
        logits = _logits(x, weight)
        _choose[(count,)](logits, bias, ids, weights, scaling, renormalize, experts, top_k, block, routes, num_warps=1)
    return ids, weights


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Products of bfloat16 are exact in the float32 that they are summed in."""
    if x.dtype == torch.float32:
        return x @ weight.T
    return torch.mm(x, weight.T, out_dtype=torch.float32)
