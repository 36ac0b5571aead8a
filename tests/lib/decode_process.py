"""A decode scheduler's main() as a task of the test, and what a person can ask it."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from k3mesh.client import Client
from k3mesh.v1 import request_pb2, request_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.runtime.channels import open_channel
from services.runtime.process import Process
from services.scheduler.decode.main import main
from tests.lib.decode_peers import DecodePeers, PrefillEnd
from tests.lib.ranks import free_address
from tests.lib.redis_server import RedisServer

PATIENCE_S = 20


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


class RunningDecode:
    """`await ready()` before use, `await stop()` after."""

    def __init__(self, peers: DecodePeers, redis_url: str, **changes: str):
        self.life = Process()
        self.address = free_address()
        flags = {
            "model": "/nowhere/k3", "disaggregation-mode": "decode", "attn-tp-size": str(peers.tp_size),
            "data-parallel-size": str(peers.replicas), "max-num-seqs": "8", "max-model-len": "1024", "redis-url": redis_url,
            "listen": self.address, "startup-timeout": "10", "workers": peers.addresses(peers.workers),
            "agents": peers.addresses(peers.agents),
        } | {name.replace("_", "-"): value for name, value in changes.items()}  # fmt: skip
        arguments = SchedulerArguments.parse([item for name, value in flags.items() for item in (f"--{name}", value)])
        self.task = asyncio.ensure_future(main(self.life, arguments))
        self.channel = open_channel(self.address)
        self.stub: Any = request_pb2_grpc.DecodeSchedulerStub(self.channel)
        self.client = Client(self.address)

    async def ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self.is_serving():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def is_serving(self) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(service="k3mesh.v1.DecodeScheduler"))
        except grpc.aio.AioRpcError:
            return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    async def inspect(self) -> Any:
        return await self.client.inspect("decode-scheduler")

    async def counters(self) -> dict[str, int]:
        return (await self.inspect()).counters

    async def until_counters(self, **wanted: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not wanted.items() <= (await self.counters()).items():
                await asyncio.sleep(0.01)

    async def at_rest(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while any((await self.counters()).values()):
                await asyncio.sleep(0.01)

    async def paired(self, **changes: Any) -> PrefillEnd:
        prefill = PrefillEnd(self.stub, **changes)
        answer = await prefill.pair()
        assert answer.WhichOneof("message") == "hello", answer
        return prefill

    def attach(self, request_id: str, room: int) -> Any:
        return self.stub.Attach(request_pb2.AttachRequest(request_id=request_id, room=room))

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


async def journalled(journal: RedisServer, request_id: str, last: str) -> list[dict[str, str]]:
    await until(lambda: [entry["state"] for entry in log_of(journal, request_id)][-1:] == [last])
    return log_of(journal, request_id)


async def rest_of(call: Any) -> list[request_pb2.RequestEvent]:
    """What a stream still brings, after read()s, to its end."""
    events: list[request_pb2.RequestEvent] = []
    while isinstance(event := await call.read(), request_pb2.RequestEvent):
        events.append(event)
    return events
