"""The clients' token streams: one for a single request (Attach), or one for all of a client's requests (Follow)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any, Protocol

from k3mesh.v1 import request_pb2
from services.contracts.ids import RequestId, Room, Token
from services.runtime.telemetry import log
from services.scheduler.decode import events as ev
from services.scheduler.decode import wire
from services.scheduler.streams import Outbox

Post = Callable[[Any], None]


class Sink(Protocol):
    """Where what a client is to get goes."""

    def tokens(self, tokens: tuple[Token, ...]) -> None: ...

    def end(self, end: ev.End) -> None: ...


class Clients:
    """Those who follow a request. The planner decides what each of them gets, and when it ends."""

    def __init__(self, post: Post):
        self._post = post
        self._numbers = count(1)
        self._sinks: dict[ev.Client, Sink] = {}
        self._shared: set[Outbox[wire.Followed]] = set()

    def __len__(self) -> int:
        return len(self._sinks)

    async def attach(self, request: request_pb2.AttachRequest, context: Any) -> AsyncIterator[request_pb2.RequestEvent]:
        """One request's events, to its end."""
        alone = _Alone()
        client = self._join(alone, request)
        context.add_done_callback(lambda _: self._leave(client))  # a client that leaves is noticed here, wherever we wait
        async for event in alone.outbox.sending():
            yield event

    async def follow(
        self, requests: AsyncIterator[request_pb2.FollowRequest], context: Any
    ) -> AsyncIterator[request_pb2.FollowEvents]:
        """Events of all requests that the stream attaches to, to its end: one message for all that wait."""
        outbox = Outbox[wire.Followed]()
        self._shared.add(outbox)
        clients: dict[Room, ev.Client] = {}

        def leave_all(_: Any) -> None:
            for client in clients.values():
                self._leave(client)

        context.add_done_callback(leave_all)
        reader = asyncio.ensure_future(self._read(requests, outbox, clients))
        try:
            async for burst in outbox.bursts():
                yield wire.follow_events(burst)
        finally:
            self._shared.discard(outbox)
            reader.cancel()
            await asyncio.wait([reader])

    def close(self) -> None:
        """End the streams that many requests share, when what was sent is out; the others end with their request."""
        for outbox in self._shared:
            outbox.close()

    async def _read(
        self,
        requests: AsyncIterator[request_pb2.FollowRequest],
        outbox: Outbox[wire.Followed],
        clients: dict[Room, ev.Client],
    ) -> None:
        try:
            async for message in requests:
                match message.WhichOneof("message"):
                    case "attach":
                        room = Room(message.attach.room)
                        clients[room] = self._join(_OneOfMany(outbox, room, clients), message.attach)
                    case "leave":
                        client = clients.pop(Room(message.leave), None)
                        if client is not None:
                            self._leave(client)
                    case _:
                        continue
        except Exception as error:
            log.warning("a client's stream broke", error=repr(error))
        finally:
            outbox.close()

    # ---- effects
    def tokens(self, effect: ev.PublishTokens) -> None:
        for client, tokens in effect.said:
            sink = self._sinks.get(client)
            if sink is not None:
                sink.tokens(tokens)

    def end(self, effect: ev.PublishEnd) -> None:
        sink = self._sinks.pop(effect.client, None)
        if sink is not None:
            sink.end(effect.end)

    def _join(self, sink: Sink, request: request_pb2.AttachRequest) -> ev.Client:
        client = ev.Client(next(self._numbers))
        self._sinks[client] = sink
        self._post(ev.ClientAttached(client, RequestId(request.request_id), Room(request.room)))
        return client

    def _leave(self, client: ev.Client) -> None:
        if self._sinks.pop(client, None) is not None:
            self._post(ev.ClientGone(client))


class _Alone:
    """A stream of its own."""

    def __init__(self) -> None:
        self.outbox = Outbox[request_pb2.RequestEvent]()

    def tokens(self, tokens: tuple[Token, ...]) -> None:
        self.outbox.put(wire.tokens_event(tokens))

    def end(self, end: ev.End) -> None:
        last = wire.end_event(end)
        if last is not None:
            self.outbox.put(last)
        self.outbox.close()


class _OneOfMany:
    """One request of a stream that many share."""

    def __init__(self, outbox: Outbox[wire.Followed], room: Room, clients: dict[Room, ev.Client]):
        self._outbox, self._room, self._clients = outbox, room, clients

    def tokens(self, tokens: tuple[Token, ...]) -> None:
        self._outbox.put((self._room, tokens))

    def end(self, end: ev.End) -> None:
        self._outbox.put((self._room, end))
        self._clients.pop(self._room, None)
