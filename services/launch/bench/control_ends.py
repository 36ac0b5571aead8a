"""The other ends of a decode scheduler that `k3mesh bench control` plays itself: agents that move no cache and a prefill engine
that computes no prompt, which answer at once, and a client that only listens."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any, NoReturn

from k3mesh.errors import EngineLost, Overloaded
from k3mesh.v1 import common_pb2, request_pb2, request_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from services.launch.bench.idle_worker import EPOCH, LETTERS, VOCABULARY
from services.runtime.channels import open_channel

HELLO_S = 30.0


class IdleAgent(transfer_pb2_grpc.TransferControlServicer):
    """The transfer agent of one decode rank: every room is received as soon as it is expected."""

    def __init__(self, engine_id: str, rank: int, verify_width: int):
        self._hello = transfer_pb2.AgentHello(engine_id=engine_id, engine_epoch=EPOCH, rank=rank, peer_address="nowhere:1")
        self._window = [LETTERS[n % len(LETTERS)] for n in range(verify_width)]

    async def Drive(
        self, request_iterator: AsyncIterator[transfer_pb2.AgentCommand], context: Any
    ) -> AsyncIterator[transfer_pb2.AgentReport]:
        async for command in request_iterator:
            match command.WhichOneof("command"):
                case "introduce":
                    yield transfer_pb2.AgentReport(hello=self._hello)
                case "pair":
                    it = command.pair
                    paired = transfer_pb2.Paired(engine_id=it.engine_id, engine_epoch=it.engine_epoch)
                    yield transfer_pb2.AgentReport(paired=paired)
                case "expect":
                    it = command.expect
                    ready = transfer_pb2.RankReady(room=it.room, attempt=it.attempt, token=self._window[0], window=self._window)
                    yield transfer_pb2.AgentReport(rank_ready=ready)
                case "cancel":
                    yield transfer_pb2.AgentReport(drained=transfer_pb2.Drained(room=command.cancel.room))


class IdlePrefill(request_pb2_grpc.PrefillSchedulerServicer):
    """The prefill scheduler: a prompt is handed over as soon as decode has a place for it."""

    def __init__(self, model_name: str, max_model_len: int, verify_width: int, tp_size: int):
        self._model = request_pb2.DescribeReply(
            model_name=model_name, model_fingerprint="idle", vocab_size=VOCABULARY, max_model_len=max_model_len,
            max_prompt_tokens=max_model_len, end_token_ids=[VOCABULARY - 1],
        )  # fmt: skip
        self._hello = request_pb2.PrefillHello(
            engine_id="prefill-0", engine_epoch=EPOCH, stages=1, tp_size=tp_size, agents=["nowhere:1"] * tp_size,
            model_fingerprint="idle", verify_width=verify_width, max_model_len=max_model_len,
        )  # fmt: skip
        self._rooms = count(1)
        self._reserved: dict[int, asyncio.Future[request_pb2.ReserveReply]] = {}
        self._installed: dict[int, asyncio.Event] = {}
        self._channel: Any = None
        self._pair: Any = None
        self._writing = asyncio.Lock()  # a stream takes one message at a time

    async def pair(self, decode_address: str) -> None:
        """Introduce ourselves to the decode scheduler. EngineLost if it does not take us."""
        self._channel = open_channel(decode_address)
        stub: Any = request_pb2_grpc.DecodeSchedulerStub(self._channel)
        self._pair = stub.Pair(wait_for_ready=True)
        await self._pair.write(request_pb2.PrefillToDecode(hello=self._hello))
        async with asyncio.timeout(HELLO_S):
            answer = await self._pair.read()
        if not isinstance(answer, request_pb2.DecodeToPrefill) or answer.WhichOneof("message") != "hello":
            raise EngineLost(f"the decode scheduler does not pair: {answer}")
        self._model.decode_address = answer.hello.client_address
        self._model.ready = True

    async def hear(self) -> None:
        """Take the decode scheduler's answers until `close`."""
        while isinstance(message := await self._pair.read(), request_pb2.DecodeToPrefill):
            match message.WhichOneof("message"):
                case "reserved":
                    self._reserved[message.reserved.room].set_result(message.reserved)
                case "installed":
                    self._installed[message.installed.room].set()
                case _:
                    continue

    async def close(self) -> None:
        if self._pair is not None:
            self._pair.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def Describe(self, request: request_pb2.DescribeRequest, context: Any) -> request_pb2.DescribeReply:
        return self._model

    async def Inspect(self, request: common_pb2.InspectRequest, context: Any) -> common_pb2.InspectReply:
        return common_pb2.InspectReply(service="prefill-scheduler", engine_id="prefill-0", ready=self._model.ready)

    async def Submit(self, request: request_pb2.SubmitRequest, context: Any) -> AsyncIterator[request_pb2.RequestEvent]:
        room = next(self._rooms)
        reserved = self._reserved[room] = asyncio.get_running_loop().create_future()
        installed = self._installed[room] = asyncio.Event()
        reserve = request_pb2.Reserve(
            request_id=request.request_id, room=room, attempt=1, prompt_tokens=len(request.prompt) // 4, prompt_hash=bytes(32),
            sampling=request.sampling, timeout_ms=request.timeout_ms, tail=request.prompt,
        )  # fmt: skip
        async with self._writing:
            await self._pair.write(request_pb2.PrefillToDecode(reserve=reserve))
        reply = await reserved
        if not reply.accepted:
            raise Overloaded(f"the decode engine has no place for {request.request_id}: {reply.failure.message}")
        attached = request_pb2.Attached(decode_address=self._model.decode_address, room=room)
        yield request_pb2.RequestEvent(attached=attached)
        await installed.wait()
        yield request_pb2.RequestEvent(handed_over=request_pb2.HandedOver())


class Listener:
    """A client of many requests on one stream, which does nothing with their tokens: it shares the machine with the scheduler
    and its rounds, and they are what is measured."""

    def __init__(self, prefill_address: str):
        self._channels = [open_channel(prefill_address)]
        self._prefill: Any = request_pb2_grpc.PrefillSchedulerStub(self._channels[0])
        self._decode: Any = None
        self._opening = asyncio.Lock()

    async def submit(self, request_id: str, prompt: Sequence[int], sampling: common_pb2.Sampling) -> None:
        """Returns when decode has the request."""
        message = request_pb2.SubmitRequest(request_id=request_id, prompt=array("I", prompt).tobytes(), sampling=sampling)
        async for event in self._prefill.Submit(message):
            if event.HasField("attached"):
                attach = request_pb2.AttachRequest(request_id=request_id, room=event.attached.room)
                async with self._opening:  # a stream takes one message at a time
                    if self._decode is None:
                        self._channels.append(open_channel(event.attached.decode_address))
                        self._decode = request_pb2_grpc.DecodeSchedulerStub(self._channels[1]).Follow()  # pyright: ignore
                    await self._decode.write(request_pb2.FollowRequest(attach=attach))
            elif event.HasField("failure"):
                raise EngineLost(f"{request_id} was not handed over: {event.failure.message}")

    async def listen(self) -> NoReturn:
        """EngineLost when the stream or a request ends."""
        while isinstance(events := await self._decode.read(), request_pb2.FollowEvents) and not events.ends:
            pass
        raise EngineLost("a request ended while rounds were counted; give fewer --seconds")

    async def aclose(self) -> None:
        for channel in self._channels:
            await channel.close()
