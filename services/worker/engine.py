"""The device thread: it alone makes and uses process groups, weights, caches and kernels, and runs commands in order.

The loop and this thread exchange messages through two queues: work comes in by `call` and `submit`, results go out by
call_soon_threadsafe. Nothing on the loop waits for the device, nothing in a step waits for the loop.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from k3mesh.errors import EngineLost, Internal, MeshError
from services.runtime.telemetry import log
from services.worker.wire import Command, ForgetRooms, PrefillStep, Report, RoundPlan

Work = Callable[[], None]
T = TypeVar("T")


class Runner(Protocol):
    """What a rank does with commands: a prefill stage or a decode replica. It lives on the device thread."""

    def execute(self, command: Command) -> Report | None: ...

    def counters(self) -> dict[str, int]:
        """What it holds now; may be asked from the loop's thread, so it reads single numbers alone."""
        ...

    def totals(self) -> dict[str, int]: ...


class Engine:
    """The device thread of one rank. All methods are for the loop's thread."""

    def __init__(self, threads: int = 1):
        """`threads` is what torch may use within an operation; many ranks share a CPU, so one by default."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # set to what ended the epoch
        self.pending = 0  # commands submitted and not done
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._runner: Runner | None = None
        self._deliver: Callable[[Report], None] | None = None
        self._last_id = 0
        self._broken = False
        # A daemon: a collective whose peer is gone may hold it for a minute after everything else has ended.
        threading.Thread(target=self._main, args=(threads,), name="device", daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the device thread, for what must be done there before there is a runner."""
        result: asyncio.Future[T] = self._loop.create_future()

        def work() -> None:
            try:
                value = function()
            except Exception as error:
                self._post(_set_unless_done, result, None, error)
            else:
                self._post(_set_unless_done, result, value, None)

        self._work.put(work)
        return await result

    def start(self, runner: Runner, deliver: Callable[[Report], None] | None) -> None:
        """From now on commands go to `runner`, its reports to `deliver` where there is one, in order."""
        self._runner, self._deliver = runner, deliver

    def submit(self, command: Command) -> None:
        """Queue a command. Steps and rounds count up by exactly one from 1; Internal on a gap: a plan got lost or came
        twice, and this rank's state would no longer be what its scheduler and its peers think."""
        if self.failed.done():
            raise EngineLost("this rank's engine has failed; its log has the reason")
        match command:
            case PrefillStep(step_id=number) | RoundPlan(round_id=number):
                if number != self._last_id + 1:
                    raise Internal(
                        f"plan {number} follows plan {self._last_id}, expected {self._last_id + 1}: a gap is refused"
                    )
                self._last_id = number
            case ForgetRooms():
                pass
        self.pending += 1
        self._work.put(lambda: self._execute(command))

    def counters(self) -> dict[str, int]:
        return self._runner.counters() if self._runner else {}

    def totals(self) -> dict[str, int]:
        return self._runner.totals() if self._runner else {}

    async def watch(self) -> None:
        """EngineLost when a step has failed; never returns otherwise."""
        await self.failed

    async def close(self, deadline: float) -> None:
        """Let what is queued finish and end the thread; returns after `deadline` seconds even if it has not."""
        self._work.put(None)
        try:
            async with asyncio.timeout(deadline):
                await self._ended.wait()
        except TimeoutError:
            log.warning("the device thread is still busy", pending=self.pending)

    # ---- on the device thread

    def _main(self, threads: int) -> None:
        torch.set_num_threads(threads)
        while (work := self._work.get()) is not None:
            work()
        self._post(self._ended.set)

    def _execute(self, command: Command) -> None:
        assert self._runner is not None, "start() comes before the first command"
        if self._broken:
            return
        try:
            report = self._runner.execute(command)
        except Exception as error:
            self._broken = True  # what follows was planned on a state that is not there
            log.error("a step failed; the engine's epoch ends", command=_name(command), exc_info=error)
            self._post(self._fail, error)
        else:
            self._post(self._done, report)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the loop is gone")  # the process is leaving; nobody waits for a result

    # ---- on the loop

    def _done(self, report: Report | None) -> None:
        self.pending -= 1
        if report is not None and self._deliver is not None:
            self._deliver(report)

    def _fail(self, error: Exception) -> None:
        self.pending -= 1
        if not self.failed.done():
            self.failed.set_exception(epoch_over(error))


def epoch_over(error: Exception) -> EngineLost:
    """What ended this rank, as everybody who waits for it must take it: the engine restarts as a whole."""
    if isinstance(error, EngineLost):
        return error
    what = error.message if isinstance(error, MeshError) else f"{type(error).__name__}: {error}"
    lost = EngineLost(f"this rank failed ({what}); the engine must restart")
    lost.__cause__ = error
    return lost


def _name(command: Command) -> str:
    match command:
        case PrefillStep():
            return f"prefill step {command.step_id} of {len(command.rows)} rows"
        case RoundPlan():
            return f"round {command.round_id} of {len(command.live)} places"
        case ForgetRooms():
            return f"forget {len(command.rooms)} rooms"


def _set_unless_done(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
