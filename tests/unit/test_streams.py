"""What a served stream still has to send."""

import asyncio

import pytest

from services.scheduler import streams
from services.scheduler.streams import Outbox


async def test_messages_go_out_in_order_and_the_stream_ends_after_the_last():
    outbox = Outbox[int]()
    outbox.put(1)

    async def read() -> list[int]:
        return [message async for message in outbox.sending()]

    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    outbox.put(2)
    outbox.put(3)
    outbox.close()
    outbox.put(4)
    assert await reading == [1, 2, 3]


async def test_a_reader_that_takes_nothing_loses_its_stream(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "WRITE_S", 0.05)
    outbox = Outbox[int]()
    outbox.put(1)

    async def stuck() -> None:
        async for _ in outbox.sending():
            await asyncio.Event().wait()  # as a write does that the peer's flow control holds up

    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await asyncio.ensure_future(stuck())


async def test_a_reader_that_waits_for_messages_keeps_its_stream(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "WRITE_S", 0.0)
    outbox = Outbox[int]()

    async def read() -> list[int]:
        return [message async for message in outbox.sending()]

    reading = asyncio.ensure_future(read())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reading.done()
    outbox.close()
    assert await reading == []
