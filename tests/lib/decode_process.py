"""A decode scheduler's main() as a task of the test, with peers that play a script."""

import asyncio
from typing import Any

from k3mesh.v1 import request_pb2, request_pb2_grpc
from services.scheduler.decode.main import main
from tests.lib.decode_peers import DecodePeers, PrefillEnd
from tests.lib.redis_server import RedisServer
from tests.lib.scheduler_process import PATIENCE_S, RunningScheduler, log_of, until


class RunningDecode(RunningScheduler):
    service, stub_type = "k3mesh.v1.DecodeScheduler", request_pb2_grpc.DecodeSchedulerStub

    def __init__(self, peers: DecodePeers, redis_url: str, **changes: str):
        flags = {
            "disaggregation-mode": "decode", "attn-tp-size": str(peers.tp_size), "data-parallel-size": str(peers.replicas),
            "max-num-seqs": "8", "max-model-len": "1024", "redis-url": redis_url,
            "workers": peers.addresses(peers.workers), "agents": peers.addresses(peers.agents),
        }  # fmt: skip
        super().__init__(main, flags | {name.replace("_", "-"): value for name, value in changes.items()})

    async def inspect(self) -> Any:
        return await self.client.inspect("decode-scheduler")

    async def until_counters(self, **wanted: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not wanted.items() <= (await self.counters()).items():
                await asyncio.sleep(0.01)

    async def paired(self, **changes: Any) -> PrefillEnd:
        prefill = PrefillEnd(self.stub, **changes)
        answer = await prefill.pair()
        assert answer.WhichOneof("message") == "hello", answer
        return prefill

    def attach(self, request_id: str, room: int) -> Any:
        return self.stub.Attach(request_pb2.AttachRequest(request_id=request_id, room=room))

    async def follow(self, *requests: tuple[str, int]) -> Any:
        """One stream for all of them, by request id and room."""
        call = self.stub.Follow()
        for request_id, room in requests:
            attach = request_pb2.AttachRequest(request_id=request_id, room=room)
            await call.write(request_pb2.FollowRequest(attach=attach))
        return call


async def journalled(journal: RedisServer, request_id: str, last: str) -> list[dict[str, str]]:
    await until(lambda: [entry["state"] for entry in log_of(journal, request_id)][-1:] == [last])
    return log_of(journal, request_id)


async def rest_of(call: Any) -> list[request_pb2.RequestEvent]:
    """What a stream still brings, after read()s, to its end."""
    events: list[request_pb2.RequestEvent] = []
    while isinstance(event := await call.read(), request_pb2.RequestEvent):
        events.append(event)
    return events
