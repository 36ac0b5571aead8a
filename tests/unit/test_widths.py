"""Widths of rounds against a simulated engine: never much slower than without speculation, and fast where it pays."""

from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.geometry import verify_widths
from services.contracts.ids import Replica, Token
from services.scheduler.decode.acceptance import Acceptance, Guesses, Verdict
from services.scheduler.decode.costs import GROWTH, RoundCosts
from services.scheduler.decode.widths import Width, Widths

TRUE, FALSE = Token(1), Token(0)


@dataclass
class Engine:
    """Replicas of `requests` each, whose proposals are right with `chance`. A round takes 1 s, `row` more for each further row
    of a window and `draft` more for each proposal; what is measured of it is noisy."""

    chance: list[float]
    requests: int = 4
    full: int = 8
    row: float = 0.15
    draft: float = 0.05
    noise: float = 0.0
    load: float = 1.0  # up to so much slower is the machine at times, for 40 rounds on average
    answer: int = 0  # tokens, after which a request is followed by another; 0: none ends
    adaptive: bool = True
    seed: int = 0
    seconds: float = 0.0
    tokens: int = 0  # of each request, on average
    history: list[tuple[Width, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random, self.slower = Random(self.seed), 1.0
        self.widths = Widths(len(self.chance), self.full, self.adaptive)
        self.places = [
            [_Request(self._proposals(chance, self.full - 1)) for _ in range(self.requests)] for chance in self.chance
        ]

    def run(self, rounds: int) -> float:
        """-> tokens of a request and second, over these rounds."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(rounds):
            self._round()
        return (self.tokens - tokens) / (len(self.chance) * self.requests) / (self.seconds - seconds)

    def _round(self) -> None:
        live = [len(places) for places in self.places]
        windows = [min(len(it.window) for it in places) + 1 for places in self.places]
        parts = self.widths.plan(self.requests, live, windows)
        self.history.append(parts)
        verdicts: list[list[Verdict]] = []
        for replica, (places, part, shortest) in enumerate(zip(self.places, parts, windows, strict=True)):
            assert part.width in verify_widths(self.full) and 1 + part.proposals in verify_widths(self.full)
            assert part.width <= shortest
            verdicts.append([verdict for it in places for verdict in self._step(it, part, self.chance[replica])])
            for index, it in enumerate(places):
                if self.answer and it.tokens >= self.answer:
                    asked = self.widths.worth_drafting(Replica(replica))
                    places[index] = _Request(self._proposals(self.chance[replica], asked))
                    self.widths.joined(Replica(replica), 1 / self.requests)
        took = self.takes(max(part.width for part in parts), max(part.proposals for part in parts))
        self.seconds += took
        if self.random.random() < 1 / 40:
            self.slower = 1 + (self.load - 1) * self.random.random()
        measured = took * self.slower * (1 + self.noise * 5 * self.random.random() ** 4)  # now and then much
        self.widths.done(measured, verdicts)

    def takes(self, width: int, proposals: int) -> float:
        return 1 + self.row * (width - 1) + self.draft * proposals

    def replace_all(self) -> None:
        for replica, places in enumerate(self.places):
            asked = self.widths.worth_drafting(Replica(replica))
            places[:] = [_Request(self._proposals(self.chance[replica], asked)) for _ in places]
            self.widths.joined(Replica(replica), 1.0)

    def _step(self, it: "_Request", part: Width, chance: float) -> tuple[Verdict, ...]:
        right = 0
        while right < part.width - 1 and it.window[right] == TRUE:
            right += 1
        it.tokens += right + 1
        self.tokens += right + 1
        verdicts = it.guesses.compare([TRUE] * (right + 1))
        it.window = self._proposals(chance, part.proposals)
        it.guesses.propose(it.window)
        return verdicts

    def _proposals(self, chance: float, count: int) -> tuple[Token, ...]:
        return tuple(TRUE if self.random.random() < chance else FALSE for _ in range(count))


class _Request:
    def __init__(self, window: tuple[Token, ...]):
        self.window, self.guesses, self.tokens = window, Guesses(window), 0


def best_fixed(engine: Engine) -> float:
    """Tokens of a request and second at the best of all fixed widths; 1 or more, as width 1 is one of them."""
    chance = max(engine.chance)

    def rate(width: int) -> float:
        return sum(chance**k for k in range(width)) / engine.takes(width, width - 1)

    return max(map(rate, verify_widths(engine.full)))


costs = {"row": st.floats(0.0, 1.0), "draft": st.floats(0.0, 0.2), "noise": st.sampled_from([0.0, 0.1, 0.3])}
costs["load"] = st.sampled_from([1.0, 3.0])
shapes = {"requests": st.sampled_from([1, 2, 8, 16]), "full": st.sampled_from([2, 4, 5, 8]), "seed": st.integers(0, 1 << 16)}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(chance=st.floats(0.0, 0.05), answer=st.sampled_from([0, 8, 64]), of=st.fixed_dictionaries({**costs, **shapes}))
def test_text_that_nobody_can_foresee_costs_a_few_percent_at_most(chance: float, answer: int, of: dict[str, Any]):
    """From the first round on, and with newcomers all the time."""
    assert Engine([chance, chance], answer=answer, **of).run(200) > 0.93


@settings(max_examples=30, deadline=None, derandomize=True)
@given(chance=st.floats(0.0, 1.0), answer=st.sampled_from([0, 32]), of=st.fixed_dictionaries({**costs, **shapes}))
def test_no_text_costs_more_than_a_few_percent(chance: float, answer: int, of: dict[str, Any]):
    assert Engine([chance, chance], answer=answer, **of).run(200) > 0.85


@settings(max_examples=20, deadline=None, derandomize=True)
@given(chance=st.floats(0.75, 1.0), answer=st.sampled_from([0, 128]), of=st.fixed_dictionaries({**costs, **shapes}))
def test_text_that_can_be_foreseen_is_nearly_as_fast_as_the_best_fixed_width(chance: float, answer: int, of: dict[str, Any]):
    engine = Engine([chance, chance], answer=answer, **of)
    engine.run(50)
    assert engine.run(300) > 0.7 * best_fixed(engine)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(requests=shapes["requests"], full=st.sampled_from([4, 8]), seed=shapes["seed"], row=st.floats(0.1, 0.2))
def test_it_comes_back_when_text_can_be_foreseen_again(requests: int, full: int, seed: int, row: float):
    engine = Engine([0.02], requests, full, row, draft=0.02, seed=seed)
    engine.run(300)
    assert engine.history[-1][0].width == 1
    engine.chance = [0.9]
    engine.run(150)  # the longest rest, twice, and a few looks
    assert engine.run(100) > 0.65 * best_fixed(engine)
    assert max(parts[0].width for parts in engine.history[-100:]) > 1


def test_it_goes_off_within_a_few_rounds_when_text_turns():
    engine = Engine([0.95], requests=4, row=0.1)
    engine.run(300)
    assert engine.history[-1][0].width == 8
    engine.chance = [0.0]
    engine.run(25)
    assert engine.history[-1][0].width == 1


@pytest.mark.parametrize("requests", [1, 8])
def test_newcomers_are_not_judged_by_those_before_them(requests: int):
    """A single newcomer's first look may show a wrong proposal, and the next comes late: so the median of a few."""
    back: list[float] = []
    for seed in range(7):
        engine = Engine([0.8], requests, row=0.15, answer=48, seed=seed)
        engine.run(300)
        engine.chance = [0.02]
        engine.replace_all()
        assert engine.run(96) > 0.92
        engine.run(200)
        engine.chance = [0.8]
        engine.replace_all()
        engine.run(20)
        back.append(engine.run(60) / best_fixed(engine))
    assert median(back) > 0.75


def test_a_replica_goes_off_beside_one_that_does_not():
    engine = Engine([0.9, 0.01], row=0.1)
    engine.run(200)
    widths = [parts for parts in engine.history[50:] if parts[0].width > 1]
    assert len(widths) > 100 and sum(other.width == 1 for _, other in widths) > 0.7 * len(widths)
    engine.chance = [0.01, 0.9]
    engine.run(200)
    assert sum(one.width == 1 < other.width for one, other in engine.history[-50:]) > 30


def test_rounds_narrow_when_a_large_batch_makes_rows_dear():
    small, large = (Engine([0.7], requests=requests, row=row) for requests, row in ((1, 0.02), (16, 0.9)))
    for engine in (small, large):
        engine.run(300)
    assert max(parts[0].width for parts in small.history[-8:]) >= 4
    assert sum(parts[0].width == 1 for parts in large.history[-200:]) > 150  # it looks, and tries again when costs are old


def test_the_same_events_give_the_same_widths():
    one, other = (Engine([0.5, 0.8], noise=0.3, answer=32, seed=7) for _ in range(2))
    for engine in (one, other):
        engine.run(300)
    assert one.history == other.history


def test_fixed_width_verifies_whatever_is_there():
    engine = Engine([0.0, 0.0], adaptive=False)
    engine.run(20)
    assert set(engine.history) == {(Width(8, 7),) * 2}


def test_an_idle_replica_has_the_narrowest_round_and_windows_bound_the_others():
    widths = Widths(2, 8, adaptive=False)
    assert widths.plan(4, [0, 3], [1, 8]) == (Width(1, 0), Width(8, 7))
    widths.done(1.0, [[], []])
    assert widths.plan(4, [1, 3], [1, 5]) == (Width(1, 7), Width(4, 7))


def test_without_a_drafter_every_round_has_width_1():
    widths = Widths(1, 1, adaptive=True)
    for _ in range(200):
        assert widths.plan(2, [2], [1]) == (Width(1, 0),)
        widths.done(1.0, [[]])


# ---- what is known
def test_tokens_judge_proposals_up_to_the_first_wrong_one():
    guesses = Guesses((Token(5), Token(6), Token(7), Token(8)))
    assert guesses.compare([Token(5)]) == (Verdict(1, True),)
    guesses.propose(())
    assert guesses.compare([Token(6), Token(9), Token(8)]) == (Verdict(2, True), Verdict(3, False))
    assert guesses.compare([Token(8)]) == ()
    guesses.propose((Token(3),))
    assert guesses.compare([Token(3), Token(4)]) == (Verdict(1, True),)


def test_expected_tokens_are_the_survivals_that_were_seen():
    acceptance = Acceptance(4)
    for _ in range(60):
        acceptance.add([Verdict(1, True), Verdict(2, False), Verdict(1, False), Verdict(1, True), Verdict(2, True)] * 20)
    assert [acceptance.expected(width) for width in (1, 2, 3)] == pytest.approx([1, 1 + 2 / 3, 1 + 2 / 3 + 1 / 3], abs=0.01)
    assert acceptance.expected(4) == pytest.approx(2 + 1 / 6, abs=0.02), "an unseen position is like the one before it"


def timed(costs: RoundCosts, bucket: int, width: int, *seconds: float) -> None:
    for took in seconds:
        costs.count(bucket)
        costs.measure(bucket, width, took)


def test_one_odd_duration_moves_no_cost_far():
    costs = RoundCosts()
    timed(costs, 8, 1, 1.0, 1.0, 1.0, 1.1, 0.9, 1.0)
    assert costs.of(8, 2) == pytest.approx(GROWTH) and costs.of(8, 8) == pytest.approx(GROWTH**3)
    timed(costs, 8, 8, 50.0)
    assert costs.of(8, 8) == pytest.approx(GROWTH**3)
    timed(costs, 8, 8, 5.0, 5.0)
    assert costs.of(8, 8) == pytest.approx(5.0, rel=0.3)
    assert costs.of(8, 1) == pytest.approx(1.0) and costs.of(4, 8) == pytest.approx(GROWTH**3)


def test_a_machine_that_slows_down_changes_no_cost():
    costs = RoundCosts()
    timed(costs, 2, 1, *[1.0] * 10)
    timed(costs, 2, 4, *[2.0] * 10)
    for slow in (1.5, 2.0, 3.0, 3.0, 3.0, 1.0, 0.7):
        timed(costs, 2, 4, *[2.0 * slow] * 12)
    assert costs.of(2, 4) / costs.of(2, 1) == pytest.approx(2.0, rel=0.1)
    timed(costs, 2, 1, *[0.7] * 4)
    assert costs.of(2, 4) / costs.of(2, 1) == pytest.approx(2.0, rel=0.1)


@given(noise=st.lists(st.floats(0.5, 2.0), min_size=160, max_size=160))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_width_timed_among_its_likes_does_not_drift(noise: list[float]):
    """However noisy: nothing is learnt of a width from rounds of the same width."""
    costs = RoundCosts()
    timed(costs, 2, 1, *[1.0] * 5)
    timed(costs, 2, 4, *[2.0] * 5)
    timed(costs, 2, 1, *noise[:80])
    assert costs.of(2, 1) == 1 and costs.of(2, 4) == 2
    timed(costs, 2, 4, *noise[80:])
    timed(costs, 2, 1, *[1.0] * 5)
    before = costs.of(2, 4)
    timed(costs, 2, 1, *noise[:80])
    assert costs.of(2, 4) == before


def test_costs_count_as_long_as_they_are_fresh():
    costs = RoundCosts()
    timed(costs, 2, 1, 1.0, 1.0, 1.0)
    timed(costs, 2, 4, 8.0, 8.0, 8.0)
    assert costs.age(2, 4) == 0 and costs.of(2, 4) > 4
    timed(costs, 2, 1, *[1.0] * 300)
    assert costs.of(2, 4) == pytest.approx(GROWTH**2) and costs.age(2, 4) == 300
