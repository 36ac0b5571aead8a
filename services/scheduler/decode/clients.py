"""The clients' token streams."""

from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

from k3mesh.v1 import request_pb2
from services.contracts.ids import RequestId, Room
from services.scheduler.decode import events as ev
from services.scheduler.decode import wire
from services.scheduler.streams import Outbox


class Clients:
    """Open Attach streams. The planner decides what each of them gets, and when it ends."""

    def __init__(self, post: Callable[[Any], None]):
        self._post = post
        self._numbers = count(1)
        self._outboxes: dict[ev.Client, Outbox[request_pb2.RequestEvent]] = {}

    def __len__(self) -> int:
        return len(self._outboxes)

    async def follow(self, request: request_pb2.AttachRequest, context: Any) -> AsyncIterator[request_pb2.RequestEvent]:
        client = ev.Client(next(self._numbers))
        outbox = self._outboxes[client] = Outbox[request_pb2.RequestEvent]()
        context.add_done_callback(lambda _: self._gone(client))  # a client that leaves is noticed here, wherever we wait
        self._post(ev.ClientAttached(client, RequestId(request.request_id), Room(request.room)))
        async for event in outbox.sending():
            yield event

    # ---- effects
    def tokens(self, effect: ev.PublishTokens) -> None:
        outbox = self._outboxes.get(effect.client)
        if outbox is not None:
            outbox.put(wire.tokens_event(effect.tokens))

    def end(self, effect: ev.PublishEnd) -> None:
        outbox = self._outboxes.get(effect.client)
        if outbox is None:
            return
        last = wire.end_event(effect.end)
        if last is not None:
            outbox.put(last)
        outbox.close()

    def _gone(self, client: ev.Client) -> None:
        if self._outboxes.pop(client, None) is not None:
            self._post(ev.ClientGone(client))
