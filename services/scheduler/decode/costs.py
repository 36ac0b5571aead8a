"""What a lockstep round takes, by bucket and by the width of its widest replica: everyone waits for that one."""

from collections import Counter, deque
from collections.abc import Sequence
from math import inf, log2
from statistics import median

KEPT = 7  # durations of one bucket and width
FRESH = 256  # rounds of a bucket, until a duration counts no more
GROWTH = 1.3  # of a round whose width doubles, until it is measured
TRUSTED = 3  # durations that outweigh the guess; one alone may be an accident of its moment


class RoundCosts:
    """Seconds of rounds. Only their ratios within a bucket mean anything to those who ask."""

    def __init__(self):
        self._rounds: Counter[int] = Counter()  # by bucket
        self._durations: dict[tuple[int, int], deque[tuple[int, float]]] = {}  # number of the bucket's round, seconds

    def count(self, bucket: int) -> None:
        """A round of this bucket, measured or not: the others get older."""
        self._rounds[bucket] += 1

    def measure(self, bucket: int, width: int, seconds: float) -> None:
        kept = self._durations.setdefault((bucket, width), deque(maxlen=KEPT))
        kept.append((self._rounds[bucket], seconds))

    def age(self, bucket: int, width: int) -> float:
        """Rounds of the bucket since this width was measured in it; infinite if it never was."""
        kept = self._durations.get((bucket, width))
        return self._rounds[bucket] - kept[-1][0] if kept else inf

    def confidence(self, bucket: int, width: int) -> float:
        """0 to 1: how much was measured of what is kept at most."""
        return len(self._durations.get((bucket, width), ())) / KEPT

    def of(self, bucket: int, width: int) -> float:
        """What it takes undisturbed, of what was measured lately; where that is little, drawn towards the nearest width."""
        own = self._recent(bucket, width)
        if len(own) < TRUSTED:
            return median([*own, *[self._guess(bucket, width)] * (TRUSTED - 1)])
        return _undisturbed(own)

    def _guess(self, bucket: int, width: int) -> float:
        """From the width next to it that was measured more often; from this one itself if there is none."""
        others = {of: self._recent(bucket, of) for at, of in self._durations if at == bucket}
        near = [of for of, seconds in others.items() if seconds and (of != width)]
        if others.get(width) and not any(len(others[of]) >= TRUSTED for of in near):
            return _undisturbed(others[width])
        if not near:
            return GROWTH ** log2(width)
        nearest = min(near, key=lambda of: (abs(log2(of / width)), of))
        return _undisturbed(others[nearest]) * GROWTH ** log2(width / nearest)

    def _recent(self, bucket: int, width: int) -> list[float]:
        kept = self._durations.get((bucket, width), ())
        return [seconds for number, seconds in kept if self._rounds[bucket] - number < FRESH]


def _undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: what disturbs a round only ever makes it longer."""
    return sorted(seconds)[len(seconds) // 4]
