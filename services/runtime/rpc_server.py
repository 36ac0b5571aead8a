"""A gRPC server with what every service of the mesh has: health, reflection, limits, and typed errors."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_health.v1.health import aio as health_aio  # pyright: ignore[reportAttributeAccessIssue]
from grpc_reflection.v1alpha import reflection

from k3mesh.errors import ConfigError, Internal, MeshError
from services.runtime.channels import FAILURE_KEY, MESSAGE_LIMIT, failure
from services.runtime.telemetry import log

SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 3_000),  # clients may ping an idle stream
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
Registration = tuple[Callable[[Any, grpc.aio.Server], None], Any, str]  # add_XServicer_to_server, servicer, full name


class RpcServer:
    """Serves `services` on one address, NOT_SERVING until told otherwise."""

    def __init__(self, listen: str, services: list[Registration]):
        self.address = listen
        self._names = [name for _, _, name in services]
        self._health = health_aio.HealthServicer()
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[_TypedErrors()])
        for add, servicer, _ in services:
            add(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, HEALTH_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self) -> None:
        """Bind and serve; ConfigError if the address cannot be had."""
        try:
            port = self._server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise ConfigError(
                f"--listen {self.address}: the address cannot be bound (in use, or not of this host); choose a free port",
                param="listen",
            ) from error
        self.address = f"{self.address.rsplit(':', 1)[0]}:{port}"
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace: float) -> None:
        """Refuse new calls, give those in flight `grace` seconds, end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)


class _TypedErrors(grpc.aio.ServerInterceptor):
    """A MeshError that leaves a handler becomes its status, message and Failure detail; anything else is a logged defect."""

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.response_streaming:
            inner_stream = handler.stream_stream if handler.request_streaming else handler.unary_stream

            async def stream(request: Any, context: Any) -> Any:
                try:
                    async for reply in inner_stream(request, context):
                        yield reply
                except Exception as error:
                    await _abort(method, error, context)

            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            return make(stream, handler.request_deserializer, handler.response_serializer)
        inner_unary = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def unary(request: Any, context: Any) -> Any:
            try:
                return await inner_unary(request, context)
            except Exception as error:
                await _abort(method, error, context)

        make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        return make(unary, handler.request_deserializer, handler.response_serializer)


async def _abort(method: str, error: Exception, context: Any) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, MeshError):
        log.error("a handler failed", method=method, exc_info=error)
        error = Internal(f"{method} failed: {type(error).__name__}; the server's log has the traceback")
    status = getattr(grpc.StatusCode, error.statuses.grpc)
    await context.abort(status, error.message, ((FAILURE_KEY, failure(error).SerializeToString()),))
