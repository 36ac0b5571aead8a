"""TransferControl: the scheduler's stream to this agent, and what it shows to Inspect. One scheduler drives an agent for its
whole life: when its stream breaks, the engine's epoch is over.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from k3mesh.errors import BadRequest, EngineLost, Internal, MeshError
from k3mesh.v1 import common_pb2, transfer_pb2, transfer_pb2_grpc
from services.contracts.placement import Placement
from services.kvtransfer import wire
from services.kvtransfer.pairing import Outcome, Pairer, Wanted
from services.runtime.channels import failure
from services.runtime.telemetry import log

HELLO_S = 10.0  # from the opening of a stream to its first command
FLUSH_S = 1.0  # for the last report


class Control(transfer_pb2_grpc.TransferControlServicer):
    """`pairer` is None on a prefill agent."""

    def __init__(
        self,
        placement: Placement,
        staging_bytes: int,
        post: Callable[[Any], None],
        counters: Callable[[], tuple[dict[str, int], dict[str, int]]],
    ):
        self._placement, self._post, self._counters = placement, post, counters
        self._staging_bytes = staging_bytes
        self.address = ""  # where peers link to; known when the server listens
        self.pairer: Pairer | None = None
        self._fence = 0
        self._driver: str | None = None
        self._reports: asyncio.Queue[transfer_pb2.AgentReport | None] = asyncio.Queue()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()

    def report(self, report: transfer_pb2.AgentReport) -> None:
        self._reports.put_nowait(report)

    def report_pairing(self, outcome: Outcome) -> None:
        if outcome.failure is None:
            paired = transfer_pb2.Paired(engine_id=outcome.wanted.engine_id, engine_epoch=outcome.wanted.engine_epoch)
            self.report(transfer_pb2.AgentReport(paired=paired))
        else:
            self.report(transfer_pb2.AgentReport(pair_refused=wire.failure(outcome.failure)))

    def fail(self, error: MeshError) -> None:
        """This agent cannot go on; the first reason counts."""
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # seen, whether or not watch() still runs

    async def watch(self) -> None:
        """Ends by EngineLost when the scheduler is gone, or asked for what cannot be."""
        await self._broken

    async def end(self, error: MeshError) -> None:
        """The agent cannot go on: that is the stream's last report."""
        self._reports.put_nowait(transfer_pb2.AgentReport(fatal=failure(error)))
        self._reports.put_nowait(None)
        if self._driver is not None:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._ended.wait()
            except TimeoutError:
                log.warning("the scheduler did not take the last report")

    async def Drive(
        self, request_iterator: AsyncIterator[transfer_pb2.AgentCommand], context: Any
    ) -> AsyncIterator[transfer_pb2.AgentReport]:
        commands = aiter(request_iterator)
        await self._meet(commands)
        reader = asyncio.ensure_future(self._read(commands))
        try:
            yield transfer_pb2.AgentReport(hello=self._hello())
            while (report := await self._reports.get()) is not None:
                yield report
        finally:
            self._ended.set()
            self.fail(EngineLost(f"the stream of scheduler {self._driver} ended; the engine must restart"))
            reader.cancel()
            await asyncio.wait([reader])

    async def Inspect(self, request: common_pb2.InspectRequest, context: Any) -> common_pb2.InspectReply:
        counters, totals = self._counters()
        return common_pb2.InspectReply(
            service="agent",
            engine_id=self._placement.engine_id,
            engine_epoch=self._placement.engine_epoch,
            rank=self._placement.global_rank,
            counters=counters,
            totals=totals,
            ready=self._driver is not None,
            not_ready_reason="" if self._driver is not None else "no scheduler drives this agent yet",
        )

    async def _meet(self, commands: AsyncIterator[transfer_pb2.AgentCommand]) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(commands, None)
        except TimeoutError:
            first = None
        if first is None or first.WhichOneof("command") != "introduce":
            raise BadRequest(f"the first command on a stream is IntroduceAgent, within {HELLO_S:g} s")
        self._check_fence(first.fence)
        if self._driver is not None:
            raise BadRequest(f"scheduler {self._driver} drives this agent for its whole life; restart the engine")
        self._driver = first.introduce.scheduler
        log.info("driven", scheduler=self._driver, fence=self._fence)

    async def _read(self, commands: AsyncIterator[transfer_pb2.AgentCommand]) -> None:
        try:
            async for command in commands:
                self._check_fence(command.fence)
                if command.WhichOneof("command") == "pair":
                    self._pair(command.pair)
                else:
                    self._post(wire.read_command(command))
        except MeshError as error:
            self.fail(error)
        except Exception as error:
            log.error("reading commands failed", exc_info=error)
            self.fail(Internal(f"reading commands failed: {error!r}"))
        else:
            self.fail(EngineLost(f"scheduler {self._driver} closed its stream; the engine must restart"))

    def _hello(self) -> transfer_pb2.AgentHello:
        return transfer_pb2.AgentHello(
            engine_id=self._placement.engine_id,
            engine_epoch=self._placement.engine_epoch,
            rank=self._placement.global_rank,
            peer_address=self.address,
            staging_bytes=self._staging_bytes,
            placement_fingerprint=self._placement.fingerprint,
        )

    def _pair(self, pair: transfer_pb2.PairWith) -> None:
        if self.pairer is None:
            raise BadRequest(f"{self._placement.name} is a prefill agent: decode agents link to it, it pairs with nobody")
        self.pairer.pair(Wanted(pair.engine_id, pair.engine_epoch, tuple(pair.agents)))

    def _check_fence(self, fence: int) -> None:
        if fence < self._fence:
            raise BadRequest(
                f"fence {fence} is below {self._fence}, which this agent has seen: another scheduler holds the lease now"
            )
        self._fence = fence
