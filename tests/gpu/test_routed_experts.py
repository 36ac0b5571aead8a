"""Every backend of the routed experts on a GPU, at the widths of Kimi K3's ranks, against the dequantised float32 reference.

The tolerance is the conformance tests' for bfloat16, 8e-3 of the result's norm: rows, the activation between the products and
the result are rounded to bfloat16 once each (2e-3 or so), and sums are float32 in another order.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels.ops import Experts
from kernels.reference import experts as reference
from kernels.registry import CANDIDATES, Candidate
from tests.lib.conformance import TOLERANCE, Data, each, geometry, implementation

pytestmark = pytest.mark.gpu(1)
BF16 = torch.bfloat16
LATENT, INNER, TOP_K = 3584, 3072, 16
D_EXPERTS, P_EXPERTS, ALL_EXPERTS = 28, 112, 896
BACKENDS = [candidate for candidate in CANDIDATES["prepare_experts"] if candidate.backend != "reference"]
each_fast = pytest.mark.parametrize("backend", BACKENDS, ids=lambda candidate: candidate.backend)


@cache
def packed(experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(31)

    def integers(*shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    return (
        integers(experts, 2 * INNER, LATENT // 2),
        integers(experts, 2 * INNER, LATENT // 32, low=119, high=123),
        integers(experts, LATENT, INNER // 2),
        integers(experts, LATENT, INNER // 32, low=119, high=123),
    )


@cache
def fast(backend: Candidate, experts: int) -> Experts:
    prepare = implementation(backend, geometry(BF16, local_experts=experts))
    return prepare(*packed(experts), 4.0, 25.0, BF16)


@cache
def wanted(experts: int) -> Experts:
    return reference.prepare_experts(*packed(experts), 4.0, 25.0, BF16)


@pytest.fixture(autouse=True, scope="module")
def give_memory_back():
    yield
    for it in (packed, fast, wanted):
        it.cache_clear()
    torch.cuda.empty_cache()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.isfinite().all()
    error, norm = (actual.double() - expected.double()).norm(), expected.double().norm()
    assert error <= TOLERANCE[BF16] * norm, f"error {error:.2e} of {norm:.2e}"


def received(counts: list[int], rows: int, seed: int = 40) -> tuple[Tensor, Tensor]:
    """What low latency dispatch leaves: [experts, rows, latent], NaN beyond the counts."""
    x = torch.full((len(counts), rows, LATENT), float("nan"), dtype=BF16, device="cuda")
    for expert, count in enumerate(counts):
        x[expert, :count] = Data(seed + expert).normal(count, LATENT, dtype=BF16)
    return x, torch.tensor(counts, dtype=torch.int32, device="cuda")


def rows_of(x: Tensor, counts: Tensor) -> Tensor:
    return torch.cat([x[expert, :count] for expert, count in enumerate(counts.tolist())])


def spread(total: int, seed: int = 1) -> list[int]:
    picks = torch.randint(D_EXPERTS, (total,), generator=torch.Generator().manual_seed(seed))
    return torch.bincount(picks, minlength=D_EXPERTS).tolist()


COUNTS = {
    "none": [0] * D_EXPERTS,
    "one row": [0] * 27 + [1],
    "around a block": [0, 1, 7, 8, 9, 23, 24, 25, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200] + [0] * 9 + [64],
    "one expert": [0, 0, 0, 700] + [0] * 24,
    "a decode round": spread(512),
    "four times that": spread(2048),
}


@each_fast
@each(counts=COUNTS)
def test_received_rows_get_their_expert_whatever_stands_beyond_the_counts(backend: Candidate, counts: list[int]):
    x, on_device = received(counts, 1024)
    before = x.clone()
    for most in (None, sum(counts)):
        out = fast(backend, D_EXPERTS).grouped(x, on_device, most)
        assert out.shape == x.shape
        assert_close(rows_of(out, on_device), rows_of(wanted(D_EXPERTS).grouped(x, on_device), on_device))
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))


def routes(rows: int, experts: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Each row's 16 of K3's 896 experts, of which the first `experts` are here."""
    generator = torch.Generator("cuda").manual_seed(seed)
    ids = torch.rand(rows, ALL_EXPERTS, device="cuda", generator=generator).topk(TOP_K).indices
    weights = torch.rand(rows, TOP_K, device="cuda", generator=generator)
    return torch.where(ids < experts, ids, -1), torch.where(ids < experts, weights, 0.0)


def one_expert(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((rows, TOP_K), -1, device="cuda")
    ids[:, 5] = 3
    return ids, torch.where(ids >= 0, 0.5, 0.0)


def all_here(rows: int) -> tuple[Tensor, Tensor]:
    ids, weights = routes(rows, ALL_EXPERTS)
    return torch.arange(TOP_K, device="cuda").expand(rows, TOP_K) + ids[:, :1] % (D_EXPERTS - TOP_K), weights


ROUTES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "no row": lambda: routes(0, D_EXPERTS),
    "one row": lambda: one_expert(1),
    "no live route": lambda: routes(9, 0),
    "one expert": lambda: one_expert(700),
    "every route here": lambda: all_here(77),
    "some routes here": lambda: routes(1000, D_EXPERTS),
}


@each_fast
@each(routing=ROUTES)
def test_routed_rows_get_the_weighted_sum_of_their_experts(backend: Candidate, routing: Callable[[], tuple[Tensor, Tensor]]):
    ids, weights = routing()
    x = Data(32).normal(ids.shape[0], LATENT, dtype=BF16)
    out = fast(backend, D_EXPERTS).routed(x, ids, weights)
    assert_close(out, wanted(D_EXPERTS).routed(x, ids, weights))
    assert not out[(ids < 0).all(1)].any()


@each_fast
def test_a_prompt_chunk_on_the_experts_of_a_prefill_rank(backend: Candidate):
    ids, weights = routes(8192, P_EXPERTS)
    x = Data(33).normal(8192, LATENT, dtype=BF16)
    assert_close(fast(backend, P_EXPERTS).routed(x, ids, weights), wanted(P_EXPERTS).routed(x, ids, weights))


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@each_fast
def test_a_captured_round_follows_counts_that_change_between_replays(backend: Candidate):
    experts = fast(backend, D_EXPERTS)
    x, counts = received(COUNTS["a decode round"], 1024)
    graph, out = captured(lambda: experts.grouped(x, counts, 4096))
    for number, now in enumerate((*COUNTS.values(), spread(300, seed=5))):
        new_x, new_counts = received(now, 1024, seed=100 + number)
        x.copy_(new_x)
        counts.copy_(new_counts)
        graph.replay()
        assert_close(rows_of(out, counts), rows_of(wanted(D_EXPERTS).grouped(new_x, new_counts), counts))


@each_fast
def test_a_captured_chunk_follows_routes_that_change_between_replays(backend: Candidate):
    experts = fast(backend, D_EXPERTS)
    x, (ids, weights) = Data(34).normal(700, LATENT, dtype=BF16), routes(700, D_EXPERTS)
    graph, out = captured(lambda: experts.routed(x, ids, weights))
    for new_ids, new_weights in (routes(700, D_EXPERTS, seed=8), one_expert(700), routes(700, 0), all_here(700)):
        ids.copy_(new_ids)
        weights.copy_(new_weights)
        graph.replay()
        assert_close(out, wanted(D_EXPERTS).routed(x, new_ids, new_weights))


@each_fast
def test_scales_far_from_one_keep_their_value(backend: Candidate):
    """Up to 2^13, and 2^-40 beside them."""
    w13, w13_scale, w2, w2_scale = (it[:2] for it in packed(D_EXPERTS))
    w2_scale = w2_scale.clone()
    w2_scale[0] = 87
    w2_scale[1, ::2] = 140
    weights = (w13, w13_scale, w2, w2_scale, 4.0, 25.0, BF16)
    x, counts = received([5, 6], 8)
    prepare = implementation(backend, geometry(BF16, local_experts=2))
    out, expected = prepare(*weights).grouped(x, counts), reference.prepare_experts(*weights).grouped(x, counts)
    for expert, count in enumerate(counts.tolist()):
        assert_close(out[expert, :count], expected[expert, :count])
