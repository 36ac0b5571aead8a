"""The asyncio client of a mesh: submit token ids, follow the tokens, cancel, look.

    async with Client("127.0.0.1:50051") as client:
        stream = await client.submit([1, 2, 3], SamplingParams(max_tokens=16))
        async for event in stream:
            ...

A client talks to the prefill scheduler; the stream itself moves on to the decode scheduler that the mesh names. All
failures are `k3mesh.errors.MeshError`s.
"""

import asyncio
import random
import re
import secrets
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from k3mesh.errors import BadRequest, Cancelled, DeadlineExceeded, EngineLost, MeshError, from_code
from k3mesh.following import Followed, Following
from k3mesh.v1 import common_pb2, request_pb2, request_pb2_grpc, transfer_pb2_grpc, worker_pb2_grpc

REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FAILURE_KEY = "k3mesh-failure-bin"  # trailing metadata of a refused call: a serialised Failure
CALL_TIMEOUT = 10.0  # seconds, of calls that answer at once
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a minute, whatever the keepalive's timeout
    ("grpc.http2.max_pings_without_data", 0),  # else a silent stream is pinged twice only
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 are off; a seed is drawn when none is given."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next tokens of the answer, in order."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a drafter did for one answer."""

    windows: int  # verified: decode rounds with proposals
    proposed: int  # tokens in them
    accepted: int  # of these, what the target chose too, whether or not the answer ended before them
    accepted_at: tuple[int, ...]  # windows whose first k proposals were accepted, k from 1

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round, the target's own one included."""
        return 1 + self.accepted / self.windows


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete."""

    reason: str  # "stop" | "length"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_token: int | None  # the token that ended it, which is also the last one of the stream
    drafts: Drafts | None = None  # None: nothing was drafted


Event = Tokens | Finished


@dataclass(frozen=True, slots=True)
class Model:
    """What the mesh serves."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int  # prompt and answer together
    max_prompt_tokens: int
    end_token_ids: tuple[int, ...]
    ready: bool
    not_ready_reason: str
    decode_address: str = ""  # of the decode scheduler, once the mesh is paired


@dataclass(frozen=True, slots=True)
class Inspection:
    """One service's counters now and totals since its start."""

    service: str
    engine_id: str
    engine_epoch: int
    rank: int
    ready: bool
    not_ready_reason: str
    draining: bool
    counters: dict[str, int] = field(default_factory=dict[str, int])
    totals: dict[str, int] = field(default_factory=dict[str, int])


class Client:
    """A connection to one mesh, by the address of its prefill scheduler. Use it from one event loop."""

    def __init__(self, address: str):
        self.address = address
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._followings: dict[str, Following] = {}  # by the decode scheduler's address
        self._prefill: Any = request_pb2_grpc.PrefillSchedulerStub(self._channel(address))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all streams and connections."""
        for following in self._followings.values():
            await following.close()
        self._followings.clear()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> "Stream":
        """Queue a prompt of token ids; the stream gives its tokens. `timeout` in seconds bounds the whole request.

        BadRequest for what can never be served; errors of the mesh come out of the stream.
        """
        sampling = sampling or SamplingParams()
        request_id = request_id if request_id is not None else f"req-{secrets.token_hex(12)}"
        message = request_pb2.SubmitRequest(
            request_id=request_id,
            prompt=_pack(prompt),
            sampling=_sampling(sampling),
            timeout_ms=0 if timeout is None else max(1, int(timeout * 1000)),
        )
        if not REQUEST_ID.fullmatch(request_id):
            raise BadRequest(
                f"request_id {request_id!r}: must be 1 to 64 of letters, digits, '_', '.', '-'", param="request_id"
            )
        return Stream(request_id, self._prefill.Submit(message, timeout=timeout), self._follow, self.address)

    async def cancel(self, request_id: str, reason: str = "cancelled by the client") -> bool:
        """End a request wherever it is. Idempotent; -> whether the prefill scheduler knew it."""
        message = request_pb2.CancelRequest(request_id=request_id, reason=reason)
        reply = await self._call(self._prefill.Cancel(message, timeout=CALL_TIMEOUT), self.address)
        return bool(reply.known)

    async def describe(self) -> Model:
        """The model that is served, its limits, and whether the mesh is ready."""
        reply = await self._call(self._prefill.Describe(request_pb2.DescribeRequest(), timeout=CALL_TIMEOUT), self.address)
        return Model(
            name=reply.model_name,
            fingerprint=reply.model_fingerprint,
            vocab_size=reply.vocab_size,
            max_model_len=reply.max_model_len,
            max_prompt_tokens=reply.max_prompt_tokens,
            end_token_ids=tuple(reply.end_token_ids),
            ready=reply.ready,
            not_ready_reason=reply.not_ready_reason,
            decode_address=reply.decode_address,
        )

    async def inspect(self, service: str = "prefill-scheduler", address: str | None = None) -> Inspection:
        """Counters of one process. `service` is prefill-scheduler, decode-scheduler, worker or agent; `address` its own."""
        stub: Any = {
            "prefill-scheduler": request_pb2_grpc.PrefillSchedulerStub,
            "decode-scheduler": request_pb2_grpc.DecodeSchedulerStub,
            "worker": worker_pb2_grpc.WorkerControlStub,
            "agent": transfer_pb2_grpc.TransferControlStub,
        }[service]
        address = address or self.address
        reply = await self._call(
            stub(self._channel(address)).Inspect(common_pb2.InspectRequest(), timeout=CALL_TIMEOUT), address
        )
        return Inspection(
            service=reply.service,
            engine_id=reply.engine_id,
            engine_epoch=reply.engine_epoch,
            rank=reply.rank,
            ready=reply.ready,
            not_ready_reason=reply.not_ready_reason,
            draining=reply.draining,
            counters=dict(reply.counters),
            totals=dict(reply.totals),
        )

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=OPTIONS)
        return self._channels[address]

    def _follow(self, address: str, request_id: str, room: int) -> Followed:
        following = self._followings.get(address)
        if following is None or following.over:
            stub: Any = request_pb2_grpc.DecodeSchedulerStub(self._channel(address))
            following = self._followings[address] = Following(stub)
        return following.follow(request_id, room)

    async def _call(self, call: Any, address: str) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise _translate(error, address) from error


class Stream:
    """One request's events. Leaving the loop early does not end the request: `cancel()` does, or `async with`."""

    def __init__(self, request_id: str, prefill_call: Any, follow: Callable[[str, str, int], Followed], address: str):
        self.request_id = request_id
        self.accepted = False  # the mesh keeps the request's journal: it has answered, and the stream did not break since
        self._prefill = prefill_call
        self._decode: Followed | None = None
        self._follow = follow
        self._address = address
        self._ended = False
        self._events = self._run()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def cancel(self) -> None:
        """End the request if it still runs. The loop over it, if one waits, raises Cancelled."""
        if not self._ended:
            self._ended = True
            self._prefill.cancel()
            if self._decode is not None:
                self._decode.cancel()

    async def _run(self) -> AsyncIterator[Event]:
        """The prefill stream until it finishes or hands over, then the decode stream."""
        try:
            async for message in self._read(self._prefill, self._address):
                self.accepted = True
                match message.WhichOneof("event"):
                    case "attached":
                        self._address = message.attached.decode_address
                        self._decode = self._follow(self._address, self.request_id, message.attached.room)
                    case "tokens":
                        yield Tokens(tuple(message.tokens.tokens))
                    case "finished":
                        yield _finished(message.finished)
                        return
                    case "failure":
                        raise from_code(message.failure.code, message.failure.message, message.failure.detail)
                    case "handed_over":
                        break
                    case _:  # queued, or an event of a newer mesh
                        continue
            else:
                raise self._broken(self._unfinished())
            async for it in self._read(self._decode, self._address):
                if not isinstance(it, request_pb2.RequestEvent):
                    yield Tokens(it)
                elif it.HasField("finished"):
                    yield _finished(it.finished)
                    return
                elif it.HasField("failure"):
                    raise from_code(it.failure.code, it.failure.message, it.failure.detail)
            raise self._broken(self._unfinished())
        finally:
            await self.cancel()
            self._ended = True

    async def _read(self, call: Any, address: str) -> AsyncIterator[Any]:
        try:
            async for message in call or ():
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._broken(_translate(error, address)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is the caller's own task that ends, not the call
            raise Cancelled(f"{self.request_id} was cancelled") from None

    def _unfinished(self) -> MeshError:
        return EngineLost(f"the stream of {self.request_id} from {self._address} ended without a result; try again")

    def _broken(self, error: MeshError) -> MeshError:
        if isinstance(error, EngineLost):
            self.accepted = False
        return error


def _pack(prompt: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    try:
        packed = array("I", prompt)
    except (OverflowError, TypeError) as error:
        raise BadRequest(f"prompt: token ids must be integers from 0 to 4294967295 ({error})", param="prompt") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _sampling(params: SamplingParams) -> common_pb2.Sampling:
    """Checked here too, so that a slip is told before it travels."""
    checks = (
        ("max_tokens", 1 <= params.max_tokens < 1 << 32, "at least 1"),
        ("temperature", 0.0 <= params.temperature <= 100.0, "from 0 to 100"),
        ("top_p", 0.0 < params.top_p <= 1.0, "above 0 and at most 1"),
        ("top_k", 0 <= params.top_k < 1 << 31, "0 (off) or more"),
        ("seed", params.seed is None or 0 <= params.seed < 1 << 64, "from 0 to 2^64 - 1"),
    )
    for name, holds, rule in checks:
        if not holds:
            raise BadRequest(f"{name} = {getattr(params, name)}: must be {rule}", param=name)
    return common_pb2.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=random.getrandbits(64) if params.seed is None else params.seed,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
    )


def _finished(message: request_pb2.Finished) -> Finished:
    return Finished(
        reason="stop" if message.reason == common_pb2.FINISH_REASON_STOP else "length",
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        stop_token=message.stop_token if message.matched_stop_token else None,
        drafts=_drafts(message.drafts) if message.HasField("drafts") else None,
    )


def _drafts(message: request_pb2.Drafts) -> Drafts:
    return Drafts(message.windows, message.proposed, message.accepted, tuple(message.accepted_at))


def _translate(error: grpc.aio.AioRpcError, address: str) -> MeshError:
    """The MeshError behind a failed call: the mesh's own where it sent one."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == FAILURE_KEY:
            failure = common_pb2.Failure.FromString(value)
            return from_code(failure.code, failure.message, failure.detail)
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the request's time is up; allow more with `timeout`, or send less")
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return BadRequest(f"the request is too large for {address} ({error.details()}); send a shorter prompt", param="prompt")
    if error.code() == grpc.StatusCode.CANCELLED:
        return Cancelled("the call was cancelled")
    return EngineLost(f"{address} does not answer ({error.code().name}: {error.details()}); check that the mesh runs")
