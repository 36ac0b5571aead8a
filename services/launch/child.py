"""One child process: started in a session of its own, heard through sd_notify, never outliving the supervisor.

A child that has said WATCHDOG=1 once must go on saying it: one that is stopped or hangs is killed, which its group takes as
its death. A program that does not know the watchdog may have a probe instead.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from k3mesh.errors import MeshError
from services.contracts.flags import ENV_PREFIX
from services.launch.state import StateDir
from services.runtime.process import EXIT_CONFIG, EXIT_ENGINE_LOST

ROOT = Path(__file__).resolve().parents[2]
TAIL_BYTES = 4096
BEAT_S, MISSED_BEATS = 4.0, 2  # two waits, not one of twice the time: a machine that sleeps makes one of them end early


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run. Children of a lower `stop_order` are stopped, and gone, before the next order is."""

    name: str
    command: tuple[str, ...]
    stop_order: int
    grace: float = 10.0  # seconds between SIGTERM and SIGKILL
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    probe: Callable[[], Awaitable[None]] | None = None  # returns when the program, ready by then, answers


class ChildFailed(MeshError):
    """A child ended, or never got ready. Of several, the one of the lowest severity is the root cause."""

    def __init__(self, message: str, severity: int = 1):
        super().__init__(message)
        self.severity = severity


class Child:
    """Runs one Spec, once."""

    def __init__(self, spec: Spec, state: StateDir):
        self.spec = spec
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.code: int | None = None
        self.status = ""
        self._log = state.log_of(spec.name)
        self._notify_path = state.run / f"{spec.name}.notify"
        self._pid_path = state.pid_file(spec.name)
        self._log_start = 0
        self._notify: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._beat = asyncio.Event()
        self._silent = False  # killed for it

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process; `ready` and `ended` tell the rest. ChildFailed if there is no such program."""
        self._listen()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(self.spec.environment)
        environment |= {"NOTIFY_SOCKET": str(self._notify_path), "K3MESH_PARENT": str(os.getpid())}
        environment |= {"WATCHDOG_USEC": str(int(BEAT_S * MISSED_BEATS * 1e6))}
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.spec.command,
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    cwd=ROOT, env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._close()
                raise ChildFailed(f"{self.name} cannot be started ({error})", severity=0) from None
        self._pid_path.write_text(f"{self._process.pid}\n")
        self._watch = asyncio.ensure_future(self._until_end(self._process))

    async def until_ready(self) -> None:
        """Return once the process says READY=1. ChildFailed if it ends before."""
        await first_of(self.ready, self.ended)
        if self.ended.is_set():
            raise self.failure()

    def failure(self) -> ChildFailed:
        """Why it is not there: its `error: …` line where it left one, else its exit code and its log's last line."""
        told = self.status.removeprefix("error: ")
        if self.code is None:
            cause = f"is not ready{f': {told}' if told else ''}"
        elif self._silent:
            cause = f"hung: it was silent for {BEAT_S * MISSED_BEATS:g} s and was killed"
        elif self.code < 0:
            cause = f"was killed by {signal.Signals(-self.code).name}"
        elif told:
            cause = f"failed: {told}"
        else:
            cause = f"exited with code {self.code}" + (f" after {last!r}" if (last := self._last_line()) else "")
        severity = {EXIT_CONFIG: 0, EXIT_ENGINE_LOST: 2}.get(self.code or 0, 1)
        return ChildFailed(f"{self.name} {cause}; its log is {self._log}", severity)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when the grace is over. Returns when it is gone."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.spec.grace):
                await self._gone()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the whole process group. Returns when the process is gone."""
        self.signal(signal.SIGKILL)
        await self._gone()

    def signal(self, number: int) -> None:
        if self._process is not None and not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _gone(self) -> None:
        if self._watch is not None:
            await asyncio.shield(self._watch)

    async def _until_end(self, process: asyncio.subprocess.Process) -> None:
        watchdogs = [asyncio.ensure_future(self._kill_when_silent())]
        if self.spec.probe is not None:
            watchdogs.append(asyncio.ensure_future(self._beat_by(self.spec.probe)))
        code = await process.wait()
        for watchdog in watchdogs:
            watchdog.cancel()
        await asyncio.gather(*watchdogs, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):  # what it started itself goes with it
            os.killpg(process.pid, signal.SIGKILL)
        self._read_notifications()
        self._close()
        self._pid_path.unlink(missing_ok=True)
        self.code = code
        self.ended.set()

    async def _kill_when_silent(self) -> None:
        await self._beat.wait()
        missed = 0
        while missed < MISSED_BEATS:
            self._beat.clear()
            try:
                async with asyncio.timeout(BEAT_S):
                    await self._beat.wait()
                missed = 0
            except TimeoutError:
                missed += 1
        self._silent = True
        self.signal(signal.SIGKILL)

    async def _beat_by(self, probe: Callable[[], Awaitable[None]]) -> None:
        """Ask the program, and beat for it when it answers."""
        await self.ready.wait()
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await probe()
                self._beat.set()
            await asyncio.sleep(BEAT_S / 2)

    def _listen(self) -> None:
        self._notify_path.unlink(missing_ok=True)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._notify.bind(str(self._notify_path))
        asyncio.get_running_loop().add_reader(self._notify.fileno(), self._read_notifications)

    def _read_notifications(self) -> None:
        while self._notify is not None:
            try:
                message = self._notify.recv(65536).decode(errors="replace")
            except BlockingIOError:
                return
            for line in message.splitlines():
                if line == "READY=1":
                    self.ready.set()
                elif line == "WATCHDOG=1":
                    self._beat.set()
                elif line.startswith("STATUS="):
                    self.status = line.removeprefix("STATUS=")

    def _close(self) -> None:
        if self._notify is not None:
            asyncio.get_running_loop().remove_reader(self._notify.fileno())
            self._notify.close()
            self._notify = None
            self._notify_path.unlink(missing_ok=True)

    def _last_line(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, self._log.stat().st_size - TAIL_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
