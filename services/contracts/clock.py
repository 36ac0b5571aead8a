"""Time as an argument: the wall clock of services and the virtual one of the simulator and of tests."""

from dataclasses import dataclass
from typing import Protocol


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
