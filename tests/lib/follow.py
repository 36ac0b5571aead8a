"""A decode scheduler's Follow, for peers whose script is told request by request."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from k3mesh.v1 import request_pb2

Play = Callable[[request_pb2.AttachRequest, Any], AsyncIterator[request_pb2.RequestEvent]]


class OneOfMany:
    """The context of one request on the stream."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def done(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


async def follow(play: Play, requests: AsyncIterator[request_pb2.FollowRequest]) -> AsyncIterator[request_pb2.FollowEvents]:
    """Each request that the stream attaches to is played by itself, until the client leaves it or the stream."""
    out: asyncio.Queue[request_pb2.FollowEvents | Exception | None] = asyncio.Queue()
    playing: dict[int, tuple[OneOfMany, asyncio.Task[None]]] = {}

    async def one(asked: request_pb2.AttachRequest, context: OneOfMany) -> None:
        end = request_pb2.FollowEnd(room=asked.room)
        try:
            async for event in play(asked, context):
                if event.HasField("tokens"):
                    tokens = event.tokens.tokens
                    out.put_nowait(request_pb2.FollowEvents(rooms=[asked.room], counts=[len(tokens)], tokens=tokens))
                elif event.HasField("finished") or event.HasField("failure"):
                    end.last.CopyFrom(event)
            out.put_nowait(request_pb2.FollowEvents(ends=[end]))
        except Exception as error:
            out.put_nowait(error)
        context.done()

    async def read() -> None:
        async for message in requests:
            if message.HasField("attach"):
                context = OneOfMany()
                playing[message.attach.room] = context, asyncio.ensure_future(one(message.attach, context))
            elif message.leave in playing:
                context, task = playing.pop(message.leave)
                task.cancel()
                context.done()
        out.put_nowait(None)

    reader = asyncio.ensure_future(read())
    try:
        while (events := await out.get()) is not None:
            if isinstance(events, Exception):
                raise events
            yield events
    finally:
        reader.cancel()
        for context, task in playing.values():
            task.cancel()
            context.done()
        await asyncio.wait([reader, *(task for _, task in playing.values())])
