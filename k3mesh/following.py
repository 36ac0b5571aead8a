"""One stream to a decode scheduler for all the requests that a client follows there.

A round gives every request a few tokens, so a stream for each would cost a message for each. Here one message has them all.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from k3mesh.errors import Cancelled
from k3mesh.v1 import request_pb2

Happened = tuple[int, ...] | request_pb2.RequestEvent  # the next tokens, or the last event


class Followed:
    """One request on the stream. Iterate over it for what happens; the stream's own error is raised as it is."""

    def __init__(self, following: "Following", request_id: str, room: int):
        self._following, self._request_id, self._room = following, request_id, room
        self._tokens: tuple[int, ...] = ()
        self._last: request_pb2.RequestEvent | None = None
        self._error: Exception | None = None
        self._over = False
        self._wake = asyncio.Event()

    def put(self, tokens: tuple[int, ...]) -> None:
        self._tokens += tokens
        self._wake.set()

    def end(self, last: request_pb2.RequestEvent | None, error: Exception | None = None) -> None:
        """Nothing follows but `last` or the error."""
        self._last, self._error, self._over = last, error, True
        self._wake.set()

    def cancel(self) -> None:
        """Want no more of it. Whoever iterates gets Cancelled."""
        if not self._over:
            self._following.leave(self._room)
            self.end(None, Cancelled(f"{self._request_id} was cancelled"))

    async def __aiter__(self) -> AsyncIterator[Happened]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._tokens:
                tokens, self._tokens = self._tokens, ()
                yield tokens
            if self._over and not self._tokens:
                break
        if self._error is not None:
            raise self._error
        if self._last is not None:
            yield self._last


class Following:
    """The stream. `over` when it has broken: whoever is to be followed then needs a new one."""

    def __init__(self, stub: Any):
        # After the engine came back its channel may still pause between attempts; if it is gone, the prefill stream tells.
        self._call = stub.Follow(wait_for_ready=True)
        self._asked: asyncio.Queue[request_pb2.FollowRequest] = asyncio.Queue()
        self._followed: dict[int, Followed] = {}
        self._tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]

    @property
    def over(self) -> bool:
        return self._tasks[1].done()

    def follow(self, request_id: str, room: int) -> Followed:
        followed = self._followed[room] = Followed(self, request_id, room)
        attach = request_pb2.AttachRequest(request_id=request_id, room=room)
        self._asked.put_nowait(request_pb2.FollowRequest(attach=attach))
        return followed

    def leave(self, room: int) -> None:
        if self._followed.pop(room, None) is not None:
            self._asked.put_nowait(request_pb2.FollowRequest(leave=room))

    async def close(self) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write(self) -> None:
        while True:
            asked = await self._asked.get()
            try:
                await self._call.write(asked)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader meets the same end, and knows the reason

    async def _read(self) -> None:
        error: Exception | None = None
        try:
            async for events in self._call:
                self._hear(events)
        except grpc.aio.AioRpcError as broken:
            error = broken
        finally:
            self._tasks[0].cancel()
            for followed in self._followed.values():
                followed.end(None, error)
            self._followed.clear()

    def _hear(self, events: request_pb2.FollowEvents) -> None:
        tokens, start = list(events.tokens), 0
        for room, count in zip(events.rooms, events.counts, strict=True):
            followed = self._followed.get(room)
            if followed is not None:
                followed.put(tuple(tokens[start : start + count]))
            start += count
        for end in events.ends:
            followed = self._followed.pop(end.room, None)
            if followed is not None:
                followed.end(end.last if end.HasField("last") else None)
