"""The copier's thread on real memory: what it installs, and what it must not."""

import asyncio
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from services.kvtransfer.agent import Copier
from services.kvtransfer.credits import FrameId
from services.kvtransfer.frames import HostMemory
from services.kvtransfer.messages import Install, Installed, Units
from tests.lib.transfer import record

RECORD = record("decode")
UNITS = (Units((4,), (3, 1)),)
LENGTH = 2 * RECORD.fields[4].payload


@pytest.mark.parametrize("damaged", [False, True])
async def test_units_of_an_intact_frame_are_written_and_of_a_damaged_one_none(damaged: bool):
    arenas = [bytearray(b"\xee") * arena.length for arena in RECORD.arenas]
    memory = HostMemory(RECORD, arenas, 1, LENGTH)
    events: asyncio.Queue[Any] = asyncio.Queue()
    copier = Copier(memory, events.put_nowait, lambda effect, error: events.put_nowait(error))
    async with asyncio.timeout(5):
        memory.frame(0, LENGTH)[:] = 7
        copier.do(Install(FrameId(0), LENGTH, xxh3_64_intdigest(b"\x07" * LENGTH) ^ damaged, UNITS))
        assert await events.get() == Installed(FrameId(0), not damaged)
    copier.close()
    assert sum(arena.count(7) for arena in arenas) == (0 if damaged else LENGTH)
