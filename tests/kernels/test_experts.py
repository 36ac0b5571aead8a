"""The expert dispatcher against a direct dense sum, over real processes. Source rank and row stand in the data, so a wrong
route is an exact mismatch (spec moe-ep §10)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch

from k3mesh.errors import ConfigError, Internal
from services.worker.model.batch import Mode
from services.worker.parallel.experts import GlooExperts
from services.worker.parallel.groups import Groups, join
from tests.lib.ranks import Ranks, decode_engine

EXPERTS, TOPK, CAPACITY = 16, 4, 32
MODES: tuple[Mode, ...] = ("extend", "decode")


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    started = Ranks(decode_engine(dp=request.param, tp=1))
    yield started
    started.close()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    started = Ranks(decode_engine(dp=4, tp=1))
    yield started
    started.close()


@dataclass
class MarkingExperts:
    """Expert e maps x to (e + 1) * x, exact for the small integers of these tests. Keeps what it was given."""

    first: int
    num_local: int
    seen: list[torch.Tensor] = field(default_factory=list)

    def routed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.seen = [x, ids, weights]
        assert bool((weights[ids < 0] == 0).all())
        scale = torch.where(ids < 0, 0.0, weights * (ids + self.first + 1))
        total = torch.zeros(x.shape, dtype=torch.float32)
        for j in range(ids.shape[1]):
            total += scale[:, j, None] * x.float()
        return total.to(x.dtype)

    def grouped(self, x: torch.Tensor, counts: torch.Tensor, most: int | None = None) -> torch.Tensor:
        assert most is not None and counts.sum() <= most
        self.seen = [x, counts]
        return (x.float() * torch.arange(self.first + 1, self.first + self.num_local + 1)[:, None, None]).to(x.dtype)


@dataclass(frozen=True)
class Case:
    """Rows of every rank: z holds [rank, row, 1, random...]."""

    z: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    def expected(self, rank: int) -> torch.Tensor:
        """The direct dense sum, k ascending, in float32."""
        z, ids, weights = self.z[rank].float(), self.ids[rank], self.weights[rank]
        total = torch.zeros_like(z)
        for j in range(ids.shape[1]):
            total += torch.where(ids[:, j, None] < 0, 0.0, weights[:, j, None] * ((ids[:, j, None] + 1) * z))
        return total.to(self.z[rank].dtype)


def rows_of(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rows = torch.zeros(count, 8)
    rows[:, 0], rows[:, 1], rows[:, 2] = rank, torch.arange(count), 1
    return rows.to(dtype)


def random_case(sizes: list[int], seed: int, experts: int = EXPERTS, masked: float = 0.2) -> Case:
    """Distinct random experts, weights that are powers of two (so that sums are exact), some routes and rows masked."""
    generator = torch.Generator().manual_seed(seed)
    ids, weights = [], []
    for count in sizes:
        chosen = torch.rand(count, experts, generator=generator).argsort(dim=1)[:, :TOPK]
        gone = (torch.rand(count, TOPK, generator=generator) < masked) | (torch.rand(count, 1, generator=generator) < masked)
        power = 2.0 ** -torch.randint(0, 4, (count, TOPK), generator=generator).float()
        ids.append(torch.where(gone, -1, chosen).contiguous())
        weights.append(torch.where(gone, 0.0, power).contiguous())
    return Case([rows_of(rank, count) for rank, count in enumerate(sizes)], ids, weights)


def fixed_case(sizes: list[int], routes: list[int], weight: float = 0.5) -> Case:
    """Every row takes the same routes."""
    ids = [torch.tensor(routes).repeat(count, 1) for count in sizes]
    weights = [torch.where(chosen < 0, 0.0, weight) for chosen in ids]
    return Case([rows_of(rank, count) for rank, count in enumerate(sizes)], ids, weights)


def forward(groups: Groups, mode: Mode, case: Case, shuffle: int | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    dispatcher = GlooExperts(groups.ep, EXPERTS, CAPACITY, shuffle)
    experts = MarkingExperts(groups.ep.rank * dispatcher.num_local, dispatcher.num_local)
    rank = groups.ep.rank
    overlapped: list[int] = []
    result = dispatcher.forward(
        mode, case.z[rank], case.ids[rank], case.weights[rank], experts, overlap=lambda: overlapped.append(1)
    )
    assert overlapped == [1]
    return result, experts.seen


def world(ranks: Ranks) -> int:
    return len(ranks.run(groups_size))


def groups_size(groups: Groups) -> int:
    return groups.ep.size


@pytest.mark.parametrize("shuffle", [None, 7])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [[7, 7, 7, 7], [0, 1, 7, 32], [32, 0, 0, 1], [0, 0, 0, 0]])
def test_every_source_gets_the_exact_sum_of_its_routes(ranks: Ranks, mode: Mode, sizes: list[int], shuffle: int | None) -> None:
    case = random_case(sizes[: world(ranks)], seed=len(sizes) + sum(sizes))
    for rank, (result, _) in enumerate(ranks.run(forward, mode, case, shuffle)):
        assert torch.equal(result, case.expected(rank))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "routes", [[5, -1, -1, -1], [0, 1, 2, 3], [12, 13, 14, 15], [0, 4, 8, 12], [3, 4, 11, 15], [-1, -1, -1, -1]]
)
def test_all_rows_on_the_same_experts_overflow_nothing(ranks: Ranks, mode: Mode, routes: list[int]) -> None:
    case = fixed_case([CAPACITY] * world(ranks), routes)
    for rank, (result, _) in enumerate(ranks.run(forward, mode, case, None)):
        assert torch.equal(result, case.expected(rank))


def test_normal_mode_delivers_one_copy_a_rank_in_source_and_row_order(four_ranks: Ranks) -> None:
    case = random_case([5, 0, 9, 3], seed=1)
    for owner, (_, (x, ids, weights)) in enumerate(four_ranks.run(forward, "extend", case, None)):
        expected_x, expected_ids, expected_weights = [], [], []
        for rank, chosen in enumerate(case.ids):
            here = (chosen >= 4 * owner) & (chosen < 4 * owner + 4)
            for row in here.any(dim=1).nonzero().flatten().tolist():
                expected_x.append([rank, row])
                expected_ids.append(torch.where(here[row], chosen[row] - 4 * owner, -1).tolist())
                expected_weights.append(torch.where(here[row], case.weights[rank][row], 0.0).tolist())
        assert x[:, :2].tolist() == expected_x
        assert ids.tolist() == expected_ids
        assert weights.tolist() == expected_weights


@pytest.mark.parametrize("shuffle", [None, 3])
def test_low_latency_packs_each_experts_rows_source_by_source_before_the_poison(four_ranks: Ranks, shuffle: int | None) -> None:
    case = random_case([5, 0, 32, 3], seed=2)
    for owner, (_, (x, counts)) in enumerate(four_ranks.run(forward, "decode", case, shuffle)):
        assert x.shape == (4, int(counts.max()), 8)
        assert counts.dtype == torch.int32
        for local, count in enumerate(counts.tolist()):
            expected = [
                [rank, row]
                for rank, chosen in enumerate(case.ids)
                for row in (chosen == 4 * owner + local).any(dim=1).nonzero().flatten().tolist()
            ]
            held = x[local, :count, :2].long().tolist()
            assert sorted(held) == expected
            sources = [source for source, _ in held]
            assert sum(a != b for a, b in pairwise(sources)) == max(0, len(set(sources)) - 1)
            assert shuffle is not None or held == expected
            assert bool(x[local, count:].isnan().all())


def test_shuffle_changes_the_order_of_arrival_and_not_the_result(four_ranks: Ranks) -> None:
    case = random_case([32, 32, 32, 32], seed=3, masked=0.0)
    for plain, shuffled in zip(
        four_ranks.run(forward, "decode", case, None), four_ranks.run(forward, "decode", case, 11), strict=True
    ):
        assert torch.equal(plain[0], shuffled[0])
        assert not torch.equal(plain[1][0].nan_to_num(), shuffled[1][0].nan_to_num())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("idle", [[3], [0, 2], [1, 2, 3]])
def test_idle_ranks_leave_live_rows_unchanged_bit_for_bit(four_ranks: Ranks, mode: Mode, idle: list[int]) -> None:
    generator = torch.Generator().manual_seed(4)
    full = random_case([8, 8, 8, 8], seed=4, masked=0.0)
    z = [torch.randn(8, 64, generator=generator).bfloat16() for _ in range(4)]
    weights = [torch.rand(8, TOPK, generator=generator) for _ in range(4)]
    live = Case(z, full.ids, weights)
    ids = [torch.full_like(part, -1) if rank in idle else part for rank, part in enumerate(full.ids)]
    some = Case(
        [torch.full_like(part, torch.nan) if rank in idle else part for rank, part in enumerate(z)],
        ids,
        [torch.zeros_like(part) if rank in idle else part for rank, part in enumerate(weights)],
    )
    everyone, fewer = four_ranks.run(forward, mode, live, None), four_ranks.run(forward, mode, some, None)
    for rank in range(4):
        expected = torch.zeros_like(z[rank]) if rank in idle else everyone[rank][0]
        assert torch.equal(fewer[rank][0], expected)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_rows_stay_within_two_ulp_of_the_dense_sum(ranks: Ranks, mode: Mode) -> None:
    size, generator = world(ranks), torch.Generator().manual_seed(5)
    routes = random_case([16] * size, seed=5)
    case = Case(
        [torch.randn(16, 64, generator=generator).bfloat16() for _ in range(size)],
        routes.ids,
        [torch.where(ids < 0, 0.0, torch.rand(ids.shape, generator=generator)) for ids in routes.ids],
    )
    for rank, (result, _) in enumerate(ranks.run(forward, mode, case, 9)):
        expected = case.expected(rank).float()
        ulp = expected.pow(2).mean(dim=1, keepdim=True).sqrt() * 2.0**-7
        assert result.dtype == torch.bfloat16
        assert bool(((result.float() - expected).abs() <= 2 * ulp + 2.0**-7 * expected.abs()).all())


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_applied_once(ranks: Ranks, mode: Mode) -> None:
    case = fixed_case([4] * world(ranks), [0, 5, 10, 15], weight=0.5)
    for rank, (result, _) in enumerate(ranks.run(forward, mode, case, None)):
        assert torch.equal(result, case.z[rank] * (0.5 * (1 + 6 + 11 + 16)))


def forward_after_refusal(groups: Groups, case: Case) -> torch.Tensor:
    """Rank 1 first brings a row too many, then joins the call that the others are already in."""
    rank = groups.ep.rank
    dispatcher = GlooExperts(groups.ep, EXPERTS, CAPACITY)
    experts = MarkingExperts(rank * dispatcher.num_local, dispatcher.num_local)
    if rank == 1:
        with pytest.raises(Internal, match=r"33 rows exceed the low-latency capacity of 32"):
            dispatcher.forward(
                "decode", rows_of(1, 33), torch.zeros(33, TOPK, dtype=torch.int64), torch.ones(33, TOPK), experts
            )
    return dispatcher.forward("decode", case.z[rank], case.ids[rank], case.weights[rank], experts)


def test_a_row_over_capacity_is_refused_before_any_send_and_the_group_stays_usable(four_ranks: Ranks) -> None:
    case = random_case([32, 32, 7, 1], seed=6)
    for rank, result in enumerate(four_ranks.run(forward_after_refusal, case)):
        assert torch.equal(result, case.expected(rank))


def forward_out_of_step(groups: Groups, mode: Mode, case: Case) -> str:
    rank = groups.ep.rank
    dispatcher = GlooExperts(groups.ep, EXPERTS, CAPACITY)
    experts = MarkingExperts(rank * dispatcher.num_local, dispatcher.num_local)
    dispatcher.forward(mode, case.z[rank], case.ids[rank], case.weights[rank], experts)
    if rank == 2:
        dispatcher = GlooExperts(groups.ep, EXPERTS, CAPACITY)
    with pytest.raises(Internal) as caught:
        dispatcher.forward(mode, case.z[rank], case.ids[rank], case.weights[rank], experts)
    return caught.value.message


@pytest.mark.parametrize("mode", MODES)
def test_ranks_out_of_step_are_noticed_by_all(four_ranks: Ranks, mode: Mode) -> None:
    messages = four_ranks.run(forward_out_of_step, mode, random_case([4, 4, 4, 4], seed=7))
    for rank, message in enumerate(messages):
        assert message.startswith("expert dispatch: rank 0" if rank == 2 else "expert dispatch: rank 2")


@pytest.fixture
def alone() -> GlooExperts:
    groups = join(decode_engine(dp=1, tp=1), 0, "")
    return GlooExperts(groups.ep, EXPERTS, CAPACITY)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([[0, 1, 2, 16]])}, r"ids 0\.\.16 leave -1\.\.15"),
        ({"ids": torch.tensor([[0, 1, 2, -2]])}, r"ids -2\.\.2 leave"),
        ({"ids": torch.tensor([[0, 1, 2, -1]])}, r"carries a weight"),
        ({"ids": torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)}, r"ids torch\.int32"),
        ({"weights": torch.ones(1, 4, dtype=torch.float64)}, r"weights torch\.float64"),
        ({"weights": torch.ones(1, 3)}, r"disagree on rows or routes"),
        ({"z": rows_of(0, 2)}, r"disagree on rows or routes"),
        ({"z": rows_of(0, 1).half()}, r"z is torch\.float16"),
        ({"z": torch.zeros(1, 16)[:, ::2]}, r"must be contiguous"),
    ],
)
def test_arguments_that_break_the_contract_are_refused(
    alone: GlooExperts, mode: Mode, change: dict[str, torch.Tensor], message: str
) -> None:
    arguments = {"z": rows_of(0, 1), "ids": torch.tensor([[0, 1, 2, 3]]), "weights": torch.ones(1, 4)} | change
    with pytest.raises(Internal, match=message):
        alone.forward(mode, arguments["z"], arguments["ids"], arguments["weights"], MarkingExperts(0, EXPERTS))


def test_experts_that_do_not_divide_over_the_ranks_are_a_config_error(four_ranks: Ranks) -> None:
    assert all("must divide the model's 18 experts" in message for message in four_ranks.run(refused_config, 18, CAPACITY))


@pytest.mark.parametrize("capacity", [0, -4])
def test_a_capacity_that_deep_ep_cannot_hold_is_a_config_error(four_ranks: Ranks, capacity: int) -> None:
    messages = four_ranks.run(refused_config, EXPERTS, capacity)
    assert all(f"--low-latency-max-num-tokens-per-gpu {capacity}" in message for message in messages)


def refused_config(groups: Groups, experts: int, capacity: int) -> str:
    with pytest.raises(ConfigError) as caught:
        GlooExperts(groups.ep, experts, capacity)
    return caught.value.message
