"""One request on the prefill engine: its states, each with what it holds, and its timeline.

    QUEUED ──► RESERVING ──► BOOTSTRAPPING ──► READY ──► PREFILLING ──► TRANSFERRING ──► HANDED_OVER ──► gone
      ▲ ▲          │               │             │           │               │     D has it │ all ranks released
      │ └ no place ┤               │             │           │               │              │
      │            └─ cancel, failure, loss, no blocks here ─┴───────────────┴──► RELEASING ◄┘ D lost meanwhile
      └──────────────────────────────── another attempt ───────────────────────────┘ │ steps landed, agents drained, D freed
                                                                                     ▼
                                                                                    gone
RESERVING waits for D's answer even if the request is over by then: only the answer tells whether D holds a place.
RELEASING holds blocks and slot until no launched step and no agent can touch them.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import ClassVar

from services.contracts.ids import BLOCK_TOKENS, BlockKey, GlobalRank, Replica, RequestId, Room
from services.contracts.lifecycle import RANK, TERMINAL, State
from services.scheduler.prefill.events import Failure, Sampling
from services.scheduler.prefill.pool import Holding

NO_ROOM, FIRST_REPLICA = Room(0), Replica(0)


class Phase(Enum):
    QUEUED = auto()
    RESERVING = auto()
    BOOTSTRAPPING = auto()
    READY = auto()
    PREFILLING = auto()
    TRANSFERRING = auto()
    HANDED_OVER = auto()
    RELEASING = auto()


@dataclass(slots=True)
class Queued:
    phase: ClassVar = Phase.QUEUED


@dataclass(slots=True)
class Reserving:
    phase: ClassVar = Phase.RESERVING
    answer_by: float
    ready: set[GlobalRank] = field(default_factory=set[GlobalRank])  # agents may be faster than the answer
    then: State = State.BOOTSTRAPPING  # what follows a yes; FAILED and CANCELLED: the request is over already


@dataclass(slots=True)
class Bootstrapping:
    phase: ClassVar = Phase.BOOTSTRAPPING
    waiting: set[GlobalRank]  # have not accepted the manifest yet
    ready_by: float


@dataclass(slots=True)
class Ready:
    phase: ClassVar = Phase.READY
    hold_until: float = inf  # gives the decode place back then: the line waits for blocks here


@dataclass(slots=True)
class Prefilling:
    phase: ClassVar = Phase.PREFILLING
    holding: Holding
    unreleased: set[GlobalRank]  # ranks whose bytes D does not have yet
    next: int  # first prompt position that no step holds yet
    in_flight: int = 0  # launched steps that hold a chunk of it
    installed: bool = False  # D's word came before the last stage's report


@dataclass(slots=True)
class Transferring:
    phase: ClassVar = Phase.TRANSFERRING
    holding: Holding | None  # None: given back, D has all of it
    unreleased: set[GlobalRank]
    done_by: float


@dataclass(slots=True)
class HandedOver:
    phase: ClassVar = Phase.HANDED_OVER
    holding: Holding
    unreleased: set[GlobalRank]
    done_by: float


@dataclass(slots=True)
class Releasing:
    phase: ClassVar = Phase.RELEASING
    holding: Holding | None
    in_flight: int
    undrained: set[GlobalRank]
    on_decode: bool  # D has not said yet that it is rid of the room
    then: State  # FAILED, CANCELLED, FINISHED; QUEUED: another attempt; INSTALLED: D has it, nothing to say
    done_by: float


AnyState = Queued | Reserving | Bootstrapping | Ready | Prefilling | Transferring | HandedOver | Releasing


@dataclass(slots=True)
class Timeline:
    """When what happened to the request's last attempt. Planner time, except the chunks' Unix seconds."""

    queued: float
    reserved: float = 0.0
    ready: float = 0.0
    started: float = 0.0
    prefilled: float = 0.0
    bytes: int = 0  # that D has, over all ranks
    chunks: list[tuple[int, int, int, float, float]] = field(default_factory=list[tuple[int, int, int, float, float]])
    # (stage, start, end, started, ended)


@dataclass(slots=True, eq=False)
class Request:
    request_id: RequestId
    order: int  # of arrival
    prompt_tokens: int
    keys: tuple[BlockKey, ...]  # of its full blocks; none without a prefix cache
    sampling: Sampling
    arrived: float
    deadline: float
    timeline: Timeline
    state: AnyState = field(default_factory=Queued)
    attempt: int = 1
    room: Room = NO_ROOM  # of this attempt; none while it is queued
    decode: str = ""  # the engine that holds a place for this attempt
    replica: Replica = FIRST_REPLICA
    prefix_tokens: int = 0  # what D holds
    cached_tokens: int = 0  # of this attempt's prompt: not computed
    proposals: int = 0
    transfers_failed: int = 0
    failure: Failure | None = None  # why it is over
    told: bool = False  # its client has had the last word
    step: int = 0  # version of the last ledger write of this attempt
    armed: float = inf  # its earliest timer

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def last_boundary(self) -> int:
        """Where the prompt's last full block ends whose rows can be cached."""
        return len(self.keys) * BLOCK_TOKENS

    @property
    def due(self) -> float:
        """When it must be looked at if nothing happens."""
        match self.state:
            case Queued():
                return self.deadline
            case Reserving(answer_by=time, then=then):
                return time if then in TERMINAL else min(time, self.deadline)
            case Bootstrapping(ready_by=time) | Ready(hold_until=time):
                return min(time, self.deadline)
            case Prefilling(installed=installed):
                return inf if installed else self.deadline
            case Transferring(done_by=time):
                return min(time, self.deadline)
            case HandedOver(done_by=time):
                return time
            case Releasing(done_by=time, then=then):
                return min(time, self.deadline) if then is State.QUEUED else time

    @property
    def is_handed_over(self) -> bool:
        """D has installed it: its fate is decided there."""
        match self.state:
            case HandedOver() | Prefilling(installed=True) | Releasing(then=State.INSTALLED):
                return True
            case _:
                return False

    @property
    def holding(self) -> Holding | None:
        match self.state:
            case Prefilling(holding=holding) | Transferring(holding=holding) | HandedOver(holding=holding):
                return holding
            case Releasing(holding=holding):
                return holding
            case _:
                return None

    def next_step(self, state: State) -> int:
        """The version under which `state` is written."""
        self.step = max(self.step + 1, RANK.get(state, 0))
        return self.step


def by_arrival(request: Request) -> int:
    return request.order
