"""How many tokens a round brings (spec speculation §13), from greedy text that is already there: greedy
speculation changes no token, so proposals after every position say what each round would have accepted."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Acceptance:
    """Rounds of some answers. The last round of an answer brings no more than the answer has left; where the text was cut
    instead, rounds that would reach beyond it are left out."""

    rounds: list[int]  # tokens of each, the bonus counted
    width: int

    @property
    def length(self) -> float:
        return sum(self.rounds) / max(1, len(self.rounds))

    @property
    def survival(self) -> list[float]:
        """Share of rounds that accepted proposal k, k = 1 …"""
        return [sum(a > k for a in self.rounds) / max(1, len(self.rounds)) for k in range(1, self.width)]

    def __str__(self) -> str:
        positions = " ".join(f"{value:.2f}" for value in self.survival)
        return f"{self.length:.2f} tokens a round over {len(self.rounds)} rounds; survival {positions}"


def accepted(tokens: Tensor, starts: Tensor, ends: Tensor, proposals: Tensor) -> Acceptance:
    """tokens [B, T] greedy; the first generated token of row b is at starts[b], the last at ends[b] - 1, which is its answer's
    end unless it is T - 1; proposals [B, T, G] after each position."""
    count = proposals.shape[-1]
    following = torch.stack([tokens.roll(-k - 1, 1) for k in range(count)], -1)
    right = (proposals == following).int().cumprod(-1).sum(-1).tolist()
    rounds = []
    for row, start, end in zip(right, starts.tolist(), ends.tolist(), strict=True):
        anchor, whole = start, end < tokens.shape[1]
        while anchor < end - 1 and (whole or anchor + count + 1 < end):
            rounds.append(min(row[anchor] + 1, end - 1 - anchor))
            anchor += row[anchor] + 1
    return Acceptance(rounds, count + 1)
