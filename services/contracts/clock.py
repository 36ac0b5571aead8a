"""Time as an argument: the wall clock of services and the virtual one of the simulator and of tests; and what a planner does at
one moment of it, which is the same in both."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.contracts.events import DeadlinePassed


class Clock(Protocol):
    """Seconds since an arbitrary start; never goes back."""

    def now(self) -> float: ...


@dataclass(slots=True)
class VirtualClock:
    """A clock that moves only when told to."""

    time: float = 0.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back: advance({seconds})")
        self.time += seconds


def take_turn(
    now: float,
    events: deque[Any],
    *,
    apply: Callable[[Any, float], None],
    next_deadline: Callable[[], float | None],
    plan: Callable[[float], Any | None],
    launch: Callable[[Any], None],
) -> float | None:
    """One turn of a planner: all events in the order in which they came, then the deadline if it has passed, then plans until
    there is none -> the next deadline. `apply` performs an event's effects, too."""
    while events:
        apply(events.popleft(), now)
    deadline = next_deadline()
    moved = deadline is not None and deadline <= now
    if moved:
        apply(DeadlinePassed(), now)
    while (planned := plan(now)) is not None:
        launch(planned)
        moved = True
    return next_deadline() if moved else deadline
