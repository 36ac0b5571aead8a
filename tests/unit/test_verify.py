"""Acceptance: what a window may change is nothing but the number of tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.worker.speculative.sampling import Sampling, distribution, sample
from services.worker.speculative.verify import accepted, choose
from tests.lib.chi_square import chi_square, critical

V, DRAWS = 16, 20_000
LAWS = {
    "whole": (1.0, 0, 1.0), "cold": (0.6, 0, 1.0), "top-k": (1.0, 5, 1.0), "top-p": (1.0, 0, 0.8),
    "top-k and top-p": (0.7, 5, 0.9), "hot, top-p": (1.3, 0, 0.8),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Toy:
    """A target whose token depends on the token before: logits of the first token [V], of the next ones [V, V]."""

    first: Tensor
    after: Tensor

    def rows(self, window: Tensor) -> Tensor:
        """[B, 3] windows -> [B, 3, V]: row i has the logits of what follows window[:, i]; the anchor is the same everywhere."""
        anchor = self.first.expand(len(window), 1, -1)
        return torch.cat([anchor, self.after[window[:, 1:]]], 1)


def toy() -> Toy:
    generator = torch.Generator().manual_seed(3)
    return Toy(torch.randn(V, generator=generator) * 1.5, torch.randn(V, V, generator=generator) * 1.5)


def draft_likeliest(target: Toy, generator: torch.Generator) -> Tensor:
    first = target.first.argmax().repeat(DRAWS)
    return torch.stack([first, target.after[first].argmax(-1)], 1)


def draft_anything(target: Toy, generator: torch.Generator) -> Tensor:
    return torch.randint(0, V, (DRAWS, 2), generator=generator)


def draft_worst(target: Toy, generator: torch.Generator) -> Tensor:
    first = target.first.argmin().repeat(DRAWS)
    return torch.stack([first, target.after[first].argmin(-1)], 1)


DRAFTS = {"likeliest": draft_likeliest, "anything": draft_anything, "worst": draft_worst}
Rule = Callable[[Tensor, list[Sampling], Tensor], tuple[Tensor, Tensor]]  # logits, rules, windows -> tokens, counts


def ours(logits: Tensor, rules: list[Sampling], windows: Tensor) -> tuple[Tensor, Tensor]:
    chosen = choose(logits, rules, [0] * len(rules))
    return chosen, accepted(windows, chosen)


def by_threshold(logits: Tensor, rules: list[Sampling], windows: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: whatever the target finds likely enough is taken."""
    chosen = choose(logits, rules, [0] * len(rules))
    law = distribution(logits.flatten(0, 1), [rule for rule in rules for _ in range(3)]).unflatten(0, (-1, 3))
    likely = law[:, :-1].gather(2, windows[:, 1:, None]).squeeze(2) > 0.15
    chosen[:, :-1] = torch.where(likely, windows[:, 1:], chosen[:, :-1])
    return chosen, accepted(windows, chosen)


def drawn_again(logits: Tensor, rules: list[Sampling], windows: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: after a rejection the token is drawn anew from the whole law, the rejected token included."""
    coins = choose(logits, rules, [0] * len(rules))
    again = choose(logits, [Sampling(r.temperature, r.top_p, r.top_k, r.seed + 1) for r in rules], [9] * len(rules))
    hit = windows[:, 1:] == coins[:, :-1]
    chosen = torch.cat([torch.where(hit, coins[:, :-1], again[:, :-1]), again[:, -1:]], 1)
    return chosen, 1 + hit.long().cumprod(1).sum(1)


def pairs(target: Toy, law: tuple[float, int, float], draft: Callable, rule: Rule) -> Tensor:
    """How often each (first, second) token came, [V, V]; a round that gives one token is followed by an ordinary one."""
    temperature, top_k, top_p = law
    rules = [Sampling(temperature, top_p, top_k, seed=(n + 1) << 20) for n in range(DRAWS)]
    windows = torch.cat([torch.zeros(DRAWS, 1, dtype=torch.long), draft(target, torch.Generator().manual_seed(7))], 1)
    tokens, counts = rule(target.rows(windows), rules, windows)
    first, second = tokens[:, 0], tokens[:, 1]
    short = (counts == 1).nonzero().squeeze(1)
    later = sample(target.after[first[short]], [rules[n] for n in short.tolist()], [2] * len(short))
    second[short] = torch.tensor(later, dtype=torch.long)
    return torch.bincount(first * V + second, minlength=V * V).view(V, V)


def statistic(counts: Tensor, target: Toy, law: tuple[float, int, float]) -> tuple[float, float]:
    """(chi-square, the value that one draw in ten thousand of the right law exceeds)."""
    temperature, top_k, top_p = law
    rule = Sampling(temperature, top_p, top_k, 0)
    first = distribution(target.first.unsqueeze(0), [rule])[0]
    found, freedom = chi_square(counts, first.unsqueeze(1) * distribution(target.after, [rule] * V))
    return found, critical(freedom)


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_sampled_pairs_have_the_targets_law_whatever_is_drafted(law: tuple[float, int, float], draft: Callable):
    found, limit = statistic(pairs(toy(), law, draft, ours), toy(), law)
    assert found < limit


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("rule", [by_threshold, drawn_again])
def test_a_wrong_rule_does_not_pass_that_test(rule: Rule, law: tuple[float, int, float]):
    found, limit = statistic(pairs(toy(), law, draft_likeliest, rule), toy(), law)
    assert found > 2 * limit


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_a_proposal_passes_as_often_as_it_is_likely(law: tuple[float, int, float]):
    target, (temperature, top_k, top_p) = toy(), law
    rules = [Sampling(temperature, top_p, top_k, seed=(n + 1) << 20) for n in range(DRAWS)]
    windows = torch.cat([torch.zeros(DRAWS, 1, dtype=torch.long), draft_likeliest(target, torch.Generator())], 1)
    _, counts = ours(target.rows(windows), rules, windows)
    p = float(distribution(target.first.unsqueeze(0), rules[:1])[0, windows[0, 1]])
    passed = float((counts > 1).double().mean())
    assert abs(passed - p) < 4 * math.sqrt(p * (1 - p) / DRAWS)


@pytest.mark.parametrize("law", [(0.0, 0, 1.0), *LAWS.values()])
def test_every_row_chooses_what_a_round_of_its_own_would(law: tuple[float, int, float]):
    temperature, top_k, top_p = law
    logits = torch.randn(5, 8, V, generator=torch.Generator().manual_seed(1))
    rules = [Sampling(temperature, top_p, top_k, seed) for seed in range(5)]
    positions = [0, 7, 100, 3, 12]
    chosen = choose(logits, rules, positions)
    for row in range(8):
        assert chosen[:, row].tolist() == sample(logits[:, row], rules, [p + row + 1 for p in positions])


def test_a_window_counts_up_to_its_first_wrong_proposal():
    chosen = torch.tensor([[5, 6, 7, 8]] * 5)
    windows = torch.tensor([[1, 5, 6, 7], [1, 5, 6, 9], [1, 5, 9, 7], [1, 9, 6, 7], [1, 9, 9, 9]])
    assert accepted(windows, chosen).tolist() == [4, 3, 2, 1, 1]
    assert accepted(torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4, dtype=torch.long)).tolist() == []
    assert accepted(torch.tensor([[3]]), torch.tensor([[8]])).tolist() == [1]
