"""Routed MXFP4 experts in both layouts. Source rows and experts are recognisable in the data, so a wrong route shows."""

from functools import cache

import torch
from torch import Tensor

from kernels.ops import Experts
from kernels.reference.mxfp4 import dequantize
from kernels.registry import Candidate
from tests.lib import definitions
from tests.lib.conformance import DEVICE, DTYPES, Data, assert_close, each, each_backend, geometry, implementation

BETA, LINEAR_BETA = 4.0, 25.0
SHAPES = {"narrow": (6, 64, 96), "full width": (2, 3584, 3072)}  # experts, latent, inner


@cache
def packed(experts: int, latent: int, inner: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = Data(31)
    return (
        data.bytes(experts, 2 * inner, latent // 2),
        data.bytes(experts, 2 * inner, latent // 32, low=119, high=123),
        data.bytes(experts, latent, inner // 2),
        data.bytes(experts, latent, inner // 32, low=119, high=123),
    )


@cache
def dense(experts: int, latent: int, inner: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """w1, w3, w2 of each expert."""
    w13, w13_scale, w2, w2_scale = packed(experts, latent, inner)
    first = [definitions.dequantize(w, s).split(inner) for w, s in zip(w13, w13_scale, strict=True)]
    return [(w1, w3, definitions.dequantize(w2[e], w2_scale[e])) for e, (w1, w3) in enumerate(first)]


@cache
def prepared(backend: Candidate, dtype: torch.dtype, shape: tuple[int, int, int]) -> Experts:
    experts, latent, inner = shape
    prepare = implementation(backend, geometry(dtype, local_experts=experts, moe_latent=latent, moe_inner=inner, top_k=2))
    return prepare(*packed(*shape), BETA, LINEAR_BETA, dtype)


def routed_definition(x: Tensor, ids: Tensor, weights: Tensor, shape: tuple[int, int, int]) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for row, routes in enumerate(ids.tolist()):
        for route, expert in enumerate(routes):
            if expert >= 0:
                y = definitions.expert(x[row : row + 1], *dense(*shape)[expert], BETA, LINEAR_BETA)
                out[row] += weights[row, route].double() * y[0]
    return out


@each_backend("prepare_experts")
@each(dtype=DTYPES, rows={"empty": 0, "one row": 1, "many": 9}, shape=SHAPES, strided={"dense": False, "strided": True})
def test_routed_rows_get_the_weighted_sum_of_their_experts(
    backend: Candidate, dtype: torch.dtype, rows: int, shape: tuple[int, int, int], strided: bool
):
    experts, latent, _ = shape
    data = Data(32, strided)
    x = data.normal(rows, latent, dtype=dtype)
    ids = torch.tensor([[(3 * n) % experts, (3 * n + 1) % experts] for n in range(rows)], device=DEVICE).reshape(rows, 2)
    ids = ids.long()
    ids[1::3, 0] = -1  # one route is another rank's
    ids[2::3] = -1  # a row that only passes by
    weights = torch.where(ids >= 0, Data(33).normal(rows, 2).abs() + 0.1, 0.0)
    out = prepared(backend, dtype, shape).routed(x, ids, weights)
    assert out.dtype == dtype
    assert_close(out, routed_definition(x, ids, weights, shape), dtype)
    assert (out[2::3] == 0).all()


@each_backend("prepare_experts")
@each(dtype=DTYPES, shape=SHAPES)
def test_grouped_rows_get_their_expert_unweighted_whatever_stands_beyond_the_counts(
    backend: Candidate, dtype: torch.dtype, shape: tuple[int, int, int]
):
    experts, latent, _ = shape
    counts = torch.tensor([3, 0, 5, 1, 8, 2][:experts], dtype=torch.int32, device=DEVICE)
    x = torch.full((experts, 8, latent), float("nan"), dtype=dtype, device=DEVICE)
    for expert, count in enumerate(counts.tolist()):
        x[expert, :count] = Data(40 + expert).normal(count, latent, dtype=dtype)
    rows = [x[expert, :count].clone() for expert, count in enumerate(counts.tolist())]
    out = prepared(backend, dtype, shape).grouped(x, counts)
    assert out.shape == x.shape and out.dtype == dtype
    for expert, count in enumerate(counts.tolist()):
        wanted = definitions.expert(rows[expert], *dense(*shape)[expert], BETA, LINEAR_BETA)
        assert_close(out[expert, :count], wanted, dtype)


@each_backend("prepare_experts")
def test_no_rows_at_all_in_either_layout(backend: Candidate):
    experts = prepared(backend, torch.float32, SHAPES["narrow"])
    x = torch.full((6, 4, 64), float("nan"), device=DEVICE)
    assert experts.grouped(x, torch.zeros(6, dtype=torch.int32, device=DEVICE)).shape == x.shape
    ids = torch.full((3, 2), -1, device=DEVICE)
    assert (experts.routed(torch.ones(3, 64, device=DEVICE), ids, torch.zeros(3, 2, device=DEVICE)) == 0).all()
    assert experts.num_local == 6


@each_backend("prepare_experts")
def test_all_routes_to_one_expert(backend: Candidate):
    shape = SHAPES["narrow"]
    x = Data(34).normal(20, 64)
    ids = torch.full((20, 2), -1, device=DEVICE)
    ids[:, 1] = 5
    weights = torch.where(ids >= 0, 0.5, 0.0)
    out = prepared(backend, torch.float32, shape).routed(x, ids, weights)
    assert_close(out, routed_definition(x, ids, weights, shape), torch.float32)


@each_backend("prepare_experts")
def test_the_rows_of_a_batch_do_not_depend_on_each_other(backend: Candidate):
    experts, x = prepared(backend, torch.float32, SHAPES["narrow"]), Data(35).normal(7, 64)
    ids = torch.tensor([[n % 6, (n + 2) % 6] for n in range(7)], device=DEVICE)
    weights = torch.full((7, 2), 0.5, device=DEVICE)
    together = experts.routed(x, ids, weights)
    for row in range(7):
        alone = experts.routed(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
        assert_close(alone, together[row : row + 1].double(), torch.float32)


def test_mxfp4_codes_nibbles_and_scales():
    """Low nibble = even column, sign in bit 3, one power of two for 32 columns."""
    row = torch.zeros(1, 32, dtype=torch.uint8)
    row[0, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    row[0, 16] = 0x27
    values = dequantize(row, torch.tensor([[128, 120]], dtype=torch.uint8), torch.float32)[0]
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values[:8].tolist() == [2 * m for m in magnitudes]
    assert values[8:16].tolist() == [-2 * m for m in magnitudes]
    assert values[32:34].tolist() == [6 * 2.0**-7, 2.0**-7]
    assert torch.equal(dequantize(row, torch.tensor([[128, 120]], dtype=torch.uint8), torch.bfloat16)[0].float(), values)
