"""The DecodeScheduler service: each rpc becomes events of the planner."""

from collections.abc import AsyncIterator
from typing import Any

from k3mesh.errors import EngineLost
from k3mesh.v1 import common_pb2, request_pb2, request_pb2_grpc
from services.contracts.ids import RequestId
from services.scheduler.decode import events as ev
from services.scheduler.decode.scheduler import DecodeScheduler

STARTING = "the decode engine is starting"


class DecodeService(request_pb2_grpc.DecodeSchedulerServicer):
    """Serves from the process's start; `scheduler` is there once the engine is up."""

    def __init__(self, engine_id: str):
        self._engine_id = engine_id
        self.scheduler: DecodeScheduler | None = None

    async def Attach(self, request: request_pb2.AttachRequest, context: Any) -> AsyncIterator[request_pb2.RequestEvent]:
        async for event in self._up().clients.attach(request, context):
            yield event

    async def Follow(
        self, request_iterator: AsyncIterator[request_pb2.FollowRequest], context: Any
    ) -> AsyncIterator[request_pb2.FollowEvents]:
        async for events in self._up().clients.follow(request_iterator, context):
            yield events

    async def Cancel(self, request: request_pb2.CancelRequest, context: Any) -> request_pb2.CancelReply:
        scheduler, request_id = self._up(), RequestId(request.request_id)
        known = scheduler.planner.knows(request_id)
        scheduler.shell.post(ev.CancelRequested(request_id, request.reason))
        return request_pb2.CancelReply(known=known)

    async def Pair(
        self, request_iterator: AsyncIterator[request_pb2.PrefillToDecode], context: Any
    ) -> AsyncIterator[request_pb2.DecodeToPrefill]:
        async for message in self._up().prefills.serve(request_iterator, context):
            yield message

    async def Inspect(self, request: common_pb2.InspectRequest, context: Any) -> common_pb2.InspectReply:
        scheduler = self.scheduler
        if scheduler is None:
            return common_pb2.InspectReply(
                service="decode-scheduler", engine_id=self._engine_id, rank=-1, not_ready_reason=STARTING
            )
        planner = scheduler.planner
        reason = "draining" if planner.draining else "" if len(scheduler.prefills) else "no prefill engine is paired"
        return common_pb2.InspectReply(
            service="decode-scheduler",
            engine_id=self._engine_id,
            engine_epoch=planner.shape.epoch,
            rank=-1,
            counters={
                **planner.counters(),
                **planner.cache(),
                "image_blocks": planner.shape.image_blocks * planner.shape.replicas,
                "client_streams": len(scheduler.clients),
                "tasks": scheduler.shell.tasks,
            },
            totals={**planner.totals, **scheduler.shell.totals},
            ready=not reason,
            not_ready_reason=reason,
            draining=planner.draining,
        )

    async def Drain(self, request: common_pb2.DrainRequest, context: Any) -> common_pb2.DrainReply:
        remaining = await self._up().drain(request.timeout_ms / 1000)
        return common_pb2.DrainReply(drained=remaining == 0, remaining=remaining)

    def _up(self) -> DecodeScheduler:
        if self.scheduler is None:
            raise EngineLost(f"{STARTING}; try again later")
        return self.scheduler
