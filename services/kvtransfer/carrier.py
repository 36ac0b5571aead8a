"""What moves frames: it copies pieces out of the pools and sends them, receives pieces and copies them into the pools, and
drives UCX meanwhile. One thread for all of it, in a process of its own (mover_main): a piece that has come is copied on by who
saw it come, and no other thread holds the interpreter's lock meanwhile.

Orders come from the agent and events go back over a socket, which is looked at between pieces. Links take turns, and one holds
at most LANES pieces of a sender's staging memory, so that a slow peer holds up nobody else.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.kvtransfer.frames import CacheMemory, Copy
from services.kvtransfer.messages import Link, Receive, Received, Send, Sent
from services.kvtransfer.mover_line import Abort, Aborted, Connect, Connected, Event, MoverEnd, Order, Troubled
from services.kvtransfer.pieces import SEAL_BYTES, Piece, places, room_of
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import Endpoint, Transfer, Transport, TransportError
from services.runtime.telemetry import log

LANES = 8  # pieces of one link under way at once
TURNS = 4  # of UCX between two looks at the socket, while pieces are under way
ABORTED = TransportError("the endpoint was aborted", peer_gone=True)


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


class Carrier:
    """Obeys the agent, until that is gone. `run` is all that there is to call."""

    def __init__(self, transport: Transport, memory: CacheMemory, limits: Limits, largest_unit: int, agent: MoverEnd):
        self._transport, self._memory, self._agent = transport, memory, agent
        self._frame_room = limits.frame_room
        slot = room_of(limits.longest_piece(largest_unit))
        self._slots = [at * slot for at in range(limits.staging_bytes // slot)][::-1]  # the last one used is warm, and the next
        self._lines: dict[Link, Line] = {}
        self._over: list[Line] = []  # aborted, with pieces that UCX has not let go of
        self._events: list[Event] = []
        self._under_way = 0  # frames
        transport.watch(agent.descriptor)

    def run(self) -> None:
        """Until the agent closes its end. OSError if the agent does not listen."""
        waiting_since, turn = 0.0, 0
        while not self._agent.over:
            turn += 1
            moved = (not self._under_way or turn % TURNS == 0) and self._obey()
            moved |= self._transport.progress()
            for line in (*self._lines.values(), *self._over):
                moved |= self._guard(self._move, line)
            if self._events:
                self._tell()
            if moved:
                waiting_since = time.perf_counter()
            elif not self._under_way or time.perf_counter() > waiting_since + self._transport.patience:
                self._transport.rest()
                turn = -1  # it may be the agent who ended the rest

    def _obey(self) -> bool:
        orders = self._agent.receive()
        for order in orders:
            self._guard(self._take_order, order)
        return bool(orders)

    def _take_order(self, order: Order) -> None:
        match order:
            case Send():
                self._under_way += 1
                self._send(order)
            case Receive():
                self._under_way += 1
                self._receive(order)
            case Connect():
                self._connect(order)
            case Abort(link):
                if (line := self._lines.pop(link, None)) is not None:
                    self._fence(line)
                self._events.append(Aborted(link))

    def _connect(self, order: Connect) -> None:
        try:
            self._lines[order.link] = Line(self._transport.connect(order.address), order.tags)
        except TransportError as error:
            self._events.append(Connected(order.link, str(error)))
        else:
            self._events.append(Connected(order.link))

    def _guard(self, step: Callable[..., Any], what: Any) -> bool:
        try:
            return bool(step(what))
        except Exception as error:  # of a copy, say: what the pools hold is unknown
            log.error("moving frames failed", step=step.__name__, exc_info=error)
            self._events.append(Troubled(repr(error)))
            return False

    def _move(self, line: Line) -> bool:
        """One piece at most in each direction, so that UCX has its turn."""
        moved = self._advance(line) | self._pack_piece(line) | self._take_piece(line)
        if line.over and not line.lanes and not line.receives:
            self._over.remove(line)
        return moved

    def _tell(self) -> None:
        events, self._events = self._events, []
        self._under_way -= sum(isinstance(it, Sent | Received) for it in events)
        self._agent.tell(events)

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
