"""WorkerControl: the scheduler's stream to a leader. Commands go to the device thread and, as bytes, to the peers; reports
come back on the same stream. One scheduler drives a worker for its whole epoch: when its stream breaks, the epoch is over.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from k3mesh.errors import BadRequest, EngineLost, Internal, MeshError
from k3mesh.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.runtime.channels import failure
from services.runtime.telemetry import log
from services.worker import wire
from services.worker.engine import Engine, epoch_over
from services.worker.fanout import Leader

HELLO_S = 10.0  # from the opening of a stream to its first command


class Control(worker_pb2_grpc.WorkerControlServicer):
    """`leader` is None on a tensor-parallel peer, which takes its commands from its leader and only answers Inspect here."""

    def __init__(
        self,
        engine: Engine,
        leader: Leader | None,
        hello: wire.WorkerHello,
        startup_timeout: float,
        memory_peak: Callable[[], int] | None = None,
    ):
        self._engine, self._leader, self._hello = engine, leader, hello
        self._startup_timeout, self._memory_peak = startup_timeout, memory_peak
        self._fence = 0
        self._driver: str | None = None
        self._ready = False
        self._reports: asyncio.Queue[worker_pb2.WorkerReport | None] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_ready(self) -> None:
        self._ready = True

    def deliver(self, report: wire.Report) -> None:
        """Send a report of the device thread to the scheduler."""
        self._reports.put_nowait(wire.report(report))

    async def watch(self) -> None:
        """EngineLost when the scheduler that said hello is gone, or asked for what cannot be; never returns otherwise."""
        await self._broken

    def end(self, error: MeshError) -> None:
        """The epoch is over: the failure is the stream's last report."""
        self._reports.put_nowait(worker_pb2.WorkerReport(failure=failure(error)))
        self._reports.put_nowait(None)

    async def Drive(
        self, request_iterator: AsyncIterator[worker_pb2.WorkerCommand], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerReport]:
        hello = await self._meet(request_iterator)
        self._reader = asyncio.ensure_future(self._read(request_iterator))
        try:
            yield worker_pb2.WorkerReport(hello=hello)
            while (report := await self._reports.get()) is not None:
                yield report
        finally:
            self._break(EngineLost(f"the stream of scheduler {self._driver} ended; the engine must restart"))
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def Inspect(self, request: common_pb2.InspectRequest, context: Any) -> common_pb2.InspectReply:
        return common_pb2.InspectReply(
            service="worker",
            engine_id=self._hello.engine_id,
            engine_epoch=self._hello.engine_epoch,
            rank=self._hello.rank,
            counters={
                **self._engine.counters(),
                "pending_steps": self._engine.pending,
                "tasks": int(self._reader is not None and not self._reader.done()),
            },
            totals=self._engine.totals() | ({"memory_peak_bytes": self._memory_peak()} if self._memory_peak else {}),
            ready=self._ready,
            not_ready_reason="" if self._ready else "this rank is still starting",
        )

    async def _meet(self, requests: AsyncIterator[worker_pb2.WorkerCommand]) -> worker_pb2.WorkerHello:
        """Introduce, then hello once the peers are ready."""
        if self._leader is None:
            raise BadRequest(f"rank {self._hello.rank} is a tensor-parallel peer; drive its leader")
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            first = None
        if first is None or first.WhichOneof("command") != "introduce":
            raise BadRequest(f"the first command on a stream is Introduce, within {HELLO_S:g} s")
        self._check_fence(first.fence)
        if self._driver is not None:
            raise BadRequest(f"scheduler {self._driver} drives this worker for its whole epoch; restart the engine")
        peers = await self._leader.hellos(self._startup_timeout)
        if self._driver is not None:
            raise BadRequest(f"scheduler {self._driver} was faster; it drives this worker for its whole epoch")
        self._driver = first.introduce.scheduler
        hello = wire.hello(self._hello)
        for peer in peers:
            hello.num_blocks = min(hello.num_blocks, peer.num_blocks)
            hello.num_slots = min(hello.num_slots, peer.num_slots)
            hello.image_blocks = min(hello.image_blocks, peer.image_blocks)
        log.info("driven", scheduler=self._driver, fence=self._fence)
        return hello

    async def _read(self, requests: AsyncIterator[worker_pb2.WorkerCommand]) -> None:
        assert self._leader is not None
        try:
            async for message in requests:
                self._check_fence(message.fence)
                self._engine.submit(wire.command(message))
                await self._leader.send(message.SerializeToString())
        except MeshError as error:
            self._break(error)
        except Exception as error:
            log.error("reading commands failed", exc_info=error)
            self._break(Internal(f"reading commands failed: {error!r}"))
        else:
            self._break(EngineLost(f"scheduler {self._driver} closed its stream; the engine must restart"))

    def _check_fence(self, fence: int) -> None:
        if fence < self._fence:
            raise BadRequest(
                f"fence {fence} is below {self._fence}, which this worker has seen: another scheduler holds the lease now"
            )
        self._fence = fence

    def _break(self, error: MeshError) -> None:
        if not self._broken.done():
            self._broken.set_exception(epoch_over(error))
