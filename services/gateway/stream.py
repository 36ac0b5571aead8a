"""Server-sent events to a client that may be slow."""

import asyncio
from typing import Any

import orjson
from starlette.types import Send

from k3mesh.errors import Cancelled

PART_BYTES = 64 << 10  # of one write
STALL_TIMEOUT_S = 60.0  # without a byte taken
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not collect chunks
]


class EventStream:
    """Events go in at once by `put`; `run` sends them as fast as the client takes them.

    The response starts with the first event, so that an error before it still has an HTTP status of its own. Decode cannot
    pause for one client, so what the client does not take yet is kept here, up to `max_buffered` bytes.
    """

    def __init__(self, max_buffered: int, stall_timeout: float = STALL_TIMEOUT_S):
        self.started = False
        self._max_buffered = max_buffered
        self._stall_timeout = stall_timeout
        self._pending = bytearray()
        self._closed = False
        self._wake = asyncio.Event()

    def put(self, event: dict[str, Any]) -> None:
        """Cancelled if the client is too far behind."""
        if len(self._pending) > self._max_buffered:
            raise Cancelled(f"the client reads too slowly: {len(self._pending)} bytes wait for it")
        self.started = True
        self._pending += b"data: %b\n\n" % orjson.dumps(event)
        self._wake.set()

    def done(self) -> None:
        """The answer is complete."""
        self._pending += b"data: [DONE]\n\n"
        self._close()

    def fail(self, event: dict[str, Any]) -> None:
        """The answer ends here, with this error."""
        self._pending += b"data: %b\n\n" % orjson.dumps(event)
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._wake.set()

    async def run(self, send: Send) -> None:
        """Send until the answer is complete or has failed, all but the response's end.

        Cancelled if the client takes nothing for the stall timeout.
        """
        await self._wake.wait()
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": HEADERS})
        while self._pending or not self._closed:
            if not self._pending:
                await self._wake.wait()
            self._wake.clear()
            if self._pending:
                part = bytes(self._pending[:PART_BYTES])
                del self._pending[:PART_BYTES]
                await self._send(send, {"type": "http.response.body", "body": part, "more_body": True})

    async def end(self, send: Send) -> None:
        """The response's end, after `run`."""
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout):
                await send(message)
        except TimeoutError:
            raise Cancelled(f"the client took nothing for {self._stall_timeout:g} s") from None
