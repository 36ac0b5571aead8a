"""The thread that moves frames: it copies pieces out of the pools and sends them, receives pieces and copies them into the
pools, and drives UCX meanwhile. One thread for all of it, so that a piece that has come is copied on by who saw it come.

The loop hands it effects of the session and hears of their end by events; between them lie no turns of the loop. Links take
turns, and one holds at most LANES pieces of a sender's staging memory, so that a slow peer holds up nobody else.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from services.kvtransfer.frames import CacheMemory, Copy
from services.kvtransfer.messages import Link, Receive, Received, Send, Sent
from services.kvtransfer.pieces import SEAL_BYTES, Piece, places, room_of
from services.kvtransfer.transport import Endpoint, Transfer, Transport, TransportError

LANES = 8  # pieces of one link under way at once
JOIN_S = 5.0
ABORTED = TransportError("the endpoint was aborted", peer_gone=True)

Command = Callable[[], None]


@dataclass(slots=True, eq=False)
class Sending:
    """A frame on its way out, and its pieces that are not on the wire yet."""

    effect: Send
    rest: deque[tuple[int, Piece]]  # number in the frame
    in_flight: int = 0
    error: TransportError | None = None


@dataclass(slots=True, eq=False)
class Lane:
    """One piece on its way out, and where in staging memory it lies. It is on the wire once its copy is over."""

    frame: Sending
    slot: int
    tag: int
    length: int  # with its seal
    copy: Copy
    transfer: Transfer | None = None


@dataclass(slots=True, eq=False)
class Receiving:
    """A frame on its way in, and what of it has not come yet, in order."""

    effect: Receive
    rest: deque[tuple[Transfer, int, int, Piece]]  # place in staging memory, tag
    copies: deque[Copy] = field(default_factory=deque[Copy])  # of what has come
    intact: bool = True
    error: TransportError | None = None


@dataclass(slots=True, eq=False)
class Line:
    """A link that carries frames. `tags`: link id and epoch, the high half of every tag."""

    endpoint: Endpoint
    tags: int
    sends: deque[Sending] = field(default_factory=deque[Sending])  # with pieces to send
    lanes: list[Lane] = field(default_factory=list[Lane])
    receives: list[Receiving] = field(default_factory=list[Receiving])
    over: bool = False

    def tag(self, seq: int, number: int) -> int:
        return self.tags | (seq + number) & 0xFFFF_FFFF


class Mover:
    """`connect`, `do` and `abort` are the loop's. What `post` gets is Sent and Received; `failed` gets what must not be."""

    def __init__(
        self,
        transport: Transport,
        memory: CacheMemory,
        staging_bytes: int,
        frame_room: int,
        piece_bytes: int,
        post: Callable[[Any], None],
        failed: Callable[[Any, Exception], None],
    ):
        """`piece_bytes`: of the longest piece, whose slots this end sends from; `frame_room` of the frames that it receives."""
        self._transport, self._memory, self._frame_room = transport, memory, frame_room
        self._post, self._failed = post, failed
        self._loop = asyncio.get_running_loop()
        slot = room_of(piece_bytes)
        self._slots = [at * slot for at in range(staging_bytes // slot)][::-1]  # the last one used is warm, and the next
        self._lines: dict[Link, Line] = {}
        self._over: list[Line] = []  # aborted, with pieces that UCX has not let go of
        self._commands: deque[Command] = deque()
        self._events: list[Sent | Received] = []
        self._under_way = 0
        self._closing = False
        self._thread = Thread(target=self._run, name="mover", daemon=True)
        self._thread.start()

    @property
    def transfers(self) -> int:
        """Frames that are not done with."""
        return self._under_way

    # ---- the loop's side
    async def connect(self, link: Link, address: bytes, tags: int) -> None:
        """Frames can go over the link from now on. TransportError if UCX does not reach the peer."""
        made: asyncio.Future[None] = self._loop.create_future()

        def connect() -> None:
            try:
                self._lines[link] = Line(self._transport.connect(address), tags)
            except TransportError as error:
                self._call(_settle, made, error)
            else:
                self._call(_settle, made, None)

        self._command(connect)
        await made

    def do(self, effect: Send | Receive) -> None:
        self._under_way += 1
        self._command(lambda: self._send(effect) if isinstance(effect, Send) else self._receive(effect))

    async def abort(self, link: Link) -> None:
        """Fence the link: what is under way on it ends, and from then on nothing of it is copied into the pools."""
        done: asyncio.Future[None] = self._loop.create_future()

        def abort() -> None:
            line = self._lines.pop(link, None)
            if line is not None:
                self._fence(line)
            self._call(_settle, done, None)

        self._command(abort)
        await done

    def close(self) -> None:
        """The thread ends. No link is open any more."""

        def close() -> None:
            self._closing = True

        self._command(close)
        self._thread.join(JOIN_S)

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        self._transport.ring()

    # ---- the thread
    def _run(self) -> None:
        self._memory.enter()
        waiting_since = 0.0
        while not self._closing:
            moved = self._obey()
            moved |= self._transport.progress()
            for line in (*self._lines.values(), *self._over):
                moved |= self._guard(self._move, line)
            self._tell()
            if moved:
                waiting_since = time.perf_counter()
            elif not self._under_way or time.perf_counter() > waiting_since + self._transport.patience:
                self._transport.rest()

    def _obey(self) -> bool:
        obeyed = False
        while self._commands:
            self._guard(self._commands.popleft())
            obeyed = True
        return obeyed

    def _guard(self, step: Callable[..., Any], *arguments: Any) -> bool:
        try:
            return bool(step(*arguments))
        except Exception as error:  # of a copy, say: what the pools hold is unknown
            self._call(self._failed, step, error)
            return False

    def _move(self, line: Line) -> bool:
        """One piece at most in each direction, so that UCX has its turn."""
        moved = self._advance(line) | self._pack_piece(line) | self._take_piece(line)
        if line.over and not line.lanes and not line.receives:
            self._over.remove(line)
        return moved

    def _tell(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._call(self._deliver, events)

    def _deliver(self, events: list[Sent | Received]) -> None:
        for event in events:
            self._under_way -= 1
            self._post(event)

    def _call(self, method: Callable[..., None], *what: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: the agent has ended
            self._loop.call_soon_threadsafe(method, *what)

    # ---- out
    def _send(self, effect: Send) -> None:
        line = self._lines.get(effect.link)
        if line is None:
            self._events.append(Sent(effect.link, effect.seq, "the link is lost", peer_gone=True))
        else:
            line.sends.append(Sending(effect, deque(enumerate(effect.pieces))))

    def _pack_piece(self, line: Line) -> bool:
        if not line.sends or not self._slots or len(line.lanes) >= LANES:
            return False
        frame, slot = line.sends[0], self._slots.pop()
        number, piece = frame.rest.popleft()
        if not frame.rest:
            line.sends.popleft()
        tag = line.tag(frame.effect.seq, number)
        lane = Lane(frame, slot, tag, piece.length + SEAL_BYTES, self._memory.pack(slot, piece, tag))
        frame.in_flight += 1
        line.lanes.append(lane)
        self._advance_lane(line, lane)
        return True

    def _advance(self, line: Line) -> bool:
        moved = False
        for lane in list(line.lanes):
            moved |= self._advance_lane(line, lane)
        return moved

    def _advance_lane(self, line: Line, lane: Lane) -> bool:
        """Send what is packed, and let go of what UCX has sent."""
        if lane.transfer is None:
            if not lane.copy.completed:
                return False
            try:
                lane.transfer = line.endpoint.send(lane.tag, self._memory.buffer(lane.slot, lane.length))
            except TransportError as error:
                self._leave(line, lane, error)
            return True
        if not lane.transfer.completed:
            return False
        try:
            self._transport.check(lane.transfer)
        except TransportError as error:
            self._leave(line, lane, error)
        else:
            self._leave(line, lane)
        return True

    def _leave(self, line: Line, lane: Lane, error: TransportError | None = None) -> None:
        line.lanes.remove(lane)
        self._slots.append(lane.slot)
        lane.frame.in_flight -= 1
        if error is not None:
            self._stop_sending(line, lane.frame, error)
        else:
            self._tell_if_sent(lane.frame)

    def _stop_sending(self, line: Line, frame: Sending, error: TransportError) -> None:
        """What of the frame is not on the wire stays here."""
        if frame.rest:
            line.sends.remove(frame)
            frame.rest.clear()
        frame.error = frame.error or error
        self._tell_if_sent(frame)

    def _tell_if_sent(self, frame: Sending) -> None:
        if not frame.rest and not frame.in_flight:
            self._events.append(Sent(frame.effect.link, frame.effect.seq, *_cause(frame.error)))

    # ---- in
    def _receive(self, effect: Receive) -> None:
        line = self._lines.get(effect.link)
        if line is None:
            self._events.append(Received(effect.frame, False, "the link is lost", peer_gone=True))
            return
        frame = Receiving(effect, deque())
        first = effect.frame * self._frame_room
        try:
            for number, (place, piece) in enumerate(zip(places(effect.pieces), effect.pieces, strict=True)):
                at, tag = first + place, line.tag(effect.seq, number)
                transfer = line.endpoint.receive(tag, self._memory.buffer(at, piece.length + SEAL_BYTES))
                frame.rest.append((transfer, at, tag, piece))
        except TransportError as error:
            frame.error = error
        line.receives.append(frame)
        self._tell_if_received(line, frame)

    def _take_piece(self, line: Line) -> bool:
        """Copy the next piece that has come into the pools, and see which copies are over."""
        for frame in line.receives:
            came = bool(frame.rest) and frame.rest[0][0].completed
            if came:
                self._take(line, frame, *frame.rest.popleft())
            copied = bool(frame.copies) and frame.copies[0].completed
            if copied:
                frame.intact &= frame.copies.popleft().intact
            if came or copied:
                self._tell_if_received(line, frame)
                return True
        return False

    def _take(self, line: Line, frame: Receiving, transfer: Transfer, at: int, tag: int, piece: Piece) -> None:
        try:
            self._transport.check(transfer)
        except TransportError as error:
            frame.error = frame.error or error
        else:
            if line.over:
                frame.error = frame.error or ABORTED
            else:
                frame.copies.append(self._memory.unpack(at, piece, tag))

    def _tell_if_received(self, line: Line, frame: Receiving) -> None:
        if not frame.rest and not frame.copies:
            line.receives.remove(frame)
            self._events.append(Received(frame.effect.frame, frame.intact, *_cause(frame.error)))

    # ---- the end of a link
    def _fence(self, line: Line) -> None:
        """Nothing new goes over it, and what UCX still holds of it ends now."""
        line.endpoint.abort()
        line.over = True
        self._over.append(line)
        for frame in list(line.sends):
            self._stop_sending(line, frame, ABORTED)


def _cause(error: TransportError | None) -> tuple[str | None, bool]:
    return (None, False) if error is None else (str(error), error.peer_gone)


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if not future.done():
        future.set_exception(error) if error is not None else future.set_result(None)
