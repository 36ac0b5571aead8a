"""One request on the decode engine: its states, each with the resources that it holds, and its stop rules.

    RESERVED ──first rank ready──► RECEIVING ──all ranks agree──► INSTALLED ──first plan──► DECODING ◄──copied back── RESTORING
        │                              │                              │                       │ └─blocks─► RETRACTING     ▲
        │                              │                              │                       │   ran out      │ copied   │ fits
        │                              │                              │                       │                ▼          │
        │                              │                              │                       │            RETRACTED ─────┘
        └──── cancel, failure, loss ───┴──► RELEASING                 └── stop, cancel, abort ┴─► FINISHING ◄─ cancel of any
                                               │ all agents drained                                  │ launched round landed
                                               ▼                                                     ▼
                                              gone                                                  gone

A room that is not installed leaves through RELEASING: its agents may still write to its blocks until they say Drained.
An installed one leaves through FINISHING: the workers may still write until the launched round has landed. A room whose
client has not attached is not installed. RETRACTING, RETRACTED and RESTORING requests are suspended: they have an image in
host memory, which is free in the step in which they end.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import ClassVar

from services.contracts.ids import BlockId, GlobalRank, Replica, Room, Token
from services.contracts.lifecycle import RANK, State
from services.scheduler.decode.acceptance import Guesses
from services.scheduler.decode.capacity import Holding, growth
from services.scheduler.decode.events import AgentRankReady, Client, Drafts, End, Failure, Finished, ReserveAsked
from services.scheduler.decode.images import Image

PROGRESS_S = 30.0  # between the first rank that is ready and the next, and until the room is installed or cancelled
TOMBSTONES = 4096


class Phase(Enum):
    RESERVED = auto()
    RECEIVING = auto()
    INSTALLED = auto()
    DECODING = auto()
    RETRACTING = auto()
    RETRACTED = auto()
    RESTORING = auto()
    FINISHING = auto()
    RELEASING = auto()


@dataclass(slots=True)
class Reserved:
    phase: ClassVar = Phase.RESERVED
    holding: Holding


@dataclass(slots=True)
class Receiving:
    phase: ClassVar = Phase.RECEIVING
    holding: Holding
    arrivals: dict[GlobalRank, AgentRankReady]
    progressed_at: float  # of the last rank that became ready


@dataclass(slots=True)
class Progress:
    """How far a resident is."""

    order: int  # of installation: the newest has the largest
    position: int  # of the anchor, whose rows are not in the cache yet
    window: tuple[Token, ...]
    usable: int  # tokens of the window, the anchor among them; behind them is padding
    cached_tokens: int
    installed_at: float
    last_token_at: float
    unnamed: list[Token]  # from the last cached block to the anchor; empty if nothing more is to be cached
    completion: int = 1  # tokens so far, the anchor among them
    rounds: int = 0
    windows: int = 0  # rounds that verified proposals
    drafted: int = 0  # proposals in them
    accepted_at: list[int] = field(default_factory=list[int])  # windows whose first k proposals were right, k from 1
    guesses: Guesses = field(default_factory=Guesses)
    unmoved: bool = False  # it came back from its image, and has had no round since

    def count_window(self, drafted: int, right: int) -> None:
        """A round verified `drafted` proposals, and the first `right` of them were what the target chose."""
        self.windows += 1
        self.drafted += drafted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for k in range(right):
            self.accepted_at[k] += 1

    def drafts(self) -> Drafts | None:
        """All of it, None if there was nothing."""
        if not self.windows:
            return None
        return Drafts(self.windows, self.drafted, sum(self.accepted_at), tuple(self.accepted_at))


@dataclass(slots=True)
class Installed:
    phase: ClassVar = Phase.INSTALLED
    holding: Holding
    progress: Progress


@dataclass(slots=True)
class Decoding:
    phase: ClassVar = Phase.DECODING
    holding: Holding
    progress: Progress
    known_blocks: int  # how much of the block table the workers have; 0: they do not have it at all yet
    until: int | None  # the last round that had it; None: it is in all since it came in line (lineup.py)


@dataclass(slots=True)
class Retracting:
    phase: ClassVar = Phase.RETRACTING
    holding: Holding  # without what it ceded; the rest stays until all ranks have the image
    progress: Progress
    image: Image
    table: frozenset[BlockId]  # what the copy reads, ceded blocks among it
    round_id: int | None = None  # the round that copies; None: not planned yet


@dataclass(slots=True)
class Retracted:
    phase: ClassVar = Phase.RETRACTED
    progress: Progress
    image: Image
    since: float


@dataclass(slots=True)
class Restoring:
    phase: ClassVar = Phase.RESTORING
    holding: Holding
    progress: Progress
    image: Image
    round_id: int | None = None  # the round that copies; None: not planned yet


@dataclass(slots=True)
class Finishing:
    phase: ClassVar = Phase.FINISHING
    holding: Holding
    progress: Progress
    round_id: int  # the last that holds it: still out


@dataclass(slots=True)
class Releasing:
    phase: ClassVar = Phase.RELEASING
    holding: Holding
    waiting: set[GlobalRank]  # not drained yet
    failure: Failure | None  # what the prefill scheduler is told; None: it was cancelled
    drained_by: float


Suspended = Retracting | Retracted | Restoring
AnyState = Reserved | Receiving | Installed | Decoding | Suspended | Finishing | Releasing


@dataclass(slots=True)
class Request:
    """A room and what is known of it. `budget` is how many new tokens it may have, `stops` what ends it before that."""

    asked: ReserveAsked
    budget: int
    stops: frozenset[Token]
    reserved_at: float
    deadline: float
    attach_by: float
    proposals: int  # that its window was asked to have; the rest of it is padding
    state: AnyState
    client: Client | None = None  # the stream that follows it now
    attached: bool = False  # there was one; it does not come back
    end: End | None = None
    orphaned: bool = False  # its prefill scheduler is gone
    awaited: bool = False  # installed, yet P waits for its RoomEnded
    step: int = 0  # version of the last ledger write
    covered: bool = False  # when it came in last, or came back, there was room for all that it may still say
    retractions: int = 0

    @property
    def room(self) -> Room:
        return self.asked.room

    @property
    def replica(self) -> Replica:
        return self.state.image.replica if isinstance(self.state, Retracted) else self.state.holding.replica

    def next_step(self, state: State) -> int:
        """The version under which `state` is written."""
        self.step = max(self.step + 1, RANK.get(state, 0))
        return self.step

    def growth(self, rows: int) -> int:
        """Blocks that it may ask for soon."""
        match self.state:
            case Reserved() | Receiving():
                return growth(self.asked.prompt_tokens, self.budget - 1, rows, len(self.state.holding.blocks))
            case Installed() | Decoding() | Restoring():
                progress = self.state.progress
                return growth(progress.position, self.budget - progress.completion, rows, len(self.state.holding.blocks))
            case _:
                return 0

    def ends_with(self, anchor: Token) -> bool:
        """Whether the first token is the last one; the prefill scheduler then ends the request."""
        return anchor in self.stops or self.budget == 1

    @property
    def due(self) -> float:
        """When the request is out of time if nothing happens; infinite while it ends."""
        if not isinstance(self.state, Reserved | Receiving | Installed | Decoding | Suspended):
            return inf
        due = self.deadline if self.attached else min(self.deadline, self.attach_by)
        return min(due, self.state.progressed_at + PROGRESS_S) if isinstance(self.state, Receiving) else due

    def overdue(self, now: float) -> Failure | None:
        """What it is out of, if it is."""
        if now < self.due:
            return None
        if now >= self.deadline:
            seconds = self.deadline - self.reserved_at
            return Failure("deadline_exceeded", f"the request did not end within the {seconds:.3g} s that decode had for it")
        if not self.attached and now >= self.attach_by:
            return Failure("cancelled", f"no client attached within {self.attach_by - self.reserved_at:g} s")
        assert isinstance(self.state, Receiving)
        message = f"room {self.room}: no progress for {PROGRESS_S:g} s; only ranks {sorted(self.state.arrivals)} have all of it"
        return Failure("transfer_failed", message, "PD_TIMEOUT_WAIT")

    def accept(self, progress: Progress, tokens: tuple[Token, ...]) -> tuple[tuple[Token, ...], Finished | None]:
        """Count a round's tokens -> those that the client gets, and the end if one of them is the last."""
        for index, token in enumerate(tokens):
            progress.completion += 1
            stopped = token in self.stops
            if stopped or progress.completion == self.budget:
                return tokens[: index + 1], Finished(
                    reason="stop" if stopped else "length",
                    prompt_tokens=self.asked.prompt_tokens,
                    completion_tokens=progress.completion,
                    cached_tokens=progress.cached_tokens,
                    stop_token=token if stopped else None,
                    drafts=progress.drafts(),
                )
        return tokens, None


def stop_tokens(asked: ReserveAsked, end_tokens: Collection[Token]) -> frozenset[Token]:
    """What ends a request: its own stop tokens always, the model's end tokens unless it ignores them."""
    own = asked.sampling.stop_token_ids
    return frozenset(own) if asked.sampling.ignore_eos else frozenset(own) | frozenset(end_tokens)


class Tombstones:
    """Rooms that are over, and how; the oldest are forgotten. A late message must not bring one back."""

    def __init__(self, limit: int = TOMBSTONES):
        self._ends: OrderedDict[Room, End] = OrderedDict()
        self._limit = limit

    def __contains__(self, room: Room) -> bool:
        return room in self._ends

    def end_of(self, room: Room) -> End | None:
        return self._ends.get(room)

    def bury(self, room: Room, end: End) -> None:
        self._ends[room] = end
        if len(self._ends) > self._limit:
            self._ends.popitem(last=False)
