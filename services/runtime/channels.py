"""gRPC as this mesh speaks it: channel options, and errors on and off the wire."""

from collections.abc import Sequence

import grpc
import grpc.aio

from k3mesh.errors import EngineLost, MeshError, from_code
from k3mesh.v1 import common_pb2

FAILURE_KEY = "k3mesh-failure-bin"  # trailing metadata: a serialised Failure beside the status
MESSAGE_LIMIT = 32 << 20  # a prompt of a million ids is 4 MB; the cap bounds what a peer can make us hold and parse

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.keepalive_time_ms", 4_000),  # a stopped peer is noticed within 8 s
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # else a minute, whatever the keepalive's timeout
    ("grpc.http2.max_pings_without_data", 0),  # else a silent stream is pinged twice only
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to a service of the mesh. It reconnects by itself; calls carry the deadlines."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def failure(error: MeshError) -> common_pb2.Failure:
    return common_pb2.Failure(code=error.code, message=error.message, retryable=error.retryable, detail=error.detail)


def error(message: common_pb2.Failure) -> MeshError:
    return from_code(message.code, message.message, message.detail)


def translate(rpc: grpc.aio.AioRpcError, peer: str) -> MeshError:
    """The MeshError behind a failed call: the peer's own where it sent one, else that the peer is lost."""
    metadata: Sequence[tuple[str, str | bytes]] = tuple(rpc.trailing_metadata() or ())
    for key, value in metadata:
        if key == FAILURE_KEY and isinstance(value, bytes):
            return error(common_pb2.Failure.FromString(value))
    return EngineLost(
        f"{peer} does not answer ({rpc.code().name}: {rpc.details()}); check that it runs", detail=rpc.code().name
    )
