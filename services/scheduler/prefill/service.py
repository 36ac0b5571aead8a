"""The PrefillScheduler service: each rpc becomes events of the planner."""

from collections.abc import AsyncIterator
from typing import Any

from k3mesh.errors import EngineLost
from k3mesh.v1 import common_pb2, request_pb2, request_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.contracts.ids import RequestId
from services.scheduler.prefill import wire
from services.scheduler.prefill.scheduler import PrefillScheduler

STARTING = "the prefill engine is starting"


class PrefillService(request_pb2_grpc.PrefillSchedulerServicer):
    """Serves from the process's start; `scheduler` is there once the engine is up."""

    def __init__(self, arguments: SchedulerArguments):
        self._arguments = arguments
        self.scheduler: PrefillScheduler | None = None

    async def Submit(self, request: request_pb2.SubmitRequest, context: Any) -> AsyncIterator[request_pb2.RequestEvent]:
        scheduler = self._up()
        scheduler.check_open()
        limits, timeout = scheduler.planner.limits, self._arguments.request_timeout
        arrived = wire.request_arrived(request, timeout, limits.vocab_size, limits.max_model_len, scheduler.keys)
        link = scheduler.link
        async for event in scheduler.clients.follow(arrived, request.prompt, lambda: link.client_address, context):
            yield event

    async def Cancel(self, request: request_pb2.CancelRequest, context: Any) -> request_pb2.CancelReply:
        known = await self._up().cancel(RequestId(request.request_id), request.reason or "no reason given")
        return request_pb2.CancelReply(known=known)

    async def Describe(self, request: request_pb2.DescribeRequest, context: Any) -> request_pb2.DescribeReply:
        scheduler = self.scheduler
        if scheduler is None:
            return request_pb2.DescribeReply(
                model_name=self._arguments.served_model_name,
                max_model_len=self._arguments.max_model_len,
                not_ready_reason=STARTING,
            )
        hello, planner, reason = scheduler.fleet.hello, scheduler.planner, scheduler.not_ready_reason
        return request_pb2.DescribeReply(
            model_name=self._arguments.served_model_name,
            model_fingerprint=hello.model_fingerprint,
            vocab_size=hello.vocab_size,
            max_model_len=self._arguments.max_model_len,
            max_prompt_tokens=planner.max_prompt_tokens,
            end_token_ids=hello.end_token_ids,
            ready=not reason,
            not_ready_reason=reason,
            decode_address=scheduler.link.client_address,
        )

    async def Inspect(self, request: common_pb2.InspectRequest, context: Any) -> common_pb2.InspectReply:
        scheduler, engine_id = self.scheduler, self._arguments.engine_id
        if scheduler is None:
            return common_pb2.InspectReply(service="prefill-scheduler", engine_id=engine_id, rank=-1, not_ready_reason=STARTING)
        planner, reason = scheduler.planner, scheduler.not_ready_reason
        return common_pb2.InspectReply(
            service="prefill-scheduler",
            engine_id=engine_id,
            engine_epoch=scheduler.fleet.hello.engine_epoch,
            rank=-1,
            counters={
                **planner.counters(),
                **planner.cache(),
                "client_streams": scheduler.clients.streams,
                "tasks": scheduler.shell.tasks,
            },
            totals=planner.totals,
            ready=not reason,
            not_ready_reason=reason,
            draining=scheduler.draining,
        )

    async def Drain(self, request: common_pb2.DrainRequest, context: Any) -> common_pb2.DrainReply:
        remaining = await self._up().drain(request.timeout_ms / 1000)
        return common_pb2.DrainReply(drained=remaining == 0, remaining=remaining)

    def _up(self) -> PrefillScheduler:
        if self.scheduler is None:
            raise EngineLost(f"{STARTING}; try again later")
        return self.scheduler
