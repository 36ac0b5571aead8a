"""The two ends of a gRPC stream as the schedulers use them: what it serves (Outbox) and what it opens (Drive)."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, NoReturn, TypeVar

import grpc.aio

from k3mesh.errors import EngineLost, MeshError
from services.runtime.channels import translate

WRITE_S = 30.0  # a peer that takes no message for this long is gone
EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
Message = TypeVar("Message")
Taken = TypeVar("Taken")


class Outbox(Generic[Message]):
    """What a served stream still has to send."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, message: Message) -> None:
        if not self._closed:
            self._messages.append(message)
            self._wake.set()

    def close(self) -> None:
        """The stream ends when what was put is sent."""
        self._closed = True
        self._wake.set()

    async def sending(self) -> AsyncIterator[Message]:
        """Messages until closed. Whoever holds up one of them for WRITE_S seconds has its stream's task cancelled."""
        async for message in self._sending(self._messages.popleft):
            yield message

    async def bursts(self) -> AsyncIterator[list[Message]]:
        """Likewise, but all that wait at once."""
        async for messages in self._sending(self._take_all):
            yield messages

    def _take_all(self) -> list[Message]:
        messages = list(self._messages)
        self._messages.clear()
        return messages

    async def _sending(self, take: Callable[[], Taken]) -> AsyncIterator[Taken]:
        task = asyncio.current_task()
        assert task is not None
        while True:
            if self._messages:
                alarm = asyncio.get_running_loop().call_later(WRITE_S, task.cancel)
                try:
                    yield take()
                finally:
                    alarm.cancel()
            elif self._closed:
                return
            else:
                self._wake.clear()
                await self._wake.wait()


class Drive:
    """An open stream to a worker leader or an agent: commands out in order, reports in. Whatever breaks it is EngineLost:
    the peer belongs to this engine, and there is no engine without it."""

    def __init__(self, peer: str, call: Any):
        self.peer = peer
        self._call = call
        self._commands: asyncio.Queue[Any] = asyncio.Queue()

    async def introduce(self, command: Any) -> Any:
        """Send the first command -> the peer's first report. The caller sets the deadline."""
        try:
            await self._call.write(command)
            return await self._read()
        except grpc.aio.AioRpcError as error:
            raise self._lost(translate(error, self.peer)) from error

    def send(self, command: Any) -> None:
        self._commands.put_nowait(command)

    async def write(self) -> NoReturn:
        """Send what `send` queues. EngineLost if the peer takes no command for WRITE_S seconds."""
        while True:
            command = await self._commands.get()
            try:
                async with asyncio.timeout(WRITE_S):
                    await self._call.write(command)
            except TimeoutError as error:
                raise self._lost(EngineLost(f"it takes no command for {WRITE_S:g} s")) from error
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await asyncio.Event().wait()  # read() meets the same end, and knows the reason

    async def reports(self) -> AsyncIterator[Any]:
        """Reports as they come. Ends by EngineLost only."""
        while True:
            try:
                yield await self._read()
            except grpc.aio.AioRpcError as error:
                raise self._lost(translate(error, self.peer)) from error

    def cancel(self) -> None:
        self._call.cancel()

    async def _read(self) -> Any:
        message = await self._call.read()
        if message is EOF:
            raise self._lost(EngineLost("its stream ended"))
        return message

    def _lost(self, error: MeshError) -> EngineLost:
        return EngineLost(f"{self.peer} is lost: {error.message}", detail=error.detail or error.code)
