"""WorkerControl against a real server: who may drive a worker, in what order, and what ends its epoch."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from k3mesh.errors import EngineLost
from k3mesh.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.runtime.channels import open_channel
from services.runtime.rpc_server import RpcServer
from services.worker import wire
from services.worker.control import Control
from services.worker.engine import Engine
from services.worker.fanout import Leader
from tests.lib.worker_process import Drive

DEADLINE_S = 10
HELLO = wire.WorkerHello("prefill-0", 123, 2, 100, 9, "abc", "k3", 512, (258,), 4096)


class Echo:
    """Answers each step with its number and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[wire.Command] = []

    def execute(self, command: wire.Command) -> wire.Report | None:
        self.seen.append(command)
        if isinstance(command, wire.PrefillStep):
            return wire.StepDone(command.step_id, 1, 0.0, 0.0, ())
        return None

    def counters(self) -> dict[str, int]:
        return {"rooms": 3}

    def totals(self) -> dict[str, int]:
        return {"steps": len(self.seen)}


class Worker:
    """One leader's control on a server of its own."""

    def __init__(self, leader: Leader | None):
        self.engine, self.echo = Engine(), Echo()
        self.control = Control(self.engine, leader, HELLO, startup_timeout=DEADLINE_S)
        self.engine.start(self.echo, self.control.deliver)
        register = (worker_pb2_grpc.add_WorkerControlServicer_to_server, self.control, "k3mesh.v1.WorkerControl")
        self.server = RpcServer("127.0.0.1:0", [register])

    async def lost(self) -> EngineLost:
        """Why the epoch has ended."""
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(EngineLost) as caught:
                await self.control.watch()
        return caught.value

    async def settled(self) -> list[wire.Command]:
        """What has been executed, once everything submitted is done."""
        async with asyncio.timeout(DEADLINE_S):
            await self.engine.call(lambda: None)
        return self.echo.seen


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    leader = Leader(Path("no-socket"), peers=())
    await leader.listen()
    worker = Worker(leader)
    await worker.server.start()
    yield worker
    await worker.server.stop(0)
    await worker.engine.close(DEADLINE_S)


@pytest.fixture
async def drive(worker: Worker) -> AsyncIterator[Drive]:
    """A scheduler that has been greeted."""
    drive = Drive(worker.server.address, fence=5)
    assert (await drive.introduce()).engine_epoch == HELLO.engine_epoch
    yield drive
    await drive.close()


def step(number: int) -> worker_pb2.PrefillStep:
    return worker_pb2.PrefillStep(step_id=number)


async def test_steps_run_in_order_and_are_reported_in_order(worker: Worker, drive: Drive):
    for number in (1, 2, 3):
        await drive.send(prefill=step(number))
    await drive.send(forget=worker_pb2.ForgetRooms(rooms=[7, 8]))
    assert [(await drive.report()).step.step_id for _ in range(3)] == [1, 2, 3]
    assert await worker.settled() == [*(wire.PrefillStep(n, ()) for n in (1, 2, 3)), wire.ForgetRooms((7, 8))]


async def test_the_first_command_must_introduce(worker: Worker):
    drive = Drive(worker.server.address)
    await drive.send(prefill=step(1))
    assert await drive.finished() == grpc.StatusCode.INVALID_ARGUMENT
    assert await worker.settled() == []
    await drive.close()
    again = Drive(worker.server.address)  # a stream that never was greeted ends nothing
    assert (await again.introduce()).rank == HELLO.rank
    await again.close()


async def test_a_second_scheduler_is_refused_and_the_first_goes_on(worker: Worker, drive: Drive):
    second = Drive(worker.server.address, fence=5)
    await second.send(introduce=worker_pb2.Introduce(scheduler="second"))
    assert await second.finished() == grpc.StatusCode.INVALID_ARGUMENT
    assert "scheduler test drives this worker" in await second.details()
    await second.close()
    await drive.send(prefill=step(1))
    assert (await drive.report()).step.step_id == 1


async def test_a_command_behind_a_newer_fence_is_not_executed(worker: Worker, drive: Drive):
    newer = Drive(worker.server.address, fence=6)
    await newer.send(introduce=worker_pb2.Introduce(scheduler="newer"))
    assert await newer.finished() == grpc.StatusCode.INVALID_ARGUMENT
    await newer.close()
    await drive.send(prefill=step(1))
    assert "fence 5 is below 6" in (await worker.lost()).message
    assert await worker.settled() == []


async def test_a_scheduler_with_a_lower_fence_is_not_greeted(worker: Worker, drive: Drive):
    stale = Drive(worker.server.address, fence=4)
    await stale.send(introduce=worker_pb2.Introduce(scheduler="stale"))
    assert await stale.finished() == grpc.StatusCode.INVALID_ARGUMENT
    assert "fence 4 is below 5" in await stale.details()
    await stale.close()


@pytest.mark.parametrize("number", [1, 3])
async def test_a_gap_ends_the_epoch(worker: Worker, drive: Drive, number: int):
    await drive.send(prefill=step(1))
    await drive.send(prefill=step(number))
    assert f"plan {number} follows plan 1" in (await worker.lost()).message
    assert await worker.settled() == [wire.PrefillStep(1, ())]


async def test_a_stream_that_the_scheduler_closes_ends_the_epoch(worker: Worker, drive: Drive):
    await drive.end()
    assert "closed its stream" in (await worker.lost()).message


async def test_a_scheduler_that_is_gone_ends_the_epoch(worker: Worker, drive: Drive):
    await drive.close()
    assert "scheduler test" in (await worker.lost()).message


async def test_the_failure_that_ends_the_epoch_is_the_last_report(worker: Worker, drive: Drive):
    worker.control.end(EngineLost("rank 3 is gone"))
    report = await drive.report()
    assert (report.failure.code, report.failure.message) == ("engine_lost", "rank 3 is gone")
    assert await drive.finished() == grpc.StatusCode.OK


async def test_a_peer_is_not_driven_but_inspected():
    peer = Worker(leader=None)
    await peer.server.start()
    drive = Drive(peer.server.address)
    await drive.send(introduce=worker_pb2.Introduce(scheduler="x"))
    assert await drive.finished() == grpc.StatusCode.INVALID_ARGUMENT
    assert "drive its leader" in await drive.details()
    reply = await worker_pb2_grpc.WorkerControlStub(drive.channel).Inspect(common_pb2.InspectRequest())
    assert (reply.service, reply.rank, reply.counters["rooms"], reply.ready) == ("worker", 2, 3, False)
    await drive.close()
    await peer.server.stop(0)
    await peer.engine.close(DEADLINE_S)


async def test_inspection_counts_what_is_pending_and_returns_to_zero(worker: Worker, drive: Drive):
    stub = worker_pb2_grpc.WorkerControlStub(drive.channel)
    await drive.send(prefill=step(1))
    await drive.report()
    worker.control.set_ready()
    reply = await stub.Inspect(common_pb2.InspectRequest())
    assert dict(reply.counters) == {"rooms": 3, "pending_steps": 0, "tasks": 1}
    assert (dict(reply.totals), reply.ready) == ({"steps": 1}, True)
    await drive.close()
    await worker.lost()
    async with open_channel(worker.server.address) as channel:
        reply = await worker_pb2_grpc.WorkerControlStub(channel).Inspect(common_pb2.InspectRequest())
    assert reply.counters["tasks"] == 0
