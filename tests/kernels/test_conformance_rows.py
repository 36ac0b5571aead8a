"""Ops that work row by row: norms, the mix over depth, the activation, the router."""

import torch

from kernels.registry import Candidate
from tests.lib import definitions
from tests.lib.conformance import DEVICE, DTYPES, Data, assert_close, each, each_backend, geometry, implementation

EPS = 1e-5
ROWS = {"empty": 0, "one row": 1, "many": 37}
WIDTHS = {"narrow": 48, "full width": 7168}
STRIDED = {"dense": False, "strided": True}


@each_backend("rms_norm")
@each(dtype=DTYPES, rows=ROWS, width=WIDTHS, strided=STRIDED)
def test_rms_norm(backend: Candidate, dtype: torch.dtype, rows: int, width: int, strided: bool):
    op, data = implementation(backend, geometry(dtype, hidden=width)), Data(1, strided)
    x, weight = data.normal(rows, width, dtype=dtype, scale=3), data.normal(width)
    out = op(x, weight, EPS)
    assert out.dtype == dtype
    assert_close(out, definitions.rms(x, weight, EPS), dtype)


@each_backend("rms_norm")
def test_rms_norm_of_zeros_is_zero(backend: Candidate):
    op = implementation(backend, geometry())
    assert torch.equal(op(torch.zeros(2, 8, device=DEVICE), torch.ones(8, device=DEVICE), EPS).cpu(), torch.zeros(2, 8))


@each_backend("attn_res_mix")
@each(dtype=DTYPES, rows=ROWS, width=WIDTHS, blocks=(0, 1, 8), strided=STRIDED)
def test_attn_res_mix(backend: Candidate, dtype: torch.dtype, rows: int, width: int, blocks: int, strided: bool):
    op, data = implementation(backend, geometry(dtype, hidden=width)), Data(2, strided)
    closed = data.normal(blocks, rows, width, dtype=dtype)
    prefix, weight = data.normal(rows, width, dtype=dtype, scale=2), data.normal(width, scale=width**-0.5)
    out = op(closed, prefix, weight, EPS)
    assert out.dtype == dtype
    assert_close(out, definitions.mix(closed, prefix, weight, EPS), dtype)
    if blocks == 0:
        assert torch.equal(out, prefix)  # a single candidate is the identity


@each_backend("situ_mul")
@each(dtype=DTYPES, rows=ROWS, width={"narrow": 64, "full width": 3072}, strided=STRIDED)
def test_situ_mul(backend: Candidate, dtype: torch.dtype, rows: int, width: int, strided: bool):
    op, data = implementation(backend, geometry(dtype, moe_inner=width)), Data(3, strided)
    gate_up = data.normal(rows, 2 * width, dtype=dtype, scale=8)  # far into both saturations
    out = op(gate_up, 4.0, 25.0)
    assert out.dtype == dtype
    assert_close(out, definitions.situ(gate_up[:, :width], gate_up[:, width:], 4.0, 25.0), dtype)


@each_backend("kda_output")
@each(dtype=DTYPES, rows=ROWS, dim={"narrow": 32, "full width": 128}, strided=STRIDED)
def test_kda_output(backend: Candidate, dtype: torch.dtype, rows: int, dim: int, strided: bool):
    op, data = implementation(backend, geometry(dtype, kda_head_dim=dim)), Data(4, strided)
    o, gate, weight = data.normal(rows, 12, dim, dtype=dtype), data.normal(rows, 12, dim, dtype=dtype), data.normal(dim)
    out = op(o, gate, weight, EPS)
    assert out.dtype == dtype
    assert_close(out, definitions.gated_norm(o, gate, weight, EPS), dtype)


@each_backend("router")
@each(
    dtype=DTYPES,
    rows=ROWS,
    shape={"narrow": (48, 16, 4), "full width": (7168, 896, 16)},
    renormalize=(True, False),
    strided=STRIDED,
)
def test_router(backend: Candidate, dtype: torch.dtype, rows: int, shape: tuple, renormalize: bool, strided: bool):
    width, experts, top_k = shape
    op, data = implementation(backend, geometry(dtype, hidden=width, num_experts=experts, top_k=top_k)), Data(5, strided)
    x, weight = data.normal(rows, width, dtype=dtype), data.normal(experts, width, dtype=dtype, scale=width**-0.5)
    bias = data.normal(experts, scale=0.1)
    ids, weights = op(x, weight, bias, top_k, renormalize, 2.5)
    wanted_ids, wanted_weights = definitions.route(x, weight, bias, top_k, renormalize, 2.5)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert torch.equal(ids, wanted_ids)
    assert_close(weights, wanted_weights, torch.float32)


@each_backend("router")
def test_router_takes_the_smallest_id_among_equals(backend: Candidate):
    op = implementation(backend, geometry(hidden=8, num_experts=12, top_k=4))
    weight = torch.zeros(12, 8, device=DEVICE)
    bias = torch.tensor([0, 1, 0, 1, 0, 1, 0, 0, 0, 2, 0, 0], dtype=torch.float32, device=DEVICE)
    ids, weights = op(torch.ones(1, 8, device=DEVICE), weight, bias, 4, True, 1.0)
    assert ids.tolist() == [[9, 1, 3, 5]]
    assert weights.tolist() == [[0.25] * 4]  # the bias selects and does not weigh
    ids, _ = op(torch.ones(1, 8, device=DEVICE), weight, torch.zeros_like(bias), 4, True, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]]


@each_backend("router")
def test_router_takes_the_smallest_ids_among_896_equals(backend: Candidate):
    op = implementation(backend, geometry())
    x, weight = torch.ones(40, 7168, device=DEVICE), torch.zeros(896, 7168, device=DEVICE)
    ids, _ = op(x, weight, torch.zeros(896, device=DEVICE), 16, True, 1.0)
    assert torch.equal(ids.cpu(), torch.arange(16).expand(40, 16))


@each_backend("router")
def test_router_computes_logits_of_bfloat16_rows_in_float32(backend: Candidate):
    op = implementation(backend, geometry(torch.bfloat16, hidden=2, num_experts=2, top_k=1))
    # 1 + 2**-9 against 1: equal once rounded to bfloat16, different in float32.
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-9]], dtype=torch.bfloat16, device=DEVICE)
    ids, _ = op(torch.ones(1, 2, dtype=torch.bfloat16, device=DEVICE), weight, torch.zeros(2, device=DEVICE), 1, True, 1.0)
    assert ids.tolist() == [[1]]
