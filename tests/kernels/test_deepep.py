"""How DeepEP's buffer is called, against the direct dense sum, with the buffer's contract emulated on a CPU: a row that is read
before its hook, a weight that is applied twice, or a half that is lost shows as a wrong number."""

from collections.abc import Iterator

import pytest
import torch

from k3mesh.errors import ConfigError, Internal
from services.worker.parallel.deepep import DeepEpExperts, Layout, layouts
from services.worker.parallel.groups import Groups
from tests.kernels.test_experts import CAPACITY, EXPERTS, MODES, TOPK, Case, MarkingExperts, fixed_case, random_case
from tests.lib.deepep import EmulatedBuffer
from tests.lib.ranks import Ranks, decode_engine

LATENT = 8
BUILDS = {"native": ((8, 16), TOPK), "split-pad": ((16,), TOPK // 2)}  # widths, most routes


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(decode_engine(dp=request.param, tp=1))
    yield started
    started.close()


def dispatcher_of(groups: Groups, build: str) -> tuple[DeepEpExperts, EmulatedBuffer]:
    widths, routes = BUILDS[build]
    buffer = EmulatedBuffer(groups.ep, EXPERTS, widths, routes)
    made = DeepEpExperts(
        groups.ep, buffer, latent=LATENT, routes=TOPK, num_experts=EXPERTS, capacity=CAPACITY, low_latency=True,
        device=torch.device("cpu"), widths=(16,),
    )  # fmt: skip
    return made, buffer


def run(groups: Groups, build: str, mode: str, case: Case) -> tuple[torch.Tensor, int]:
    dispatcher, buffer = dispatcher_of(groups, build)
    probed, rank = buffer.low_latency_calls, groups.ep.rank
    experts = MarkingExperts(rank * dispatcher.num_local, dispatcher.num_local)
    overlapped: list[int] = []
    rows = case.z[rank].bfloat16()
    out = dispatcher.forward(mode, rows, case.ids[rank], case.weights[rank], experts, lambda: overlapped.append(1))  # type: ignore
    assert overlapped == [1]
    return out, buffer.low_latency_calls - probed


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("mode", MODES)
def test_rows_come_back_as_the_dense_sum_whatever_the_build_carries(ranks: Ranks, build: str, mode: str):
    world = len(ranks.run(_rank))
    sizes = [(1, 9, 0, 32)[(rank + world) % 4] for rank in range(world)]
    for case in (random_case(sizes, seed=3), fixed_case([4] * world, [EXPERTS - 1, 0, -1, 5])):
        for rank, (out, calls) in enumerate(ranks.run(run, build, mode, case)):
            wanted = case.expected(rank)
            assert torch.allclose(out.float(), wanted, rtol=2e-2, atol=1e-6)
            assert calls == (0 if mode == "extend" else 2 if build == "native" else 4), "an even number for a layer"


def test_a_build_that_carries_the_rows_in_no_way_is_refused(ranks: Ranks):
    for message in ranks.run(_refusal):
        assert "no rows of 8 with 4 routes in low latency" in message and "Unsupported hidden" in message


def test_more_rows_than_the_capacity_are_refused_before_anything_is_sent(ranks: Ranks):
    for message in ranks.run(_too_many):
        assert "33 rows for a low-latency capacity of 32" in message


def test_the_first_layout_is_the_models_own_and_the_second_needs_a_wider_row_and_even_routes():
    assert layouts(3584, 16, (2048, 4096, 7168)) == [Layout(3584, 1), Layout(4096, 2)]
    assert layouts(3584, 15, (4096,)) == layouts(3584, 16, (2048,)) == [Layout(3584, 1)]


def _rank(groups: Groups) -> int:
    return groups.ep.rank


def _refusal(groups: Groups) -> str:
    buffer = EmulatedBuffer(groups.ep, EXPERTS, widths=(), most_routes=TOPK)
    try:
        DeepEpExperts(
            groups.ep, buffer, latent=LATENT, routes=TOPK, num_experts=EXPERTS, capacity=CAPACITY, low_latency=True,
            device=torch.device("cpu"), widths=(16,),
        )  # fmt: skip
    except ConfigError as error:
        return error.message
    return ""


def _too_many(groups: Groups) -> str:
    dispatcher, _ = dispatcher_of(groups, "native")
    case = random_case([33] * groups.ep.size, seed=1)
    experts = MarkingExperts(0, dispatcher.num_local)
    try:
        dispatcher.forward("decode", case.z[0].bfloat16(), case.ids[0], case.weights[0], experts)
    except Internal as error:
        return error.message
    return ""
