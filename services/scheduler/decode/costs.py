"""What a lockstep round takes, by bucket and by the width of its widest replica: everyone waits for that one.

Rounds of different widths are never timed together, and a machine is not equally fast all the time. So a round is timed against
those just before it: a cost is relative to what a round of width 1 would have taken then, and is 1 for that width. Only those
of other widths tell something: a width that is timed against itself would drift with every noise.
"""

from collections import Counter, deque
from math import inf, log2
from statistics import median

KEPT = 7  # costs of one bucket and width
FRESH = 256  # rounds of a bucket, until a cost counts no more
GROWTH = 1.3  # of a round whose width doubles, until it is measured
TRUSTED = 3  # costs that outweigh the guess; one alone may be an accident of its moment
BEFORE = 5  # rounds that tell how fast the machine is now
ENOUGH = 3  # of them, at least: so each change of the width gives three costs
GAP = 8  # rounds without a timed one of the bucket: it is not known any more


class RoundCosts:
    """Costs of rounds. Only their ratios within a bucket mean anything to those who ask."""

    def __init__(self):
        self._total = 0  # rounds
        self._rounds: Counter[int] = Counter()  # by bucket
        self._costs: dict[tuple[int, int], deque[tuple[int, float]]] = {}  # number of the bucket's round, cost
        self._before: dict[int, deque[tuple[int, float]]] = {}  # width and seconds of the last rounds, by bucket
        self._timed: dict[int, int] = {}  # by bucket, the last round that was timed
        self._seen: dict[tuple[int, int], int] = {}  # by bucket and width likewise, as number of the bucket's round

    def count(self, bucket: int) -> None:
        """A round of this bucket, timed or not: the others get older."""
        self._total += 1
        self._rounds[bucket] += 1

    def measure(self, bucket: int, width: int, seconds: float) -> None:
        """The round that was counted last took so long."""
        before = self._before.setdefault(bucket, deque(maxlen=BEFORE))
        if self._total - self._timed.get(bucket, 0) > GAP:
            before.clear()
        pace = [took / self.of(bucket, of) for of, took in before if of != width and self._trusted(bucket, of)]
        if width > 1 and len(pace) >= ENOUGH:
            costs = self._costs.setdefault((bucket, width), deque(maxlen=KEPT))
            costs.append((self._rounds[bucket], seconds / median(pace)))
        before.append((width, seconds))
        self._timed[bucket], self._seen[bucket, width] = self._total, self._rounds[bucket]

    def age(self, bucket: int, width: int) -> float:
        """Rounds of the bucket since one of this width was timed in it; infinite if none ever was."""
        return self._rounds[bucket] - self._seen.get((bucket, width), -inf)

    def confidence(self, bucket: int, width: int) -> float:
        """Above 0, up to 1: how much was measured of what is kept at most."""
        return max(1, len(self._costs.get((bucket, width), ()))) / KEPT

    def of(self, bucket: int, width: int) -> float:
        """The median of what was measured lately; where that is little, drawn towards what the nearest width says."""
        if width == 1:
            return 1.0
        own = self._recent(bucket, width)
        return median(own if len(own) >= TRUSTED else [*own, *[self._guess(bucket, width)] * (TRUSTED - 1)])

    def _guess(self, bucket: int, width: int) -> float:
        """From the width next to it, of those that are trusted."""
        trusted = [of for at, of in self._costs if at == bucket and of != width and self._trusted(bucket, of)]
        nearest = min([1, *trusted], key=lambda of: (abs(log2(of / width)), of))
        return self.of(bucket, nearest) * GROWTH ** log2(width / nearest)

    def _trusted(self, bucket: int, width: int) -> bool:
        return width == 1 or len(self._recent(bucket, width)) >= TRUSTED

    def _recent(self, bucket: int, width: int) -> list[float]:
        costs = self._costs.get((bucket, width), ())
        return [cost for number, cost in costs if self._rounds[bucket] - number < FRESH]
