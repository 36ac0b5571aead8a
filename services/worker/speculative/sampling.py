"""How the next token is chosen: one rule for prefill's first token and for decode (spec speculation §7).

Greedy iff the temperature is 0. Otherwise P = topp(topk(softmax(z / T))), renormalised after each filter, in float64; the
token is the inverse of P's distribution function, ids ascending, at a coin that depends on (seed, position) alone. So a
token depends on its logits and its request, never on the batch, the rank or the engine that computed it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3mesh.errors import Internal
from services.worker.device import upload

NOT_FINITE = -1  # in a token's place, where its logits are not
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
MASS_ERROR = 1e-6  # of a sum of probabilities that stem from float32 logits


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 switch the filters off."""

    temperature: float
    top_p: float
    top_k: int
    seed: int  # 64 bit, unsigned


def sample(logits: Tensor, rules: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """One token for each row. logits [R, V] float32; row r is chosen for `positions[r]` by `rules[r]`.

    Raises Internal if logits are not finite: no token would mean anything.
    """
    tokens: list[int] = draw(logits, rules, positions).tolist()
    check_finite(tokens)
    return tokens


def check_finite(tokens: Sequence[int]) -> None:
    """Internal if a token was to be drawn from logits that are not finite."""
    if NOT_FINITE in tokens:
        raise Internal("the logits of a request are not finite; the checkpoint or a kernel is broken")


def draw(logits: Tensor, rules: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """`sample` on the device, which nobody waits for here: [R] int64, NOT_FINITE where logits are not finite. Rows behind the
    last rule belong to nobody; they get some token."""
    # A row's sum is finite only if all its entries are (finite float32 entries cannot overflow a float64 sum).
    finite = torch.isfinite(logits.sum(-1, dtype=torch.float64))
    tokens = logits.argmax(-1)  # the smallest id where several are largest
    if drawn := [row for row, rule in enumerate(rules) if rule.temperature > 0]:
        rows = upload(torch.tensor(drawn), logits.device)
        coins = torch.tensor([coin(rules[row].seed, positions[row]) for row in drawn], dtype=torch.float64)
        law = distribution(logits[rows].nan_to_num(), [rules[row] for row in drawn])
        tokens[rows] = _invert(law, upload(coins, logits.device))
    return torch.where(finite, tokens, NOT_FINITE)


def distribution(logits: Tensor, rules: Sequence[Sampling]) -> Tensor:
    """The law of each row's token, all temperatures above 0. [R, V] -> [R, V] float64, rows sum to 1."""

    def column(values: list[float]) -> Tensor:
        return upload(torch.tensor(values, dtype=torch.float64), logits.device).unsqueeze(-1)

    vocab = logits.shape[-1]
    temperature = column([rule.temperature for rule in rules])
    # The largest logit goes first, so that a tiny temperature divides zero and cannot overflow.
    shifted = logits.double() - logits.max(-1, keepdim=True).values.double()
    law = torch.softmax(shifted / temperature, -1)
    if all(rule.top_k in (0, vocab) and rule.top_p >= 1 for rule in rules):
        return law
    ranked, ids = law.sort(dim=-1, descending=True, stable=True)  # equal probabilities: the smaller id first
    top_k = column([rule.top_k or vocab for rule in rules])
    ranked = torch.where(torch.arange(vocab, device=law.device) < top_k, ranked, 0.0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    # A token stays while those before it hold less than top_p, the first always. Mass that equals top_p but for rounding
    # has reached it: else a law of round numbers would keep one token more or less by chance.
    before = ranked.cumsum(-1) - ranked
    keep = before < column([rule.top_p - MASS_ERROR if rule.top_p < 1 else 2.0 for rule in rules])
    keep[:, 0] = True
    ranked = torch.where(keep, ranked, 0.0)
    return torch.zeros_like(law).scatter_(-1, ids, ranked / ranked.sum(-1, keepdim=True))


def coin(seed: int, position: int) -> float:
    """u in [0, 1) for the token at `position` of a request: output number `position` of a splitmix64 generator.

    Integer arithmetic alone, so it is the same on every machine; the seed is mixed first, so that the streams of
    neighbouring seeds are not shifts of each other.
    """
    return (_mix((_mix(seed & MASK) + (position + 1) * GOLDEN) & MASK) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _invert(law: Tensor, coins: Tensor) -> Tensor:
    """[R, V] and [R] -> [R] the smallest id whose cumulated probability exceeds the coin's share of the row's sum."""
    cumulated = law.cumsum(-1)
    share = coins.unsqueeze(-1) * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, share, right=True).squeeze(-1)
    # Rounding may carry the share up to the sum itself: then it is the last id that has any probability.
    last = law.shape[-1] - 1 - (law > 0).flip(-1).int().argmax(-1)
    return torch.minimum(tokens, last)
