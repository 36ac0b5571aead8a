"""How long things take: what the simulated mesh asks. kernels.KernelCosts and measured.MeasuredCosts answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.simulate.constants import Constants, Points, interpolate


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt positions [start, end); `last`: a first token and a window follow."""

    start: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Round:
    """One lockstep round, as its widest and fullest replicas are."""

    bucket: int
    width: int
    proposals: int
    live: tuple[int, ...]  # requests by replica
    contexts: tuple[int, ...]  # cached tokens of all of them, by replica


@dataclass(frozen=True, slots=True)
class Control:
    """Seconds that messages take, one way unless said otherwise."""

    client: float  # client to scheduler
    schedulers: float  # prefill to decode scheduler
    agents: float  # from a manifest until all prefill agents are ready
    step: float  # scheduler to a stage's workers
    round: float  # scheduler to all replicas' workers, and back
    transfer: float  # of each stage's part of a chunk, beside its bytes

    @classmethod
    def of(cls, constants: Constants) -> "Control":
        names = ("client_s", "schedulers_s", "agents_s", "step_s", "round_s", "transfer_s")
        return cls(*map(constants.number, names))


@dataclass(frozen=True, slots=True)
class Contention:
    """Speeds where stages and replicas share a host's processors; 1 is as fast as without the others. Curves over the number of
    stages at work, constant beyond their ends."""

    stages: Points  # of all stages together, while no round runs
    stages_beside: Points  # likewise, while one runs
    round_beside: Points  # of a round meanwhile

    @classmethod
    def of(cls, constants: Constants) -> "Contention":
        return cls(*map(constants.points, ("stages_speed", "stages_beside_speed", "round_beside_speed")))

    def speeds(self, stages: int, rounds: bool) -> tuple[float, float]:
        """-> of each stage, of a round."""
        together = _clamped(self.stages_beside if rounds else self.stages, stages)
        return together / max(1, stages), _clamped(self.round_beside, stages) if stages else 1.0


class Costs(Protocol):
    """Seconds, and bytes a second."""

    control: Control
    nic: float  # bytes a second of one rank's NIC, each way
    host_copy: float  # bytes a second between a rank's device and its host
    acceptance: tuple[float, ...]  # share of windows whose first k proposals are right, k from 1

    @property
    def contention(self) -> Contention | None:
        """None: each rank has a processor of its own."""
        ...

    def stage(self, stage: int, chunks: Sequence[Chunk]) -> float:
        """One stage's compute of one step."""
        ...

    def hop(self, stage: int, tokens: int) -> float:
        """A step's way from this stage to the next."""
        ...

    def round(self, it: Round) -> tuple[float, ...]:
        """A round, by replica: each one's own compute. The round lasts as long as the longest."""
        ...


def _clamped(points: Points, x: float) -> float:
    return interpolate(points, min(x, points[-1][0]))
