"""How long things take: what the simulated mesh asks. kernels.KernelCosts and measured.MeasuredCosts answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.simulate.constants import Constants


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
class Beside:
    """Processor seconds of what runs beside the ranks' compute; it counts where all share a host's processors."""

    part: float = 0.0  # the agents', for a stage's part of a step
    request: float = 0.0  # the schedulers', for a request
    round: float = 0.0  # the decode scheduler's, for a round


class Costs(Protocol):
    """Seconds, and bytes a second."""

    control: Control
    beside: Beside
    nic: float  # bytes a second of one rank's NIC, each way
    host_copy: float  # bytes a second between a rank's device and its host
    acceptance: tuple[float, ...]  # share of windows whose first k proposals are right, k from 1
    processors: float  # that all ranks share; 0: each has its own
    stage_share: float  # of a step's time, in which the rank computes; else it waits for others
    round_share: float  # likewise of a round's

    def stage(self, stage: int, chunks: Sequence[Chunk]) -> float:
        """One stage's compute of one step."""
        ...

    def hop(self, stage: int, tokens: int) -> float:
        """A step's way from this stage to the next."""
        ...

    def round(self, it: Round) -> tuple[float, ...]:
        """A round, by replica: each one's own compute. The round lasts as long as the longest."""
        ...
