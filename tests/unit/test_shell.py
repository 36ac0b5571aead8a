"""The shell drives a planner: order of events, effects, tasks, deadlines."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.contracts.clock import VirtualClock
from services.contracts.events import DeadlinePassed
from services.runtime.shell import Shell


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Work:
    text: str


@dataclass
class Recorder:
    """A planner that turns each event into the effects it is told to, and plans once after `Note('plan')`."""

    effects: dict[str, list[Any]] = field(default_factory=dict)
    applied: list[Any] = field(default_factory=list)
    deadline: float | None = None
    wanted: int = 0

    def apply(self, event: Any, now: float) -> list[Any]:
        self.applied.append(event)
        if isinstance(event, DeadlinePassed):
            self.deadline = None
        if event == Note("plan"):
            self.wanted += 1
        return self.effects.get(getattr(event, "text", ""), [])

    def plan(self, now: float) -> Any | None:
        if not self.wanted:
            return None
        self.wanted -= 1
        return Note(f"step after {len(self.applied)} events")

    def next_deadline(self) -> float | None:
        return self.deadline

    def check(self) -> None: ...


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
async def shell():
    shell = Shell(Recorder())
    async with asyncio.TaskGroup() as group:
        running = group.create_task(shell.run())
        yield shell
        shell.stop()
        await running


async def test_events_of_one_burst_are_all_applied_before_the_plan(shell):
    launched = []
    shell.launch = launched.append
    for text in ("plan", "a", "b"):
        shell.post(Note(text))
    await until(lambda: launched)
    assert launched == [Note("step after 3 events")]


async def test_an_async_effects_result_is_the_next_event_and_its_failure_is_one_too(shell):
    async def work(effect: Work) -> Note:
        await asyncio.sleep(0)
        if effect.text == "bad":
            raise ValueError("no")
        return Note("done " + effect.text)

    shell.on(Work, work)
    shell.on_failure = lambda effect, error: Note(f"{effect.text} failed: {error}")
    shell.planner.effects = {"go": [Work("good"), Work("bad")]}
    shell.post(Note("go"))
    await until(lambda: len(shell.planner.applied) == 3)
    assert set(shell.planner.applied[1:]) == {Note("done good"), Note("bad failed: no")}
    await until(lambda: shell.tasks == 0)


async def test_a_deadline_is_told_once_when_it_is_reached(shell):
    shell.planner.deadline = shell.clock.now() + 0.01
    shell.post(Note("look"))
    await until(lambda: len(shell.planner.applied) == 2)
    assert shell.planner.applied == [Note("look"), DeadlinePassed()]


async def test_a_defect_of_the_planner_ends_the_loop_and_its_tasks():
    class Broken(Recorder):
        def apply(self, event: Any, now: float) -> list[Any]:
            if event == Note("break"):
                raise RuntimeError("lost count")
            return super().apply(event, now)

    ended = []

    async def endless(effect: Work) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(effect)

    shell = Shell(Broken({"go": [Work("w")]}), VirtualClock())
    shell.on(Work, endless)
    shell.post(Note("go"))
    running = asyncio.ensure_future(shell.run())
    await until(lambda: shell.tasks == 1)
    await asyncio.sleep(0)
    shell.post(Note("break"))
    with pytest.raises(RuntimeError, match="lost count"):
        await running
    assert ended == [Work("w")]
