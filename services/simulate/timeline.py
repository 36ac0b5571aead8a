"""Virtual time: what happens when, planners that are driven by it, and processors that work is done on.

A planner gets its turns as runtime.shell gives them, by contracts.clock.take_turn. Everything of one moment happens before the
turns of that moment.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
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


class Work(Enum):
    """What a rank does: its part of a prefill step, or of a decode round."""

    STAGE = auto()
    ROUND = auto()


class Processors(Protocol):
    def run(self, work: Work, seconds: float, then: Action, *arguments: Any) -> None:
        """Work that takes so long if nothing else is done -> `then` when it is done."""
        ...


class OwnProcessors:
    """Every rank has its own: GPUs."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline

    def run(self, work: Work, seconds: float, then: Action, *arguments: Any) -> None:
        self._timeline.after(seconds, then, *arguments)


@dataclass(slots=True, eq=False)
class Task:
    work: Work
    left: float  # seconds if nothing else were done
    then: Action
    arguments: tuple[Any, ...]


class SharedProcessors:
    """Ranks share those of a host, and slow each other down as was measured there. `speeds`: of each stage and of a round, for
    the number of stages at work and whether a round runs."""

    def __init__(self, timeline: Timeline, speeds: Callable[[int, bool], tuple[float, float]]):
        self._timeline, self._speeds = timeline, speeds
        self._tasks: list[Task] = []
        self._since = 0.0
        self._version = 0

    def run(self, work: Work, seconds: float, then: Action, *arguments: Any) -> None:
        self._advance()
        self._tasks.append(Task(work, seconds, then, arguments))
        self._next()

    def _speed(self) -> dict[Work, float]:
        rounds = sum(task.work is Work.ROUND for task in self._tasks)
        of_stage, of_round = self._speeds(len(self._tasks) - rounds, rounds > 0)
        return {Work.STAGE: of_stage, Work.ROUND: of_round}

    def _advance(self) -> None:
        passed, speed = self._timeline.now - self._since, self._speed()
        self._since = self._timeline.now
        for task in self._tasks:
            task.left -= passed * speed[task.work]

    def _next(self) -> None:
        self._version += 1
        if self._tasks:
            speed = self._speed()
            soonest = min(self._tasks, key=lambda it: it.left / speed[it.work])
            self._timeline.after(max(0.0, soonest.left / speed[soonest.work]), self._finish, soonest, self._version)

    def _finish(self, task: Task, version: int) -> None:
        """The others go on faster."""
        if version != self._version:
            return
        self._advance()
        self._tasks.remove(task)
        self._next()
        task.then(*task.arguments)
