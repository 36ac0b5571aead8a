"""Rounds of a decode replica give sampled requests the target's law, whatever is drafted: thousands of draws against the exact
law of the first two tokens, through the code that serves. The target is a table: what follows a token."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from services.worker import decode_round, round_part
from services.worker.decode_round import DecodeReplica
from services.worker.speculative.drafter import Steps
from services.worker.speculative.nextn import NoCapture
from services.worker.speculative.sampling import Sampling, distribution
from services.worker.wire import Mode, PlaceInstall, RoundPlan
from tests.lib.chi_square import chi_square, critical

V, PLACES, WIDTH, ANCHOR = 16, 256, 3, 0
LAWS = {"temperature": (1.3, 0, 1.0), "top-k": (1.0, 5, 1.0), "top-p": (1.0, 0, 0.8), "all three": (0.7, 6, 0.9)}
Draft = Callable[[Tensor], Tensor]  # a token -> what is proposed behind it


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class TableTarget:
    """A stage of no layers: the hidden row is the token, its logits are the table's row. [V, V] float32."""

    def __init__(self, table: Tensor):
        self._table = table

    def forward(self, batch, hop, on_step, on_tap=None) -> Tensor:
        return batch.tokens.float().unsqueeze(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._table[hidden.squeeze(1).long()]

    def commit(self, batch, accepted: Tensor) -> None:
        """Nothing to move on."""


class TableDrafter:
    """Proposes by a rule of one token, in every round."""

    collective = False

    def __init__(self, draft: Draft):
        self._draft = draft

    def begin(self, rows: int, hop) -> NoCapture:
        return NoCapture()

    def draft(self, batch, hidden, capture, following: Tensor, heads: Tensor, steps: Steps) -> Tensor:
        return window_behind(following[heads], self._draft)[:, 1 : steps.proposals + 1]


def window_behind(anchors: Tensor, draft: Draft) -> Tensor:
    """[B] -> [B, WIDTH]."""
    tokens = [anchors]
    while len(tokens) < WIDTH:
        tokens.append(draft(tokens[-1]))
    return torch.stack(tokens, 1)


def table() -> Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(3)) * 1.5


def likeliest(tokens: Tensor) -> Tensor:
    return table()[tokens].argmax(-1)


def random_token(tokens: Tensor) -> Tensor:
    return torch.randint(0, V, tokens.shape, generator=torch.Generator().manual_seed(int(tokens.sum())))


def pairs(law: tuple[float, int, float], draft: Draft, batches: int) -> Tensor:
    """How often each (first, second) token came in batches x PLACES requests of two rounds, [V, V]."""
    temperature, top_k, top_p = law
    drafter = TableDrafter(draft)
    replica = DecodeReplica(
        TableTarget(table()), replica=0, places=PLACES, max_model_len=64, verify_width=WIDTH, vocab_size=V, drafter=drafter
    )  # pyright: ignore[reportArgumentType]
    window = tuple(window_behind(torch.tensor([ANCHOR]), draft)[0].tolist())
    counts = torch.zeros(V, V, dtype=torch.long)
    everyone = tuple(range(PLACES))
    for batch in range(batches):
        rules = [Sampling(temperature, top_p, top_k, seed=(batch * PLACES + place + 1) << 20) for place in everyone]
        installs = [PlaceInstall(p, 1 + p, (1 + p,), 1 + p, 0, window, rule) for p, rule in zip(everyone, rules, strict=True)]
        tokens: list[list[int]] = [[] for _ in everyone]
        for number, entering, leaving in ((1, installs, everyone if batch else ()), (2, [], ())):
            done = replica.execute(plan(2 * batch + number, entering, leaving))
            for entry in done.tokens:
                tokens[entry.place] += entry.tokens
        for first, second, *_ in tokens:
            counts[first, second] += 1
    return counts


def plan(number: int, installs: Sequence[PlaceInstall], clears: Sequence[int]) -> RoundPlan:
    return RoundPlan(
        number,
        PLACES,
        Mode.LOW_LATENCY_EAGER,
        tuple(installs),
        tuple(clears),
        (),
        tuple(range(PLACES)),
        WIDTH,
        WIDTH - 1,
        WIDTH - 1,
    )


def statistic(law: tuple[float, int, float], draft: Draft, batches: int) -> tuple[float, float]:
    """(chi-square, the value that one draw in ten thousand of the right law exceeds)."""
    temperature, top_k, top_p = law
    after = distribution(table(), [Sampling(temperature, top_p, top_k, 0)] * V)
    found, freedom = chi_square(pairs(law, draft, batches), after[ANCHOR].unsqueeze(1) * after)
    return found, critical(freedom)


@pytest.mark.parametrize("draft", [likeliest, random_token])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_rounds_have_the_targets_law(law: tuple[float, int, float], draft: Draft):
    found, limit = statistic(law, draft, batches=32)
    assert found < limit


# ---- the test is able to fail
def accept_all(windows: Tensor, chosen: Tensor) -> Tensor:
    """Wrong: proposals count without having been chosen."""
    return torch.full((len(windows),), windows.shape[1])


class Threshold:
    """Wrong: a proposal that the target finds likely enough is taken instead of what it chose."""

    def choose(self, logits: Tensor, rules: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
        self.law = distribution(logits.flatten(0, 1), [rule for rule in rules for _ in range(WIDTH)]).unflatten(0, (-1, WIDTH))
        return right_choose(logits, rules, positions)

    def accepted(self, windows: Tensor, chosen: Tensor) -> Tensor:
        likely = self.law[:, :-1].gather(2, windows[:, 1:, None]).squeeze(2) > 0.15
        chosen[:, :-1] = torch.where(likely, windows[:, 1:], chosen[:, :-1])
        return right_accepted(windows, chosen)


right_choose, right_accepted = decode_round.choose, round_part.accepted


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_a_wrong_acceptance_rule_does_not_pass(law: tuple[float, int, float], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(round_part, "accepted", accept_all)
    found, limit = statistic(law, likeliest, batches=16)
    assert found > 2 * limit
    wrong = Threshold()
    monkeypatch.setattr(decode_round, "choose", wrong.choose)
    monkeypatch.setattr(round_part, "accepted", wrong.accepted)
    found, limit = statistic(law, likeliest, batches=16)
    assert found > 2 * limit


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_a_filter_that_is_left_out_does_not_pass(law: tuple[float, int, float], monkeypatch: pytest.MonkeyPatch):
    def choose(logits: Tensor, rules: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
        return right_choose(logits, [Sampling(1.0, 1.0, 0, rule.seed) for rule in rules], positions)

    monkeypatch.setattr(decode_round, "choose", choose)
    found, limit = statistic(law, likeliest, batches=16)
    assert found > limit
