"""Virtual time: what happens when, planners that are driven by it, and processors that work is done on.

A planner gets its turns as runtime.shell gives them, by contracts.clock.take_turn. Everything of one moment happens before the
turns of that moment.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from services.contracts.clock import take_turn

Action = Callable[..., None]


class Planner(Protocol):
    def apply(self, event: Any, now: float) -> list[Any]: ...
    def plan(self, now: float) -> Any | None: ...
    def next_deadline(self) -> float | None: ...


class Timeline:
    """Actions in order of time, those of one moment in the order in which they were put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self.actions = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._due: list[PlannerTurns] = []  # whose turn it is at this moment

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        self.actions += 1
        heapq.heappush(self._heap, (max(time, self.now), self.actions, action, arguments))

    def after(self, seconds: float, action: Action, *arguments: Any) -> None:
        self.at(self.now + seconds, action, *arguments)

    def turn_due(self, planner: "PlannerTurns") -> None:
        self._due.append(planner)

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap or self._due:
            if self._due and (not heap or heap[0][0] > self.now):
                due, self._due = self._due, []
                for planner in due:
                    planner.take_turn()
                continue
            self.now, _, action, arguments = heapq.heappop(heap)
            action(*arguments)


class PlannerTurns:
    """One planner on the timeline. `on[type]` performs an effect, `launch` a plan."""

    def __init__(self, timeline: Timeline, planner: Planner):
        self.planner = planner
        self.on: dict[type, Callable[[Any], None]] = {}
        self.launch: Callable[[Any], None] = _nobody
        self._timeline = timeline
        self._events: deque[Any] = deque()
        self._due = False
        self._alarm: float | None = None

    def post(self, event: Any, at: float | None = None) -> None:
        """The event happens now, or at a later time."""
        if at is None or at <= self._timeline.now:
            self._take(event)
        else:
            self._timeline.at(at, self._take, event)

    def _take(self, event: Any) -> None:
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._timeline.turn_due(self)

    def take_turn(self) -> None:
        self._due = False
        planner = self.planner
        deadline = take_turn(
            self._timeline.now,
            self._events,
            apply=self._apply,
            next_deadline=planner.next_deadline,
            plan=planner.plan,
            launch=self.launch,
        )
        self._arm(deadline)

    def _apply(self, event: Any, now: float) -> None:
        for effect in self.planner.apply(event, now):
            perform = self.on.get(type(effect))
            if perform is not None:
                perform(effect)

    def _arm(self, deadline: float | None) -> None:
        """An alarm that comes too early only finds nothing to do."""
        now = self._timeline.now
        if deadline is not None and (self._alarm is None or self._alarm <= now or deadline < self._alarm):
            self._alarm = deadline
            self._timeline.at(deadline, self._wake)


def _nobody(plan: Any) -> None:
    raise RuntimeError(f"nobody launches {plan}")


class Processors(Protocol):
    def run(self, seconds: float, share: float, then: Action, *arguments: Any) -> None:
        """Work that takes so long by itself, of which `share` is computing and the rest waiting -> `then` when it is done."""
        ...

    def burden(self, seconds: float) -> None:
        """Work that nobody waits for, yet others have less while it is done."""
        ...


class OwnProcessors:
    """Every task has its own: GPUs."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline

    def run(self, seconds: float, share: float, then: Action, *arguments: Any) -> None:
        self._timeline.after(seconds, then, *arguments)

    def burden(self, seconds: float) -> None:
        """It takes nothing from anyone here."""


class SharedProcessors:
    """Tasks share `count` processors evenly, none gets more than one: the cores of a host. Who waits needs none."""

    def __init__(self, timeline: Timeline, count: float):
        self._timeline, self._count = timeline, count
        self._left: dict[int, tuple[float, Action, tuple[Any, ...]]] = {}  # seconds of work by task
        self._tasks = 0
        self._since = 0.0
        self._version = 0

    def run(self, seconds: float, share: float, then: Action, *arguments: Any) -> None:
        self._advance()
        self._tasks += 1
        wait = seconds * (1 - share)
        self._left[self._tasks] = (seconds * share, self._timeline.after, (wait, then, *arguments))
        self._next()

    def burden(self, seconds: float) -> None:
        if seconds:
            self.run(seconds, 1.0, _nothing)

    @property
    def _rate(self) -> float:
        return min(1.0, self._count / max(1, len(self._left)))

    def _advance(self) -> None:
        done = (self._timeline.now - self._since) * self._rate
        self._since = self._timeline.now
        self._left = {task: (left - done, then, arguments) for task, (left, then, arguments) in self._left.items()}

    def _next(self) -> None:
        self._version += 1
        if self._left:
            soonest = max(0.0, min(left for left, _, _ in self._left.values()))
            self._timeline.after(soonest / self._rate, self._finish, self._version)

    def _finish(self, version: int) -> None:
        """The task with the least left is done; the others go on faster."""
        if version != self._version:
            return
        self._advance()
        task = min(self._left, key=lambda it: (self._left[it][0], it))
        _, then, arguments = self._left.pop(task)
        self._next()
        then(*arguments)


def _nothing() -> None:
    pass
