"""What every service of the mesh has on its gRPC port."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from k3mesh.errors import ConfigError, Internal, Overloaded
from k3mesh.v1 import common_pb2, transfer_pb2_grpc
from services.runtime import channels
from services.runtime.rpc_server import RpcServer

NAME = "k3mesh.v1.TransferControl"
ROOT = Path(__file__).resolve().parents[2]
SILENT = """
import asyncio
from k3mesh.v1 import transfer_pb2, transfer_pb2_grpc
from services.runtime.rpc_server import RpcServer

class Silent(transfer_pb2_grpc.TransferControlServicer):
    async def Drive(self, requests, context):
        yield transfer_pb2.AgentReport()
        await asyncio.Event().wait()

async def main():
    add = transfer_pb2_grpc.add_TransferControlServicer_to_server
    server = RpcServer("127.0.0.1:0", [(add, Silent(), "k3mesh.v1.TransferControl")])
    await server.start()
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Agent(transfer_pb2_grpc.TransferControlServicer):
    error: Exception | None = None

    async def Inspect(self, request: Any, context: Any) -> Any:
        if self.error:
            raise self.error
        return common_pb2.InspectReply(service="agent")


@pytest.fixture
async def agent():
    return Agent()


@pytest.fixture
async def server(agent):
    server = RpcServer("127.0.0.1:0", [(transfer_pb2_grpc.add_TransferControlServicer_to_server, agent, NAME)])
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server):
    async with channels.open_channel(server.address) as channel:
        yield channel


async def test_health_tells_serving_only_when_told(server, channel):
    check = health_pb2_grpc.HealthStub(channel).Check
    for name in ("", NAME):
        assert (await check(health_pb2.HealthCheckRequest(service=name))).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.set_serving(True)
    for name in ("", NAME):
        assert (await check(health_pb2.HealthCheckRequest(service=name))).status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services(server):
    def listed() -> set[str]:
        with grpc.insecure_channel(server.address) as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {NAME, "grpc.health.v1.Health"} <= await asyncio.to_thread(listed)


async def test_a_mesh_error_keeps_its_type_and_a_defect_becomes_internal(agent, channel):
    stub = transfer_pb2_grpc.TransferControlStub(channel)
    for raised, seen in ((Overloaded("full", detail="X"), Overloaded), (ZeroDivisionError("oops"), Internal)):
        agent.error = raised
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Inspect(common_pb2.InspectRequest())
        assert type(channels.translate(caught.value, "agent")) is seen
    assert "oops" not in str(caught.value.details())


async def test_a_port_in_use_is_one_clear_error(server):
    second = RpcServer(server.address, [])
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    with pytest.raises(ConfigError, match=rf"--listen {server.address}: the address cannot be bound"):
        await second.start()
    await second.stop(0)


async def test_a_stream_on_which_nothing_is_said_ends_when_its_server_is_stopped(monkeypatch):
    """Pings must go on for as long as the stream does, and an answer that is missing must end it soon."""
    times = {"grpc.keepalive_time_ms": 500, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    assert times.keys() <= dict(channels.CHANNEL_OPTIONS).keys()
    monkeypatch.setattr(channels, "CHANNEL_OPTIONS", list((dict(channels.CHANNEL_OPTIONS) | times).items()))
    server = subprocess.Popen([sys.executable, "-c", SILENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        async with channels.open_channel(server.stdout.readline().strip()) as channel:
            call = transfer_pb2_grpc.TransferControlStub(channel).Drive()
            await call.read()
            reading = asyncio.ensure_future(call.read())
            await asyncio.wait([reading], timeout=3)  # of silence
            assert not reading.done()
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError):
                async with asyncio.timeout(20):
                    await reading
    finally:
        server.kill()
        server.communicate()
