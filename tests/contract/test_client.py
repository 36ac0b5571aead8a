"""The SDK against real gRPC servers that play a script: what a client of the mesh may count on."""

import asyncio
from array import array
from typing import Any

import pytest

from k3mesh.client import Client, Drafts, Finished, SamplingParams, Tokens
from k3mesh.errors import BadRequest, Cancelled, CapacityAborted, EngineLost, Overloaded
from k3mesh.sync import SyncClient
from k3mesh.v1 import common_pb2, request_pb2, request_pb2_grpc
from services.runtime.rpc_server import RpcServer
from tests.lib.follow import follow

Event = request_pb2.RequestEvent


class Prefill(request_pb2_grpc.PrefillSchedulerServicer):
    """Plays `script`; then, if told so, waits until the client is gone."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.requests: list[request_pb2.SubmitRequest] = []
        self.cancelled: list[str] = []
        self.hang = False
        self.gone = asyncio.Event()

    async def Submit(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                yield step
            if self.hang:
                await asyncio.Event().wait()
        finally:
            self.gone.set()

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.cancelled.append(request.request_id)
        return request_pb2.CancelReply(known=False)

    async def Inspect(self, request: Any, context: Any) -> Any:
        return common_pb2.InspectReply(service="prefill-scheduler", counters={"queued": 3})


class Decode(request_pb2_grpc.DecodeSchedulerServicer):
    def __init__(self) -> None:
        self.script: list[Any] = []

    async def Follow(self, request_iterator: Any, context: Any) -> Any:
        async for events in follow(self._play, request_iterator):
            yield events

    async def _play(self, request: Any, context: Any) -> Any:
        for step in self.script:
            yield step


class Mesh:
    def __init__(self) -> None:
        self.prefill, self.decode = Prefill(), Decode()
        self.p = RpcServer(
            "127.0.0.1:0",
            [(request_pb2_grpc.add_PrefillSchedulerServicer_to_server, self.prefill, "k3mesh.v1.PrefillScheduler")],
        )
        self.d = RpcServer(
            "127.0.0.1:0", [(request_pb2_grpc.add_DecodeSchedulerServicer_to_server, self.decode, "k3mesh.v1.DecodeScheduler")]
        )

    def hand_over(self) -> list[Any]:
        return [
            Event(queued=request_pb2.Queued(position=0)),
            Event(attached=request_pb2.Attached(decode_address=self.d.address, room=5)),
            Event(handed_over=request_pb2.HandedOver()),
        ]


@pytest.fixture
async def mesh():
    mesh = Mesh()
    await mesh.p.start()
    await mesh.d.start()
    yield mesh
    await mesh.p.stop(0)
    await mesh.d.stop(0)


@pytest.fixture
async def client(mesh: Mesh):
    async with Client(mesh.p.address) as client:
        yield client


def tokens(*ids: int) -> Any:
    return Event(tokens=request_pb2.TokenBatch(tokens=ids))


FINISHED = Event(finished=request_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP, prompt_tokens=2, completion_tokens=3,
                                               stop_token=9, matched_stop_token=True))  # fmt: skip


async def test_what_a_drafter_did_is_told_with_the_end(mesh, client):
    drafts = request_pb2.Drafts(windows=4, proposed=12, accepted=6, accepted_at=[3, 2, 1])
    end = Event(finished=request_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=3, drafts=drafts))
    mesh.prefill.script = mesh.hand_over()
    mesh.decode.script = [end]
    (finished,) = [event async for event in await client.submit([1])]
    assert finished.drafts == Drafts(4, 12, 6, (3, 2, 1)) and finished.drafts.acceptance_length == 2.5


async def test_tokens_follow_the_request_from_prefill_to_decode(mesh, client):
    mesh.prefill.script = mesh.hand_over()
    mesh.decode.script = [tokens(7), tokens(8, 9), FINISHED]
    stream = await client.submit([1, 70000], SamplingParams(max_tokens=3, seed=4), request_id="r.1")
    assert [event async for event in stream] == [Tokens((7,)), Tokens((8, 9)), Finished("stop", 2, 3, 0, 9)]
    request = mesh.prefill.requests[0]
    assert (request.request_id, list(array("I", request.prompt)), request.sampling.seed) == ("r.1", [1, 70000], 4)


async def test_a_request_that_ends_on_prefill_needs_no_decode(mesh, client):
    mesh.prefill.script = [*mesh.hand_over()[:2], tokens(9), FINISHED]
    assert [type(event) async for event in await client.submit([1, 2])] == [Tokens, Finished]


async def test_typed_errors_arrive_as_they_left(mesh, client):
    mesh.prefill.script = [Overloaded("the queue is full (8 requests); try again in 2 s", detail="QUEUE")]
    with pytest.raises(Overloaded, match="queue is full") as caught:
        async for _ in await client.submit([1]):
            pass
    assert caught.value.detail == "QUEUE" and caught.value.retryable
    mesh.prefill.script = mesh.hand_over()
    mesh.decode.script = [tokens(7), Event(failure=common_pb2.Failure(code="capacity_aborted", message="full"))]
    with pytest.raises(CapacityAborted):
        async for _ in await client.submit([1]):
            pass


async def test_a_stream_that_just_stops_is_an_error(mesh, client):
    mesh.prefill.script = mesh.hand_over()
    mesh.decode.script = [tokens(7)]
    with pytest.raises(EngineLost, match="ended without a result"):
        async for _ in await client.submit([1]):
            pass


async def test_a_mesh_that_is_not_there_is_named():
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(EngineLost, match=r"127\.0\.0\.1:1 does not answer"):
            async for _ in await client.submit([1]):
                pass


async def test_cancel_reaches_the_server_and_wakes_the_reader(mesh, client):
    mesh.prefill.script, mesh.prefill.hang = mesh.hand_over()[:1], True
    stream = await client.submit([1])
    reader = asyncio.ensure_future(anext(aiter(stream)))
    async with asyncio.timeout(5):
        while not mesh.prefill.requests:
            await asyncio.sleep(0.01)
        await stream.cancel()
        with pytest.raises(Cancelled):
            await reader
        await mesh.prefill.gone.wait()


@pytest.mark.parametrize(
    ("prompt", "params", "request_id", "names"),
    [
        ([-1], SamplingParams(), "a", "token ids"),
        ([1], SamplingParams(max_tokens=0), "a", "max_tokens = 0"),
        ([1], SamplingParams(temperature=-1.0), "a", "temperature"),
        ([1], SamplingParams(top_p=0.0), "a", "top_p"),
        ([1], SamplingParams(), "a b", "request_id 'a b'"),
    ],
)
async def test_bad_input_is_refused_before_it_travels(mesh, client, prompt, params, request_id, names):
    with pytest.raises(BadRequest, match=names):
        await client.submit(prompt, params, request_id=request_id)
    assert mesh.prefill.requests == []


async def test_the_blocking_client_does_the_same(mesh):
    mesh.prefill.script = mesh.hand_over()
    mesh.decode.script = [tokens(7), FINISHED]

    def blocking() -> list[Any]:
        with SyncClient(mesh.p.address) as client:
            assert client.cancel("unknown") is False
            assert client.inspect().counters == {"queued": 3}
            return list(client.submit([1, 2]))

    assert await asyncio.to_thread(blocking) == [Tokens((7,)), Finished("stop", 2, 3, 0, 9)]
    assert mesh.prefill.cancelled == ["unknown"]
