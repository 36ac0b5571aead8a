"""What both sides of a handoff share: a room's phases, the rooms that have ended, limits, and how a session is driven (pure).

    D   BOOTSTRAPPING ──all stages accept──► BOOTSTRAPPED ──first frames──► TRANSFERRING ──all verified and installed──► SUCCESS
    P                                        BOOTSTRAPPED ──first chunk──► WAITING_FOR_INPUT ──first frame──► TRANSFERRING ──StageAck──► SUCCESS
    both: any phase ──cancel, violation, time, lost link──► FAILED, which holds on until nothing of the room is in flight

A phase never goes back, SUCCESS and FAILED never change. An ended room leaves a tombstone, so that a late message cannot
revive it.

A lost link fails no room by itself: the room waits a moment for the next link to the same life of the peer, which has an epoch of
its own. D then offers it anew to every stage that it has not acknowledged, and such a stage sends all of its units again. What
was under way of the old link ends with it, before anything of the new one begins: its endpoint is fenced.

Stopping a room takes both sides: whoever stops it says CancelRoom, the other answers Drained when nothing of it is in
flight there. D grants nothing after either; P honours what was granted before (D's receives are posted) and keeps frames
that may still be granted until D has said that none will be.
"""  # noqa: E501

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, ClassVar

from services.contracts.events import DeadlinePassed
from services.contracts.placement import Placement
from services.kvtransfer.messages import Effect, PeerMessage, Report, Room, ToPeer, ToScheduler
from services.kvtransfer.pieces import frame_room

TOTALS = ("bytes_sent", "bytes_received", "frames", "rooms_ok", "rooms_failed", "stale_messages")


class Phase(IntEnum):
    BOOTSTRAPPING = auto()
    BOOTSTRAPPED = auto()
    WAITING_FOR_INPUT = auto()
    TRANSFERRING = auto()
    SUCCESS = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and times of one agent."""

    frame_bytes: int = 32 << 20
    frames: int = 4
    window: int = 2  # staging frames that one link may hold: W of the credits
    piece_bytes: int = 1 << 20  # of a frame, that one message carries
    bootstrap: float = 120.0  # seconds until every stage has accepted
    progress: float = 30.0  # seconds that a granted frame or an unanswered offer may take
    resume: float = 5.0  # seconds that a room waits for a new link
    drain: float = 10.0  # seconds that a stopped room may stay in flight before its link is cut
    grace: float = 10.0  # seconds that P gives a room beyond D's deadline, so that D is the one to end it
    beat: float = 5.0  # seconds between the heartbeats of a link; two missed are its end
    answer: float = 30.0  # seconds that the mover may take to make or end a link's endpoint
    tombstones: int = 4096

    def longest_piece(self, largest_unit: int) -> int:
        """Bytes of units in the longest piece. A piece has at least one unit, and a frame is at least as long as any."""
        return max(min(self.piece_bytes, self.frame_bytes), largest_unit)

    @property
    def frame_room(self) -> int:
        """Bytes of staging memory that one frame takes."""
        return frame_room(self.frame_bytes, self.piece_bytes)

    @property
    def staging_bytes(self) -> int:
        return self.frames * self.frame_room


class Tombstones:
    """The rooms that ended last, and which of them well."""

    def __init__(self, limit: int):
        self._limit = limit
        self._rooms: dict[Room, Phase] = {}  # oldest first

    def add(self, room: Room, phase: Phase = Phase.FAILED) -> None:
        before = self._rooms.pop(room, phase)
        self._rooms[room] = before  # the first end counts
        if len(self._rooms) > self._limit:
            del self._rooms[next(iter(self._rooms))]

    def __contains__(self, room: Room) -> bool:
        return room in self._rooms

    def succeeded(self, room: Room) -> bool:
        return self._rooms.get(room) is Phase.SUCCESS


class Session:
    """One agent's side of all its handoffs: events in, effects out (a Planner for runtime.Shell; it plans nothing)."""

    handlers: ClassVar[dict[type, str]]  # event type -> method(event)

    def __init__(self, placement: Placement, limits: Limits):
        self.placement = placement
        self.limits = limits
        self.tombstones = Tombstones(limits.tombstones)
        self.totals: dict[str, int] = dict.fromkeys(TOTALS, 0)
        self._now = 0.0
        self._effects: list[Effect] = []

    def apply(self, event: Any, now: float) -> list[Effect]:
        self._now = now
        if isinstance(event, DeadlinePassed):
            for act in [act for at, act in self.deadlines() if at <= now]:
                act()
        else:
            getattr(self, self.handlers[type(event)])(event)
        self.pump()
        effects, self._effects = self._effects, []
        return effects

    def plan(self, now: float) -> None:
        return None

    def next_deadline(self) -> float | None:
        return min((at for at, _ in self.deadlines()), default=None)

    @abstractmethod
    def deadlines(self) -> Iterable[tuple[float, Callable[[], None]]]:
        """When something must have happened, and what to do if it has not."""

    @abstractmethod
    def pump(self) -> None:
        """What the event has made possible: P offers what is written, D grants what there are frames for."""

    @abstractmethod
    def check(self) -> None:
        """Every invariant; raises AssertionError."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """What must return to its start when no request is left."""

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def tell(self, link: Any, message: PeerMessage) -> None:
        self.emit(ToPeer(link, message))

    def report(self, report: Report) -> None:
        self.emit(ToScheduler(report))

    def stale(self) -> None:
        """A message of the past: dropped and counted."""
        self.totals["stale_messages"] += 1
