"""Groups of processes that live and die together: start, watch, restart, stop.

An engine is one group, since a dead member leaves the others with collectives that never end. Redis and the gateway are
groups of one. During start-up any failure ends everything with its cause; later a group that lost a member is killed and
started again, and everything ends only if that happens too often.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from k3mesh.errors import MeshError
from services.launch.child import Child, ChildFailed, Spec, first_of
from services.launch.state import StateDir
from services.runtime.telemetry import log

SETTLE_S = 0.5  # after the first death of a group: how long its root cause may take to show
RESTARTS, RESTART_WINDOW_S = 5, 60.0  # of the time that the group was up: a slow start does not make failures rare
BACKOFF_S = (1.0, 2.0, 4.0)


class Group:
    """Processes with one fate."""

    def __init__(self, name: str, specs: Sequence[Spec], state: StateDir, startup_timeout: float):
        self.name = name
        self.specs = tuple(specs)
        self.startup_timeout = startup_timeout
        self.children: list[Child] = []
        self._state = state

    async def start(self) -> None:
        """Start all members; return when each is ready. ChildFailed with the most telling cause, and nothing left running."""
        self.children = [Child(spec, self._state) for spec in self.specs]
        try:
            async with asyncio.timeout(self.startup_timeout):
                for child in self.children:
                    await child.start()
                await self._all_ready()
        except TimeoutError:
            late = next(child for child in self.children if not child.ready.is_set())
            failure = late.failure()
            await self.kill()
            raise ChildFailed(f"{self.name} did not start within {self.startup_timeout:g} s: {failure.message}") from None
        except ChildFailed as failed:
            cause = await self._root_cause(failed)
            await self.kill()
            raise cause from None
        except BaseException:
            await self.kill()
            raise

    async def lost(self) -> ChildFailed:
        """Return when a member has ended, with the most telling cause; the other members may still run."""
        await first_of(*(child.ended for child in self.children))
        return await self._root_cause(None)

    async def kill(self) -> None:
        """End every member at once."""
        await asyncio.gather(*(child.kill() for child in self.children))

    async def _all_ready(self) -> None:
        waits = [asyncio.ensure_future(child.until_ready()) for child in self.children]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _root_cause(self, first: ChildFailed | None) -> ChildFailed:
        """Members of an engine end each other within moments; the one that failed by itself says why."""
        try:
            async with asyncio.timeout(SETTLE_S):
                for child in self.children:
                    await child.ended.wait()
        except TimeoutError:
            pass
        failures = [child.failure() for child in self.children if child.code is not None]
        return min([*([first] if first else []), *failures], key=lambda failure: failure.severity)


class Supervisor:
    """Runs groups, stage after stage; the groups of one stage start side by side."""

    def __init__(self, stages: Sequence[Sequence[Group]]):
        self.stages = stages
        self.groups = [group for stage in stages for group in stage]

    async def run(self, stopping: asyncio.Event, started: Callable[[], Awaitable[None]]) -> None:
        """Start everything, await `started()`, keep it running until `stopping`, then stop it in order.

        MeshError with the cause if start-up fails or a group cannot be kept alive. Nothing runs when this returns or raises.
        """
        stop = asyncio.ensure_future(stopping.wait())
        life = asyncio.ensure_future(self._live(started))
        try:
            await asyncio.wait({stop, life}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
        finally:
            stop.cancel()
            life.cancel()
            await asyncio.gather(stop, life, return_exceptions=True)
            await self._stop()

    async def _live(self, started: Callable[[], Awaitable[None]]) -> None:
        try:
            for stage in self.stages:
                async with asyncio.TaskGroup() as starts:
                    for group in stage:
                        starts.create_task(group.start())
            await started()
            async with asyncio.TaskGroup() as keepers:
                for group in self.groups:
                    keepers.create_task(self._keep(group))
        except* MeshError as failures:
            raise failures.exceptions[0] from None

    async def _keep(self, group: Group) -> None:
        """Start the group again whenever it lost a member. ChildFailed when that is too often."""
        restarts: deque[float] = deque()
        lived = 0.0
        cause = await group.lost()
        while True:
            await group.kill()
            pause = _backoff(restarts, lived, group.name, cause)
            log.warning("restarting", group=group.name, cause=cause.message, pause_s=pause)
            await asyncio.sleep(pause)
            try:
                await group.start()
                log.info("restarted", group=group.name)
                up = time.monotonic()
                cause = await group.lost()
                lived += time.monotonic() - up
            except ChildFailed as failed:
                cause = failed

    async def _stop(self) -> None:
        """Stop children in their order: the next order is told only when the one before is gone."""
        children = [child for group in self.groups for child in group.children]
        for order in sorted({child.spec.stop_order for child in children}):
            await asyncio.gather(*(child.stop() for child in children if child.spec.stop_order == order))


def _backoff(restarts: deque[float], now: float, name: str, cause: ChildFailed) -> float:
    """Note a restart after `now` seconds of life; -> seconds to wait first. ChildFailed if the window is full."""
    while restarts and restarts[0] <= now - RESTART_WINDOW_S:
        restarts.popleft()
    if len(restarts) == RESTARTS:
        raise ChildFailed(
            f"{name} was restarted {RESTARTS} times within {RESTART_WINDOW_S:g} s of life; the last time {cause.message}"
        )
    restarts.append(now)
    return BACKOFF_S[min(len(restarts), len(BACKOFF_S)) - 1]
