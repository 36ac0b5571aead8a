"""The mover as the agent's loop sees it: a process that moves frames, and a socket to it (mover_line).

The loop hands it effects of the session and hears of their end by events. What is said in one turn of the loop goes out in one
write.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from k3mesh.errors import EngineLost, Internal, MeshError
from services.kvtransfer.local import Export
from services.kvtransfer.messages import Link, Receive, Received, Send, Sent
from services.kvtransfer.mover_line import (
    Abort,
    Aborted,
    Connect,
    Connected,
    Event,
    Open,
    Opened,
    Order,
    Refused,
    Troubled,
    Unpacker,
    pack,
)
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import TransportError
from services.runtime.telemetry import log

PROGRAM = ("services.kvtransfer.mover_main",)
JOIN_S = 5.0


class Mover:
    """`start` it, `open` the pools, `watch` it; `connect`, `do` and `abort` links, `close` it."""

    def __init__(self, process: asyncio.subprocess.Process, line: socket.socket):
        self._process, self._socket = process, line
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._post: Callable[[Any], None]
        self._answer: float
        self._opened: asyncio.Future[Opened] = self._loop.create_future()
        self._connecting: dict[Link, asyncio.Future[None]] = {}
        self._aborting: dict[Link, asyncio.Future[None]] = {}
        self._under_way = 0
        self._closing = False
        self._over: asyncio.Future[None] = self._loop.create_future()  # holds why
        self._ending = asyncio.ensure_future(self._until_end())

    @classmethod
    async def start(cls, program: Sequence[str]) -> "Mover":
        """`program`: a module and its arguments. The process makes ready while the agent waits for its worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        module, *arguments = program
        environment = {name: value for name, value in os.environ.items() if name not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(theirs.fileno()), *arguments),
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a signal to the agent's group is the agent's, which has links to end first
                env=environment | {"K3MESH_PARENT": str(os.getpid())},
            )
        return cls(process, ours)

    @property
    def transfers(self) -> int:
        """Frames that are not done with."""
        return self._under_way

    async def open(self, export: Export, limits: Limits, post: Callable[[Any], None], timeout: float) -> Opened:
        """Have the worker's memory opened; `post` gets Sent and Received from now on. ConfigError if it cannot be, EngineLost
        if that takes more than `timeout` seconds."""
        self._post, self._answer = post, limits.answer
        order = pack(Open(export.message, limits.frame_bytes, limits.frames, limits.piece_bytes))
        sent = socket.send_fds(self._socket, [order], export.descriptors)
        transport, _ = await self._loop.create_unix_connection(lambda: _Events(self._take), sock=self._socket)
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(order[sent:])
        try:
            async with asyncio.timeout(timeout):
                return await self._opened
        except TimeoutError:
            raise EngineLost(f"this agent's mover did not open the pools within {timeout:g} s; see the log") from None

    async def connect(self, link: Link, address: bytes, tags: int) -> None:
        """Frames can go over the link from now on. TransportError if UCX does not reach the peer."""
        await self._answered(self._connecting, link, Connect(link, tags, address))

    def do(self, effect: Send | Receive) -> None:
        self._under_way += 1
        self._say(effect)

    async def abort(self, link: Link) -> None:
        """Fence the link: what is under way on it ends, and from then on nothing of it is copied into the pools."""
        with suppress(TransportError):  # the mover has ended, and all with it
            await self._answered(self._aborting, link, Abort(link))

    async def watch(self) -> None:
        """Ends by Internal when the mover does, or is in trouble."""
        await asyncio.shield(self._over)

    async def close(self) -> None:
        """The process ends. No link is open any more."""
        self._closing = True
        self._transport.close() if self._transport is not None else self._socket.close()
        try:
            async with asyncio.timeout(JOIN_S):
                await asyncio.shield(self._ending)
        except TimeoutError:
            self._process.kill()
            await self._ending

    # ---- orders
    def _say(self, order: Order) -> None:
        if self._transport is not None and not self._over.done():
            self._transport.write(pack(order))

    async def _answered(self, waiting: dict[Link, asyncio.Future[None]], link: Link, order: Order) -> None:
        """TransportError if the answer is one, or if the mover ends first."""
        answer = waiting[link] = self._loop.create_future()
        if self._over.done():
            _settle(answer, TransportError("this agent's mover is gone"))
        self._say(order)
        try:
            async with asyncio.timeout(self._answer):
                await answer
        except TimeoutError:
            error = Internal(f"this agent's mover did not answer within {self._answer:g} s; the engine must restart")
            self._end(error)
            raise TransportError(error.message) from None
        finally:
            waiting.pop(link, None)

    # ---- events
    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Sent() | Received():
                    self._under_way -= 1
                    self._post(event)
                case Connected(link, error):
                    _settle(self._connecting.get(link), TransportError(error) if error is not None else None)
                case Aborted(link):
                    _settle(self._aborting.get(link))
                case Troubled(error):
                    self._end(Internal(f"moving frames failed: {error}; the log has the traceback"))
                case Opened():
                    self._opened.set_result(event)
                case Refused(failure):
                    self._opened.set_exception(failure.error())

    # ---- the end
    async def _until_end(self) -> None:
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if not self._closing:
            log.error("the mover is gone", how=how)
        self._end(Internal(f"this agent's mover {how}; the engine must restart"))

    def _end(self, error: MeshError) -> None:
        """Nothing more is heard of it: all who wait for it have their answer. The first reason counts."""
        if self._over.done():
            return
        self._over.set_exception(error)
        self._over.exception()  # seen, whether or not watch() runs
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()
        for waiting in (*self._connecting.values(), *self._aborting.values()):
            _settle(waiting, TransportError(error.message))


class _Events(asyncio.Protocol):
    """The socket's end in the loop."""

    def __init__(self, take: Callable[[Sequence[Event]], None]):
        self._take, self._unpacker = take, Unpacker()

    def data_received(self, data: bytes) -> None:
        self._take(self._unpacker.feed(data))  # pyright: ignore[reportArgumentType] (it is the mover who speaks)


def _settle(future: asyncio.Future[None] | None, error: Exception | None = None) -> None:
    if future is not None and not future.done():
        future.set_exception(error) if error is not None else future.set_result(None)
