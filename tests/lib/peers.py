"""What scripted far ends of a scheduler's streams are made of: an end that speaks and hears, and the servers for all ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from services.runtime.rpc_server import RpcServer


class Lines:
    """What one end says (`say`) and has heard (`heard`)."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self._out: asyncio.Queue[Any] = asyncio.Queue()

    def say(self, message: Any) -> None:
        self._out.put_nowait(message)

    def hang_up(self) -> None:
        self._out.put_nowait(None)

    async def serve(self, requests: AsyncIterator[Any], react: Callable[[Any], None]) -> AsyncIterator[Any]:
        async def read() -> None:
            async for message in requests:
                self.heard.append(message)
                react(message)

        self._out = asyncio.Queue()
        reader = asyncio.ensure_future(read())
        try:
            while (message := await self._out.get()) is not None:
                yield message
        finally:
            reader.cancel()
            await asyncio.wait([reader])


class Servers:
    """One gRPC server for each end."""

    def __init__(self) -> None:
        self.servers: dict[Any, RpcServer] = {}

    async def serve(self, servicer: Any, add: Any, name: str, listen: str = "127.0.0.1:0") -> str:
        """-> the address."""
        server = self.servers[servicer] = RpcServer(listen, [(add, servicer, f"k3mesh.v1.{name}")])
        await server.start()
        return server.address

    async def stop(self) -> None:
        for server in self.servers.values():
            await server.stop(0)

    def addresses(self, servicers: list[Any]) -> str:
        return ",".join(self.servers[servicer].address for servicer in servicers)
