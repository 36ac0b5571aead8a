"""The event stream towards a client that reads slowly, or not at all."""

import asyncio
from typing import Any

import pytest

from k3mesh.errors import Cancelled
from services.gateway.stream import PART_BYTES, EventStream


class Client:
    """Takes messages while `takes` is set."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.takes.set()
        self.got: list[Any] = []

    async def send(self, message: Any) -> None:
        await self.takes.wait()
        self.got.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


async def run(stream: EventStream, client: Client) -> None:
    async with asyncio.timeout(5):
        await stream.run(client.send)
        await stream.end(client.send)


async def test_events_arrive_in_order_and_end_with_done():
    stream, client = EventStream(1 << 20), Client()
    stream.put({"n": 1})
    stream.put({"n": 2})
    stream.done()
    await run(stream, client)
    assert client.got[0]["status"] == 200
    assert client.body == b'data: {"n":1}\n\ndata: {"n":2}\n\ndata: [DONE]\n\n'
    assert client.got[-1]["more_body"] is False


async def test_nothing_is_sent_before_the_first_event():
    stream, client = EventStream(1 << 20), Client()
    async with asyncio.TaskGroup() as group:
        writer = group.create_task(stream.run(client.send))
        await asyncio.sleep(0)
        assert not stream.started and client.got == []
        writer.cancel()


async def test_a_client_that_falls_behind_the_bound_is_given_up():
    stream, client = EventStream(1000), Client()
    client.takes.clear()
    async with asyncio.TaskGroup() as group:
        writer = group.create_task(stream.run(client.send))
        with pytest.raises(Cancelled, match="reads too slowly"):
            for _ in range(100):
                stream.put({"text": "x" * 100})
                await asyncio.sleep(0)
        writer.cancel()


async def test_a_slow_client_within_the_bound_gets_everything_in_bounded_parts():
    stream, client = EventStream(1 << 20), Client()
    client.takes.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(run(stream, client))
        for number in range(1000):
            stream.put({"n": number, "text": "x" * 200})
        stream.done()
        await asyncio.sleep(0)
        client.takes.set()
    assert client.body.count(b"data: ") == 1001
    assert max(len(message.get("body", b"")) for message in client.got) <= PART_BYTES


async def test_a_client_that_takes_nothing_for_the_stall_timeout_is_given_up():
    stream, client = EventStream(1 << 20, stall_timeout=0.05), Client()
    client.takes.clear()
    stream.put({"n": 1})
    with pytest.raises(Cancelled, match="took nothing"):
        await run(stream, client)


async def test_a_failure_is_the_last_event_and_no_done_follows():
    stream, client = EventStream(1 << 20), Client()
    stream.put({"n": 1})
    stream.fail({"error": {"message": "lost"}})
    await run(stream, client)
    assert client.body == b'data: {"n":1}\n\ndata: {"error":{"message":"lost"}}\n\n'
