"""The routed experts in `k3mesh bench kernels`: a decode rank's rounds (28 of 896 experts), a prefill rank's chunks (112).

Routes are drawn at random as a balanced router spreads them. The floor counts packed weights and scales of every expert once
(they alone exceed any L2 cache), rows in and out once, and both products' operations; SiTU is within the time and not in it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.ops import Experts
from services.launch.bench.kernel_cases import BF16, CHUNK, K3_RANK, SLICE, Call, Case, Inputs

OP = "prepare_experts"
ALL, TOP_K, LATENT, INNER = K3_RANK.num_experts, K3_RANK.top_k, K3_RANK.moe_latent, K3_RANK.moe_inner
D_EXPERTS, P_EXPERTS = K3_RANK.local_experts, ALL // 8
D_RANKS = ALL // D_EXPERTS
ROUND_ROUTES = SLICE * TOP_K  # rows that a rank of a full round receives, as many as it sends
WEIGHTS = 3 * LATENT * INNER  # of an expert


def expert_cases() -> Iterator[Case]:
    for received, bar, calls in ((ROUND_ROUTES // 8, None, 0), (ROUND_ROUTES, 1.5, 1), (4 * ROUND_ROUTES, None, 0)):
        what = f"{received} rows received by {D_EXPERTS} experts"
        yield Case(OP, what, *_cost(D_EXPERTS, received), _grouped(received), bar, kda=calls, mla=calls)
    for rows, bar in ((CHUNK // 16, None), (CHUNK, 1.9)):
        routes = rows * TOP_K * P_EXPERTS // ALL
        what = f"{rows:,} rows, {routes:,} routes to {P_EXPERTS} experts"
        geometry = replace(K3_RANK, local_experts=P_EXPERTS)
        yield Case(OP, what, *_cost(P_EXPERTS, routes), _routed(rows), bar, geometry=geometry)


def _cost(experts: int, rows: int) -> tuple[int, int]:
    """Bytes and operations."""
    return experts * WEIGHTS * 17 // 32 + 4 * rows * LATENT, 2 * rows * WEIGHTS


def _prepared(op: Callable[..., Any], data: Inputs, experts: int) -> Experts:
    def integers(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=data.device)

    return op(
        integers(experts, 2 * INNER, LATENT // 2),
        integers(experts, 2 * INNER, LATENT // 32, low=119, high=124),
        integers(experts, LATENT, INNER // 2),
        integers(experts, LATENT, INNER // 32, low=119, high=124),
        4.0,
        25.0,
        BF16,
    )


def _grouped(rows: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        experts = _prepared(op, data, D_EXPERTS)
        places = D_RANKS * SLICE  # of each expert in the buffer of arrivals
        chosen = torch.randint(D_EXPERTS, (rows,), generator=torch.Generator().manual_seed(1))
        counts = torch.bincount(chosen, minlength=D_EXPERTS).int().to(device)
        x = data.normal(D_EXPERTS, places, LATENT)
        return [lambda: experts.grouped(x, counts, places * TOP_K)]

    return prepare


def _routed(rows: int):
    def prepare(op: Callable[..., Any], device: torch.device) -> list[Call]:
        data = Inputs(device)
        experts = _prepared(op, data, P_EXPERTS)
        ids = data.normal(rows, ALL, dtype=torch.float32).topk(TOP_K).indices
        ids = torch.where(ids < P_EXPERTS, ids, -1)
        weights = torch.where(ids < 0, 0.0, 1 / TOP_K)
        x = data.normal(rows, LATENT)
        return [lambda: experts.routed(x, ids, weights)]

    return prepare
