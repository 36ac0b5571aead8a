"""Strangers on the internal ports, and requests that nobody sane would send: each is refused by a typed error, and nobody else
notices."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from k3mesh.client import Client, SamplingParams, Tokens
from k3mesh.errors import BadRequest
from k3mesh.v1 import (
    common_pb2,
    request_pb2,
    request_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from services.contracts.placement import Placement
from services.runtime import wire
from tests.lib.load import assert_nothing_left, attempt
from tests.lib.mesh import Mesh, running_mesh

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
MOST = 2**32 - 1


@pytest.fixture(scope="module")
def running(checkpoint: Path) -> Iterator[Mesh]:
    with running_mesh(checkpoint) as mesh:
        yield mesh


@pytest.fixture
async def mesh(running: Mesh) -> AsyncIterator[Mesh]:
    """Answers as before once the test is over, by the same processes, and holds nothing."""
    before, truth = running.processes(), await attempt(running, [500, 600, 700], max_tokens=8)
    yield running
    assert await attempt(running, [500, 600, 700], max_tokens=8) == truth
    assert running.processes() == before, "a process died of it"
    await assert_nothing_left(running)


async def test_random_bytes_on_every_port(mesh: Mesh):
    chance = random.Random(5)
    frames = [
        chance.randbytes(3000), PREFACE + chance.randbytes(3000), PREFACE + b"\xff\xff\xff\x01\x05\0\0\0\1",
        b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95", b"",
    ]  # fmt: skip
    engines = [mesh.addresses[engine] for engine in ("prefill-0", "decode-0")]
    addresses = [address for it in engines for address in (it["scheduler"], *it["workers"], *it["agents"])]
    addresses += mesh.addresses["prefill-0"]["links"]

    async def throw(address: str, data: bytes) -> None:
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        writer.write_eof()
        try:
            async with asyncio.timeout(10):
                await reader.read()
        except ConnectionError:
            pass
        writer.close()

    await asyncio.gather(*(throw(address, data) for address in addresses for data in frames))


def submit(
    prompt: bytes = struct.pack("<3I", 5, 6, 7), request_id: str = "garbage", **sampling: Any
) -> request_pb2.SubmitRequest:
    how = common_pb2.Sampling(**{"max_tokens": 4, "top_p": 1.0} | sampling)
    return request_pb2.SubmitRequest(request_id=request_id, prompt=prompt, sampling=how)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (request_pb2.SubmitRequest(), "request_id ''"),
        (submit(request_id="<>&\"'%$#@!\n" * 5), "must be 1 to 64"),
        (submit(b"12345"), "5 bytes"),
        (submit(b""), "empty"),
        (submit(struct.pack("<2I", 5, 1024)), "token id 1024"),
        (submit(struct.pack("<I", MOST)), f"token id {MOST}"),
        (submit(struct.pack("<I", 5) * (1 << 20)), "1048576 prompt tokens exceed"),
        (submit(max_tokens=0), "max_tokens = 0"),
        (submit(max_tokens=MOST), f"max_tokens = {MOST}"),
        (submit(temperature=float("nan")), "temperature = nan"),
        (submit(temperature=float("inf")), "temperature = inf"),
        (submit(temperature=-1), "temperature = -1"),
        (submit(top_p=0), "top_p = 0"),
        (submit(top_p=float("nan")), "top_p = nan"),
        (submit(top_k=-5), "top_k = -5"),
        (submit(stop_token_ids=[MOST]), f"token id {MOST}"),
        (submit(stop_token_ids=[1] * 100_000), "100000 stop_token_ids"),
    ],
)
async def test_a_request_that_cannot_be_is_refused_naming_the_value(running: Mesh, message: Any, told: str):
    async with grpc.aio.insecure_channel(running.prefill_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await request_pb2_grpc.PrefillSchedulerStub(channel).Submit(message).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and told in (refused.value.details() or "")


async def test_a_message_of_hundreds_of_megabytes_is_refused_without_a_pause_of_the_others(mesh: Mesh):
    async with grpc.aio.insecure_channel(mesh.prefill_address, [("grpc.max_send_message_length", -1)]) as channel:
        huge = request_pb2_grpc.PrefillSchedulerStub(channel).Submit(submit(bytes(200 << 20)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await huge.read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_id_whose_prompt_is_on_its_way_is_refused_and_the_first_one_goes_on(mesh: Mesh):
    async with Client(mesh.prefill_address) as client:
        how = SamplingParams(max_tokens=3, ignore_eos=True)
        async with await client.submit([5] * 1900, how, request_id="twice") as first:
            async with asyncio.timeout(20):
                while not (await client.inspect()).counters["client_streams"]:
                    await asyncio.sleep(0.01)
            for _ in range(2):
                with pytest.raises(BadRequest, match="in use"):
                    await anext(aiter(await client.submit([5, 6, 7], how, request_id="twice")))
            assert sum([len(event.tokens) async for event in first if isinstance(event, Tokens)]) == 3


async def said(method: Any, *messages: Any) -> Any:
    """What a served stream answers to these messages: its first one, or the text of its refusal."""
    call = method()
    try:
        for message in messages:
            await call.write(message)
        await call.done_writing()
        async with asyncio.timeout(20):
            return await call.read()
    except grpc.aio.AioRpcError as error:
        return error.details()
    except asyncio.InvalidStateError:  # refused before all was written
        async with asyncio.timeout(20):
            await call.wait_for_connection()
            return await call.details()
    finally:
        call.cancel()


def framed(message: transfer_pb2.PeerMessage) -> bytes:
    data = message.SerializeToString()
    return struct.pack("<I", len(data)) + data


async def answered(address: str, data: bytes) -> transfer_pb2.PeerMessage:
    """What a prefill agent says to a link that begins like this and ends."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.write_eof()
    async with asyncio.timeout(20):
        (length,) = struct.unpack("<I", await reader.readexactly(4))
        answer = transfer_pb2.PeerMessage.FromString(await reader.readexactly(length))
        assert not await reader.read(), "the refusal is the last word"
    writer.close()
    return answer


async def test_streams_that_begin_wrongly_are_refused_on_every_internal_port(mesh: Mesh):
    command, agent, pair, link = (
        worker_pb2.WorkerCommand, transfer_pb2.AgentCommand, request_pb2.PrefillToDecode, transfer_pb2.PeerMessage,
    )  # fmt: skip
    worker_hello = command(fence=0, introduce=worker_pb2.Introduce(scheduler="stranger"))
    agent_hello = agent(fence=0, introduce=transfer_pb2.IntroduceAgent(scheduler="stranger"))
    for engine in ("prefill-0", "decode-0"):
        async with grpc.aio.insecure_channel(mesh.addresses[engine]["workers"][1]) as channel:
            drive = worker_pb2_grpc.WorkerControlStub(channel).Drive
            for messages in ([], [command()], [command(forget=worker_pb2.ForgetRooms(rooms=[1]))]):
                assert "first command on a stream is Introduce" in await said(drive, *messages)
            assert "another scheduler holds the lease" in await said(drive, worker_hello)
        async with grpc.aio.insecure_channel(mesh.addresses[engine]["agents"][1]) as channel:
            drive = transfer_pb2_grpc.TransferControlStub(channel).Drive
            for messages in ([], [agent()], [agent(cancel=request_pb2.CancelRoom(room=1))]):
                assert "first command on a stream is IntroduceAgent" in await said(drive, *messages)
            assert "another scheduler holds the lease" in await said(drive, agent_hello)
    hello, frames = link(hello=transfer_pb2.PeerHello()), link(frames=transfer_pb2.FrameBatch(room=1))
    for data in (
        b"",
        framed(link()),
        framed(frames),
        framed(hello),
        b"\xff" * 64,
        b"\3\0\0\0abc",
        framed(hello)[:-1] + b"\xff",
    ):
        assert (await answered(mesh.addresses["prefill-0"]["links"][1], data)).WhichOneof("message") == "refused"
    async with grpc.aio.insecure_channel(mesh.decode_address) as channel:
        stub = request_pb2_grpc.DecodeSchedulerStub(channel)
        for messages in ([], [pair()], [pair(reserve=request_pb2.Reserve(room=5))]):
            assert "first message of a Pair stream is PrefillHello" in await said(stub.Pair, *messages)
        assert (await said(stub.Pair, pair(hello=request_pb2.PrefillHello()))).WhichOneof("message") == "refused"
        for room, request_id in ((0, ""), (2**64 - 1, "x"), (1, "\0" * 5000)):
            answer = await stub.Attach(request_pb2.AttachRequest(request_id=request_id, room=room)).read()
            assert answer.failure.code == "not_found"
        assert not (await stub.Cancel(request_pb2.CancelRequest(request_id="nobody"))).known


async def test_another_prefill_engine_cannot_take_the_decode_engine_away(mesh: Mesh):
    async with Client(mesh.prefill_address) as client:
        model = await client.describe()
    hello = request_pb2.PrefillHello(
        engine_id="prefill-9", engine_epoch=2**63, stages=4, tp_size=1, agents=["127.0.0.1:1"] * 4,
        model_fingerprint=model.fingerprint, verify_width=1, max_model_len=model.max_model_len,
    )  # fmt: skip
    async with grpc.aio.insecure_channel(mesh.decode_address) as channel:
        answer = await said(request_pb2_grpc.DecodeSchedulerStub(channel).Pair, request_pb2.PrefillToDecode(hello=hello))
    assert "is paired with prefill-0" in answer.refused.message


@pytest.mark.parametrize("address", [b"", b"x", bytes(200), random.Random(6).randbytes(200)])
async def test_a_ucx_address_of_a_stranger_is_never_tried(mesh: Mesh, address: bytes):
    """UCX aborts the process on one that is none."""
    stranger = Placement(
        engine_id="stranger", role="decode", engine_epoch=5, stage=0, num_stages=1, tp_rank=0, tp_size=1, dp_rank=0, dp_size=1,
        global_rank=0, model_fingerprint="other", draft_fingerprint="", num_blocks=10, num_slots=4, verify_width=1,
        speculative_algorithm="NONE", layer_lo=0, layer_hi=1, arenas=(), fields=(),
    )  # fmt: skip
    hello = transfer_pb2.PeerHello(
        placement=wire.placement(stranger), ucx_address=address, link_id=7, link_epoch=3, frame_bytes=1 << 30
    )
    answer = await answered(mesh.addresses["prefill-0"]["links"][0], framed(transfer_pb2.PeerMessage(hello=hello)))
    assert "model_fingerprint" in answer.refused.message
