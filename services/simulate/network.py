"""The NICs: one for each rank, all ranks of a stage or replica alike. Caches go from a stage's to a replica's; hops between
stages take the same wires and go first."""

from dataclasses import dataclass

from services.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Part:
    """What a stage hands over of one chunk of one room, for one rank."""

    stage: int
    replica: int
    bytes: int
    began: float  # the stage's compute
    ended: float
    intervals: int  # equal parts of it, each free to go when its share of the compute is done


class Network:
    """Each NIC sends, or receives, one thing at a time, in the order of asking."""

    def __init__(self, timeline: Timeline, stages: int, replicas: int, bytes_per_s: float):
        self._timeline, self._rate = timeline, bytes_per_s
        self._out, self._in = [0.0] * stages, [0.0] * replicas  # free from then on
        self._hops = [0.0] * stages  # likewise for the next step
        self.sent, self.received = [0] * stages, [0] * replicas  # bytes of one rank
        self.out_busy, self.in_busy = [0.0] * stages, [0.0] * replicas

    def send(self, part: Part) -> float:
        """-> when all of it is there. The last interval cannot leave before the compute is over."""
        seconds = part.bytes / self._rate
        first_ready = part.began + (part.ended - part.began) / part.intervals
        start = max(self._out[part.stage], self._in[part.replica], first_ready)
        end = max(start + seconds, part.ended + seconds / part.intervals)
        self._out[part.stage] = self._in[part.replica] = end
        self.sent[part.stage] += part.bytes
        self.received[part.replica] += part.bytes
        self.out_busy[part.stage] += seconds
        self.in_busy[part.replica] += seconds
        return end

    def hop(self, stage: int, seconds: float) -> float:
        """-> when a step of `seconds` on the wire is at the next stage. Steps go one after the other; handoffs wait."""
        end = self._hops[stage] = max(self._hops[stage], self._timeline.now) + seconds
        self._out[stage] = max(self._out[stage], self._timeline.now) + seconds
        self.out_busy[stage] += seconds
        return end
