"""The blocking client: the asyncio client on one loop thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from k3mesh.client import Client, Event, Inspection, Model, SamplingParams, Stream

T = TypeVar("T")


class SyncClient:
    """As k3mesh.client.Client, for code without an event loop. Safe to use from several threads."""

    def __init__(self, address: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="k3mesh-client", daemon=True)
        self._thread.start()
        self._client = self._wait(self._connect(address))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> "SyncStream":
        """See Client.submit."""
        return SyncStream(self._wait(self._client.submit(prompt, sampling, request_id=request_id, timeout=timeout)), self._loop)

    def cancel(self, request_id: str, reason: str = "cancelled by the client") -> bool:
        """See Client.cancel."""
        return self._wait(self._client.cancel(request_id, reason))

    def describe(self) -> Model:
        """See Client.describe."""
        return self._wait(self._client.describe())

    def inspect(self, service: str = "prefill-scheduler", address: str | None = None) -> Inspection:
        """See Client.inspect."""
        return self._wait(self._client.inspect(service, address))

    def close(self) -> None:
        """End all streams and connections, and the loop's thread."""
        if self._loop.is_running():
            self._wait(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _connect(self, address: str) -> Client:
        return Client(address)


class SyncStream:
    """One request's events, blocking. See k3mesh.client.Stream."""

    def __init__(self, stream: Stream, loop: asyncio.AbstractEventLoop):
        self.request_id = stream.request_id
        self._stream = stream
        self._loop = loop

    def __iter__(self) -> Iterator[Event]:
        events = aiter(self._stream)
        while True:
            event = asyncio.run_coroutine_threadsafe(_next(events), self._loop).result()
            if event is None:
                return
            yield event

    def cancel(self) -> None:
        """See Stream.cancel."""
        asyncio.run_coroutine_threadsafe(self._stream.cancel(), self._loop).result()


async def _next(events: Any) -> Event | None:
    return await anext(events, None)
