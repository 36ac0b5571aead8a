"""How often a replica's drafter is right: every token that comes out is held against what was proposed for its position.

That needs no verification. Where a round is narrower than the window before it, the tokens of later rounds tell whether the
rest of the window was right; so a replica that has speculation switched off still learns from windows that came with the
handoff, and from proposals that it drafts now and then only to look at.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from services.contracts.ids import Token

MEMORY = 16  # windows, until what one told counts a third
HEARSAY = 3  # windows that count of what is old, or what other requests told
PRIOR, PRIOR_WEIGHT = 0.5, 0.5  # of a first proposal to be right; windows that count for it


@dataclass(frozen=True, slots=True)
class Verdict:
    """Proposal number `position` of a window, counted from 1, all before it having been right."""

    position: int
    right: bool


@dataclass(slots=True)
class Guesses:
    """What a request's newest proposals say of tokens that are not there yet."""

    left: tuple[Token, ...] = ()
    position: int = 1  # of left[0] in its window

    def propose(self, proposals: tuple[Token, ...]) -> None:
        """A newer window takes the place of what is left; none leaves it as it is."""
        if proposals:
            self.left, self.position = proposals, 1

    def compare(self, tokens: Iterable[Token]) -> tuple[Verdict, ...]:
        """The request's next tokens -> the verdicts, up to the first wrong proposal; what follows that one means nothing."""
        first, right = self.position, 0
        for token, guess in zip(tokens, self.left, strict=False):
            if token != guess:
                self.left, self.position = (), first + right + 1
                return _verdicts(first, right, wrong=True)
            right += 1
        self.left, self.position = self.left[right:], first + right
        return _verdicts(first, right, wrong=False)


@cache
def _verdicts(first: int, right: int, wrong: bool) -> tuple[Verdict, ...]:
    """Of proposals from number `first` on: so many were right, and then one wrong if `wrong`."""
    last = (Verdict(first + right, False),) if wrong else ()
    return (*(Verdict(first + n, True) for n in range(right)), *last)


class Acceptance:
    """One replica's verdicts by position; old ones fade with each window that brings new ones."""

    def __init__(self, width: int):
        self._tried = [0.0] * (width - 1)
        self._right = [0.0] * (width - 1)

    @property
    def known(self) -> bool:
        """Whether there was ever a verdict."""
        return any(self._tried)

    def add(self, verdicts: Sequence[Verdict]) -> None:
        """One round's."""
        if not verdicts:
            return
        windows = sum(verdict.position == 1 for verdict in verdicts)
        self._fade(MEMORY / (MEMORY + windows))
        for verdict in verdicts:
            self._tried[verdict.position - 1] += 1
            self._right[verdict.position - 1] += verdict.right

    def doubt(self, share: float = 1.0) -> None:
        """What is known is old, or this share of the requests is new: so much of it counts for little from now on."""
        if (windows := self._tried[0]) > HEARSAY:
            self._fade(max(1 - share, HEARSAY / windows))

    def _fade(self, factor: float) -> None:
        self._tried = [count * factor for count in self._tried]
        self._right = [count * factor for count in self._right]

    def expected(self, width: int) -> float:
        """Tokens that a round of this width gives a request: 1 + the survival of each proposal. A position of which little is
        known is taken to be as good as the one before it."""
        total, survival, share = 1.0, 1.0, PRIOR
        for tried, right in zip(self._tried[: width - 1], self._right[: width - 1], strict=True):
            share = (right + PRIOR_WEIGHT * share) / (tried + PRIOR_WEIGHT)
            survival *= share
            total += survival
        return total
