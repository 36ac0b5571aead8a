"""The loop that drives a planner: events in, effects out, tasks owned, story kept.

A planner decides and does nothing else (see docs/structure.md). The shell applies each event, performs the effects that
come back by the method registered for their type, and asks for the next plan. A long effect is a task whose result is
the next event; its failure is an event too. No other code calls the planner.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from services.contracts.clock import Clock, take_turn
from services.runtime.telemetry import log

STORY_LENGTH = 4096


class Planner(Protocol):
    def apply(self, event: Any, now: float) -> list[Any]: ...
    def plan(self, now: float) -> Any | None: ...
    def next_deadline(self) -> float | None: ...
    def check(self) -> None: ...


class WallClock:
    """Seconds of the monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class Shell:
    """Runs one planner. Register effect methods with `on`, the launch method as `launch`, then await `run()`."""

    def __init__(self, planner: Planner, clock: Clock | None = None):
        self.planner = planner
        self.clock = clock or WallClock()
        self.launch: Callable[[Any], None] | None = None
        self.on_failure: Callable[[Any, Exception], Any] | None = None
        self.story: deque[tuple[float, Any]] = deque(maxlen=STORY_LENGTH)
        self._methods: dict[type, Callable[[Any], Any]] = {}
        self._events: deque[Any] = deque()
        self._wake = asyncio.Event()
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._planning_ns, self._events_ns = 0, 0

    @property
    def tasks(self) -> int:
        """Effects still under way."""
        return len(self._tasks)

    @property
    def totals(self) -> dict[str, int]:
        """Microseconds in which the planner planned, and in which it took events and their effects were performed at once."""
        return {"planning_us": self._planning_ns // 1000, "events_us": self._events_ns // 1000}

    def on(self, effect_type: type, method: Callable[[Any], Any]) -> None:
        """Perform effects of this type by `method`: plain, it runs at once; async, it becomes a task whose non-None
        result is posted as an event."""
        self._methods[effect_type] = method

    def post(self, event: Any) -> None:
        """Something happened. Call it on the loop's thread."""
        self._events.append(event)
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Until stop(). An exception of the planner or of a plain effect method ends it: state would be unknown."""
        try:
            while not self._stopping:
                await self._rest(self._step())
        except Exception:
            log.error("the planner's loop failed", story=[repr(entry) for entry in list(self.story)[-50:]])
            raise
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _step(self) -> float | None:
        """Do what is due -> the next deadline."""
        return take_turn(
            self.clock.now(),
            self._events,
            apply=self._apply,
            next_deadline=self._next_deadline,
            plan=self._plan,
            launch=self._launch,
        )

    def _launch(self, plan: Any) -> None:
        assert self.launch is not None, "set shell.launch before run()"
        self.story.append((self.clock.now(), plan))
        self.launch(plan)

    def _next_deadline(self) -> float | None:
        began = time.perf_counter_ns()
        deadline = self.planner.next_deadline()
        self._events_ns += time.perf_counter_ns() - began
        return deadline

    def _plan(self, now: float) -> Any | None:
        began = time.perf_counter_ns()
        plan = self.planner.plan(now)
        self._planning_ns += time.perf_counter_ns() - began
        return plan

    def _apply(self, event: Any, now: float) -> None:
        began = time.perf_counter_ns()
        self.story.append((now, event))
        for effect in self.planner.apply(event, now):
            self._perform(effect)
        self._events_ns += time.perf_counter_ns() - began

    def _perform(self, effect: Any) -> None:
        outcome = self._methods[type(effect)](effect)
        if outcome is not None and isinstance(outcome, Awaitable):
            task = asyncio.ensure_future(self._finish(effect, outcome))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, effect: Any, outcome: Awaitable[Any]) -> None:
        try:
            event = await outcome
        except Exception as error:
            if self.on_failure is None:
                log.error("an effect failed", effect=repr(effect), exc_info=error)
                return
            event = self.on_failure(effect, error)
        if event is not None:
            self.post(event)

    async def _rest(self, deadline: float | None) -> None:
        """Until the next event or deadline; without either, for ever."""
        self._wake.clear()
        if self._events or self._stopping:
            await asyncio.sleep(0)  # let effects' tasks in between bursts
            return
        if deadline is None:
            await self._wake.wait()
            return
        alarm = asyncio.get_running_loop().call_later(max(0.0, deadline - self.clock.now()), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            alarm.cancel()
