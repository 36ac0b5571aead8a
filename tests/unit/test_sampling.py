"""The sampling rule: greedy ties, order of filters, laws, and what a token may depend on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3mesh.errors import Internal
from services.worker.speculative.sampling import Sampling, coin, distribution, sample

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
LAW = (0.4, 0.2, 0.15, 0.1, 0.08, 0.07)


def logits_of(law: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([[math.log(p) for p in law]], dtype=torch.float32)


def rule(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 1) -> Sampling:
    return Sampling(temperature, top_p, top_k, seed)


def chi_square(counts: list[int], law: list[float]) -> float:
    total = sum(counts)
    return sum((n - total * p) ** 2 / (total * p) for n, p in zip(counts, law, strict=True) if p > 0)


def test_greedy_takes_the_smallest_id_of_equal_logits():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, [GREEDY, GREEDY], [7, 8]) == [1, 0]


def test_top_p_is_applied_to_what_top_k_left():
    # On the raw law {0, 1, 2} hold 0.75 < 0.8, so filtering jointly would keep all three.
    law = distribution(logits_of(LAW), [rule(top_k=3, top_p=0.8)])
    assert law[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0, 0, 0], abs=1e-6)


def test_top_k_breaks_ties_by_the_smaller_id():
    law = distribution(torch.tensor([[1.0, 2.0, 1.0, 1.0]]), [rule(top_k=2)])
    assert [p > 0 for p in law[0].tolist()] == [True, True, False, False]


def test_a_tiny_top_p_leaves_the_most_likely_token():
    assert distribution(logits_of(LAW), [rule(top_p=1e-9)])[0].tolist() == [1, 0, 0, 0, 0, 0]


def test_a_tiny_temperature_is_almost_greedy_and_stays_finite():
    logits = torch.tensor([[3.0e38, -3.0e38, 0.0]])
    assert distribution(logits, [rule(temperature=1e-30)])[0].tolist() == [1, 0, 0]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 5, 0.9), (1.3, 0, 0.8)])
def test_tokens_follow_the_law(temperature: float, top_k: int, top_p: float):
    draws = 20_000
    wanted = rule(temperature, top_p, top_k)
    tokens = sample(
        logits_of(LAW).expand(draws, -1), [rule(temperature, top_p, top_k, seed) for seed in range(draws)], [11] * draws
    )
    law = distribution(logits_of(LAW), [wanted])[0].tolist()
    counts = [tokens.count(token) for token in range(len(LAW))]
    assert all(n == 0 for n, p in zip(counts, law, strict=True) if p == 0)
    assert chi_square(counts, law) < 25.7  # 5 degrees of freedom: exceeded once in 10,000 seeds


def test_coins_are_uniform_over_positions_and_over_neighbouring_seeds():
    for coins in ([coin(5, n) for n in range(16_000)], [coin(seed, 5) for seed in range(16_000)]):
        counts = [sum(int(u * 16) == cell for u in coins) for cell in range(16)]
        assert chi_square(counts, [1 / 16] * 16) < 44.3  # 15 degrees of freedom, 1 in 10,000


def test_coins_are_the_same_on_every_machine():
    assert [coin(seed, position) for seed, position in ((0, 0), (1, 0), (2**64 - 1, 1_000_000))] == [
        0.8833108082136426,  # splitmix64's first output for seed 0
        0.7497482413580301,
        0.21614837616462668,
    ]


@given(seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), data=st.data())
def test_a_token_depends_on_its_own_row_alone(seeds: list[int], data: st.DataObject):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn((len(seeds), 40), generator=generator) * 3
    rules = [
        Sampling(
            temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            top_p=data.draw(st.sampled_from([0.3, 0.9, 1.0])),
            top_k=data.draw(st.sampled_from([0, 1, 7, 40, 1000])),
            seed=seed,
        )
        for seed in seeds
    ]
    positions = [data.draw(st.integers(0, 1 << 20)) for _ in seeds]
    together = sample(logits, rules, positions)
    alone = [sample(logits[r : r + 1], [rules[r]], [positions[r]])[0] for r in range(len(seeds))]
    assert together == alone


@given(
    weights=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
    temperature=st.floats(0.01, 10),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_token_outside_the_filters_is_never_drawn(weights, temperature, top_k, top_p, seed):
    logits, wanted = torch.tensor([weights]), Sampling(temperature, top_p, top_k, seed)
    law = distribution(logits, [wanted])[0]
    assert law.sum().item() == pytest.approx(1)
    assert law[sample(logits, [wanted], [seed % 1000])[0]] > 0
    assert int((law > 0).sum()) <= (top_k or len(weights))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float):
    with pytest.raises(Internal, match="not finite"):
        sample(torch.tensor([[0.0, bad, 1.0]]), [GREEDY], [0])
