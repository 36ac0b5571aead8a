"""The life of one service process: arguments, loop, signals, readiness, exit codes."""

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import uvloop

from k3mesh.errors import ConfigError, EngineLost, MeshError
from services.runtime.telemetry import configure_logging, log

EXIT_FAILED, EXIT_CONFIG, EXIT_ENGINE_LOST = 1, 2, 3
PR_SET_PDEATHSIG = 1
COLLECT_EVERY = (20_000, 20, 50)  # objects, then collections of the generation before: rounds make few cycles, many objects
BEATS_PER_WATCHDOG = 4  # what a watched process says within the time that its supervisor waits for one


class Arguments(Protocol):
    @classmethod
    def parse(cls, argv: list[str]) -> Any: ...


class Process:
    """What a service's main() gets: when to stop, and a way to say that it is ready."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()

    def ready(self) -> None:
        """Tell the supervisor (sd_notify: systemd's Type=notify, or `k3mesh up`), and from now on that the loop turns."""
        log.info("ready")
        rare_collections()
        _notify("READY=1")
        if watchdog := int(os.environ.get("WATCHDOG_USEC") or 0):
            self._beat(watchdog / 1e6 / BEATS_PER_WATCHDOG)

    def _beat(self, period: float) -> None:
        _notify("WATCHDOG=1")
        asyncio.get_running_loop().call_later(period, self._beat, period)


def rare_collections() -> None:
    """What was made to start is there to stay: no collection need look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)


def run(name: str, main: Callable[[Process, Any], Awaitable[None]], arguments: type[Arguments]) -> None:
    """Parse sys.argv, run main() on uvloop until it returns, exit. SIGTERM and SIGINT set `process.stopping`."""
    configure_logging(name)
    die_with_parent()
    try:
        parsed = arguments.parse(sys.argv[1:])
        uvloop.run(_run(main, parsed))
    except* MeshError as group:
        _exit(_first(group))
    except* KeyboardInterrupt:
        leave(130)
    except* Exception as group:
        log.error("crashed", exc_info=group)
        _exit(MeshError(f"{name} crashed: {_first(group)!r}; its log has the traceback"))
    leave(0)


async def _run(main: Callable[[Process, Any], Awaitable[None]], parsed: Any) -> None:
    process = Process()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stopping.set)
    await main(process, parsed)


def _first(group: BaseException) -> Any:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def _exit(error: MeshError) -> None:
    """One line for the person who started this, the same line for the supervisor, and the code."""
    line = " ".join(f"error: {error.message}".split())
    print(line, file=sys.stderr, flush=True)
    _notify(f"STATUS={line}")
    codes = {ConfigError.code: EXIT_CONFIG, EngineLost.code: EXIT_ENGINE_LOST}
    leave(codes.get(error.code, EXIT_FAILED))


def leave(code: int) -> None:
    """Exit without joining foreign threads: UCX and gloo keep some that never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _notify(message: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as to_supervisor:
        try:
            to_supervisor.sendto(message.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError as error:
            log.warning("the supervisor does not listen", address=address, error=str(error))


def die_with_parent() -> None:
    """A child of the supervisor must not outlive it, however it dies."""
    parent = os.environ.get("K3MESH_PARENT")
    if not parent:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before prctl took hold
        leave(EXIT_FAILED)
