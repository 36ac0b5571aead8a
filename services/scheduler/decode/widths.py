"""How wide each replica's next round is: as wide as it pays, down to 1, which is a round without speculation.

Rounds are lockstep, so their duration is common: it is measured for the widest replica's width. What a replica has of its own
is how often its proposals are right, and how many requests it has. So one width is chosen for all, that of the most tokens a
second, and each replica then takes as little of it as gives it nearly as many tokens. Whoever has speculation off drafts one
proposal now and then, which nobody verifies, and sees by the next tokens whether it would have been right (decision 16).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.contracts.geometry import verify_widths
from services.contracts.ids import Replica
from services.scheduler.decode.acceptance import Acceptance, Verdict
from services.scheduler.decode.costs import RoundCosts

MARGIN = 1.05  # a change of width promises this much more
WORTH = 1.1  # speculation promises this much more than none, to come on and to stay: what is measured is noisy
SURPRISE = 0.2  # a look whose proposals were right so much more often than expected is followed by another at once
NEARLY = 0.97  # of the tokens that the common width would give: a replica leaves the rest
REST, LONGEST_REST = 8, 64  # rounds between looks of a replica that is off; twice as many after each that shows nothing
NEWCOMER_REST = 24  # at most, once there is someone whose text nobody has seen
REFERENCE_AFTER = 64  # rounds without one of width 1, fewer while little is known of it: then it is measured again
REFERENCE_PLANS = 3
SURE, SURELY = 1.2, 0.5  # so much faster than width 1, of which so much is known: it is measured again four times as late


@dataclass(frozen=True, slots=True)
class Width:
    """One replica's part of a round: rows verified of each window, and proposals drafted for the next."""

    width: int
    proposals: int


IDLE = Width(1, 0)


@dataclass(slots=True)
class _Replica:
    acceptance: Acceptance
    target: int = 1
    rest: int = REST
    look_at: int = REST  # the round in which it looks again
    rested: bool = True  # and not just because the last look surprised


class Widths:
    """The widths of one decode engine's rounds. Not adaptive: every round is as wide as it can be."""

    def __init__(self, replicas: int, full: int, adaptive: bool):
        self.ladder = verify_widths(full)
        self._full, self._adaptive = full, adaptive
        self._replicas = [_Replica(Acceptance(full), 1 if adaptive else full) for _ in range(replicas)]
        self._costs = RoundCosts()
        self._widest = 1  # the common width
        self._references = 0  # plans that only measure width 1, this one and those to come
        self._round = 0
        self._steady: deque[tuple[int, int] | None] = (
            deque()
        )  # bucket and width of each round that is out, if it is to be timed

    @property
    def targets(self) -> tuple[int, ...]:
        """What each replica is meant to have, as of the last round."""
        return tuple(it.target for it in self._replicas)

    def plan(self, bucket: int, live: Sequence[int], windows: Sequence[int]) -> tuple[Width, ...]:
        """The round that comes, by replica: `live` requests, whose shortest window has `windows` tokens."""
        self._round += 1
        if self._full == 1:
            self._steady.append(None)
            return (IDLE,) * len(live)
        self._costs.count(bucket)
        if self._adaptive:
            self._choose(bucket, live)
        off = [it for it, rows in zip(self._replicas, live, strict=True) if rows and it.target == 1 < self._full]
        looking = not self._references and any(self._round >= it.look_at for it in off)  # together: all wait for the round
        parts = tuple(
            self._part(it, window, looking) if rows else IDLE
            for it, rows, window in zip(self._replicas, live, windows, strict=True)
        )
        width, following = max(part.width for part in parts), 1 + max(part.proposals for part in parts)
        self._steady.append((bucket, width) if width == following else None)
        return parts

    def done(self, seconds: float, verdicts: Sequence[Sequence[Verdict]]) -> None:
        """The first round that was planned and not done took so long, and told this, by replica."""
        steady = self._steady.popleft()
        if steady is not None and seconds > 0:
            self._costs.measure(*steady, seconds)
        for it, told in zip(self._replicas, verdicts, strict=True):
            first = [verdict.right for verdict in told if verdict.position == 1]
            if it.target == 1 and first and sum(first) / len(first) > it.acceptance.expected(2) - 1 + SURPRISE:
                it.look_at, it.rested = self._round + 1, False
            it.acceptance.add(told)

    def worth_drafting(self, replica: Replica) -> int:
        """Proposals of the window that a newcomer is to bring along: as many as it would be asked for here. All of them where
        nothing is known yet, so that something becomes known at no cost of a round."""
        it = self._replicas[replica]
        return (it.target if it.acceptance.known else self._full) - 1

    def joined(self, replica: Replica, share: float) -> None:
        """This share of a replica's requests is new."""
        it = self._replicas[replica]
        if self._full > 1:
            it.acceptance.doubt(share)
        it.rest = min(it.rest, NEWCOMER_REST)
        it.look_at = min(it.look_at, self._round + it.rest)

    def _part(self, it: _Replica, window: int, looking: bool) -> Width:
        width = max(width for width in self.ladder if width <= min(it.target, window))
        if it.target > 1 or not looking:
            return Width(width, it.target - 1)
        if self._round >= it.look_at and it.rested:
            it.acceptance.doubt()
        it.rested = True
        it.rest = min(2 * it.rest, LONGEST_REST)
        it.look_at = self._round + it.rest
        return Width(width, 1)

    def _choose(self, bucket: int, live: Sequence[int]) -> None:
        self._references = max(0, self._references - 1)
        common = self._common(bucket, live)
        for it in self._replicas:
            enough = NEARLY * it.acceptance.expected(common)
            target = next(width for width in self.ladder if it.acceptance.expected(width) >= enough)
            if target == 1 < it.target:
                it.rest, it.look_at = REST, self._round + REST
            it.target = target

    def _common(self, bucket: int, live: Sequence[int]) -> int:
        costs = dict(zip(self.ladder, accumulate((self._costs.of(bucket, width) for width in self.ladder), max), strict=True))

        def rate(width: int) -> float:  # no round is cheaper than a narrower one, whatever was measured
            tokens = sum(rows * it.acceptance.expected(width) for rows, it in zip(live, self._replicas, strict=True))
            return tokens / costs[width] / (WORTH if width > 1 else 1)

        best = max(self.ladder, key=rate)  # the narrowest of equals
        if rate(best) > MARGIN * rate(self._widest):
            self._widest = best
        known = self._costs.confidence(bucket, self._widest)
        sure = 4 if known > SURELY and rate(self._widest) > SURE * rate(1) else 1
        due = self._costs.age(bucket, 1) > REFERENCE_AFTER * known * sure
        if self._widest > 1 and due and not self._references:
            self._references = REFERENCE_PLANS
        return 1 if self._references else self._widest
