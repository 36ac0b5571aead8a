"""A mesh without compute: real gRPC schedulers that answer with tokens known beforehand.

Unless told otherwise it echoes the prompt, one token a message, until max_tokens or an end token.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from k3mesh.errors import EngineLost, MeshError
from k3mesh.v1 import common_pb2, request_pb2, request_pb2_grpc
from services.runtime.channels import failure
from services.runtime.rpc_server import RpcServer
from tests.lib.follow import follow

Event = request_pb2.RequestEvent


@dataclass
class Script:
    """How the next requests go."""

    answer: Callable[[list[int]], list[int]] = lambda prompt: prompt  # prompt -> tokens
    batch: int = 1  # tokens a message
    refuse: MeshError | None = None  # raised by Submit
    fail_after: tuple[int, MeshError] | None = None  # tokens, then this failure on the stream
    hold_after: int | None = None  # tokens, then silence until `release` is set or the client is gone
    drafts: request_pb2.Drafts | None = None  # told with the end
    hold_queue: bool = False  # stay queued until then
    release: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedMesh:
    """Both schedulers of a mesh. `requests` is what was submitted, `ended` how each stream ended."""

    def __init__(self, vocab_size: int = 400, max_model_len: int = 4096, end_token_ids: Sequence[int] = (0,)):
        self.script = Script()
        self.vocab_size, self.max_model_len, self.end_token_ids = vocab_size, max_model_len, tuple(end_token_ids)
        self.not_ready = ""
        self.requests: dict[str, request_pb2.SubmitRequest] = {}
        self.attached: dict[str, asyncio.Event] = {}
        self.rooms = count(1)
        self.live: set[str] = set()
        self.ended: dict[str, str] = {}  # request id -> "finished" | "failed" | "cancelled"
        self._changed = asyncio.Event()
        self._prefill: RpcServer | None = None
        self._decode: RpcServer | None = None
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._decode = RpcServer(
            "127.0.0.1:0",
            [(request_pb2_grpc.add_DecodeSchedulerServicer_to_server, _Decode(self), "k3mesh.v1.DecodeScheduler")],
        )
        self._prefill = RpcServer(
            address, [(request_pb2_grpc.add_PrefillSchedulerServicer_to_server, _Prefill(self), "k3mesh.v1.PrefillScheduler")]
        )
        await self._decode.start()
        await self._prefill.start()
        self.address = self._prefill.address

    async def stop(self) -> None:
        for server in (self._prefill, self._decode):
            if server is not None:
                await server.stop(0)
        self._prefill = self._decode = None

    @property
    def decode_address(self) -> str:
        assert self._decode is not None
        return self._decode.address

    async def until(self, condition: Callable[["ScriptedMesh"], bool]) -> None:
        """Wait for something to become true of this mesh, for 20 s at most."""
        async with asyncio.timeout(20):
            while not condition(self):
                self._changed.clear()
                await self._changed.wait()

    def note(self, request_id: str, ended: str | None = None) -> None:
        if ended is None:
            self.live.add(request_id)
        else:
            self.live.discard(request_id)
            self.ended[request_id] = ended
        self._changed.set()

    async def play(self, request_id: str) -> AsyncIterator[Event]:
        """The token part of a request."""
        script, sampling = self.script, self.requests[request_id].sampling
        prompt = list(array("I", self.requests[request_id].prompt))
        tokens, reason = self._cut(script.answer(prompt), sampling)
        sent = 0
        while sent < len(tokens):
            if script.fail_after is not None and sent >= script.fail_after[0]:
                self.note(request_id, "failed")
                yield Event(failure=failure(script.fail_after[1]))
                return
            if script.hold_after is not None and sent >= script.hold_after:
                await script.release.wait()
            batch = tokens[sent : sent + script.batch]
            sent += len(batch)
            yield Event(tokens=request_pb2.TokenBatch(tokens=batch))
        self.note(request_id, "finished")
        yield Event(
            finished=request_pb2.Finished(
                reason=reason, prompt_tokens=len(prompt), completion_tokens=len(tokens), cached_tokens=0, drafts=script.drafts
            )
        )

    def _cut(self, tokens: list[int], sampling: common_pb2.Sampling) -> tuple[list[int], Any]:
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self.end_token_ids))
        for length, token in enumerate(tokens[: sampling.max_tokens], start=1):
            if token in ends:
                return tokens[:length], common_pb2.FINISH_REASON_STOP
        return tokens[: sampling.max_tokens], common_pb2.FINISH_REASON_LENGTH


class _Prefill(request_pb2_grpc.PrefillSchedulerServicer):
    def __init__(self, mesh: ScriptedMesh):
        self._mesh = mesh

    async def Submit(self, request: Any, context: Any) -> AsyncIterator[Event]:
        mesh = self._mesh
        if mesh.not_ready:
            raise EngineLost(mesh.not_ready)
        if mesh.script.refuse is not None:
            raise mesh.script.refuse
        request_id = request.request_id
        mesh.requests[request_id] = request
        mesh.attached[request_id] = asyncio.Event()
        room = next(mesh.rooms)
        mesh.note(request_id)
        context.add_done_callback(lambda _: None if mesh.attached[request_id].is_set() else mesh.note(request_id, "cancelled"))
        yield Event(queued=request_pb2.Queued(position=0))
        if mesh.script.hold_queue:
            await mesh.script.release.wait()
        yield Event(attached=request_pb2.Attached(decode_address=mesh.decode_address, room=room))
        await mesh.attached[request_id].wait()
        yield Event(handed_over=request_pb2.HandedOver())

    async def Describe(self, request: Any, context: Any) -> Any:
        mesh = self._mesh
        return request_pb2.DescribeReply(
            model_name="tiny",
            vocab_size=mesh.vocab_size,
            max_model_len=mesh.max_model_len,
            max_prompt_tokens=mesh.max_model_len - 1,
            end_token_ids=mesh.end_token_ids,
            ready=not mesh.not_ready,
            not_ready_reason=mesh.not_ready,
            decode_address=mesh.decode_address,
        )

    async def Inspect(self, request: Any, context: Any) -> Any:
        return common_pb2.InspectReply(
            service="prefill-scheduler",
            engine_id="prefill-0",
            ready=True,
            counters={"queued": 3},
            totals={"requests_finished": 5},
        )


class _Decode(request_pb2_grpc.DecodeSchedulerServicer):
    def __init__(self, mesh: ScriptedMesh):
        self._mesh = mesh

    async def Follow(self, request_iterator: Any, context: Any) -> Any:
        async for events in follow(self._play, request_iterator):
            yield events

    async def _play(self, request: Any, context: Any) -> AsyncIterator[Event]:
        mesh, request_id = self._mesh, request.request_id
        context.add_done_callback(lambda _: None if request_id in mesh.ended else mesh.note(request_id, "cancelled"))
        mesh.attached[request_id].set()
        async for event in mesh.play(request_id):
            yield event

    async def Inspect(self, request: Any, context: Any) -> Any:
        return common_pb2.InspectReply(service="decode-scheduler", engine_id="decode-0", ready=True, counters={"residents": 2})
