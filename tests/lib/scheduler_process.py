"""A scheduler's main() as a task of the test, and what a person can ask it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3mesh.client import Client
from services.contracts.arguments import SchedulerArguments
from services.runtime.channels import open_channel
from services.runtime.process import Process
from tests.lib.ranks import free_address
from tests.lib.redis_server import RedisServer

PATIENCE_S = 20


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


class RunningScheduler:
    """`await ready()` before use, `await stop()` after."""

    service: str  # its full name
    stub_type: Any

    def __init__(self, main: Callable[[Process, SchedulerArguments], Awaitable[None]], flags: dict[str, str]):
        self.life = Process()
        self.address = free_address()
        flags = {"model": "/nowhere/k3", "listen": self.address, "startup-timeout": "10"} | flags
        arguments = SchedulerArguments.parse([item for name, value in flags.items() for item in (f"--{name}", value)])
        self.task = asyncio.ensure_future(main(self.life, arguments))
        self.channel = open_channel(self.address)
        self.stub = self.stub_type(self.channel)
        self.client = Client(self.address)

    async def ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self.is_serving():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def is_serving(self) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=self.service))
        except grpc.aio.AioRpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    async def inspect(self) -> Any:
        return await self.client.inspect()

    async def counters(self) -> dict[str, int]:
        return (await self.inspect()).counters

    async def at_rest(self) -> None:
        """Nothing is counted any more but what the prefix cache keeps for others."""
        async with asyncio.timeout(PATIENCE_S):
            while any(value for name, value in (await self.counters()).items() if not name.startswith("cached_")):
                await asyncio.sleep(0.01)

    async def ended(self) -> BaseException | None:
        """How main() ended."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait([self.task])
        error = self.task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return error

    async def stop(self) -> None:
        await self.client.close()
        self.life.stopping.set()
        await asyncio.wait([self.task], timeout=PATIENCE_S)
        await self.channel.close()


def log_of(journal: RedisServer, request_id: str) -> list[dict[str, str]]:
    with journal.client() as client:
        entries: Any = client.xrange(f"k3:req:{request_id}:log")
        return [fields for _, fields in entries]
