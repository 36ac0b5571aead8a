"""Events that the shell itself makes; every planner handles them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """planner.next_deadline() has been reached: look at the time and act."""
