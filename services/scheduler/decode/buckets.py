"""The shape of a lockstep round: how many rows every replica pads to, and by which road it runs (spec scheduling §3.3)."""

from collections.abc import Sequence
from enum import Enum


class RoundMode(Enum):
    """A function of the plan, the same for all ranks."""

    LOW_LATENCY_GRAPH = 1
    LOW_LATENCY_EAGER = 2


def shape_of(live_rows: Sequence[int], buckets: Sequence[int], graphs: bool) -> tuple[int, RoundMode] | None:
    """Bucket and mode of a round over replicas with these live rows; None when all of them idle.

    `buckets` ascend. A replica with more rows than the largest bucket makes all of them run eager, at its own size.
    """
    rows = max(live_rows)
    if rows == 0:
        return None
    bucket = next((size for size in buckets if size >= rows), None)
    if bucket is None:
        return rows, RoundMode.LOW_LATENCY_EAGER
    return bucket, RoundMode.LOW_LATENCY_GRAPH if graphs else RoundMode.LOW_LATENCY_EAGER
