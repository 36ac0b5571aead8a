"""Movers that die or stop in the middle of a handoff, and agents that leave theirs alone."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.faults.test_transfer_faults import complete, start, until_held
from tests.lib.transfer import agent, mesh, record, until_gone


@pytest.mark.parametrize("victim", ["P", "D"])
async def test_a_mover_killed_among_the_frames_ends_its_agent_and_the_rooms_of_its_peers(tmp_path: Path, victim: str):
    async with mesh(tmp_path, damage="hold") as made:
        decode, stage = made.replicas[0], made.stages[0]
        await start(made, decode, 1)
        await until_held(made)
        lost, witness = (stage, decode) if victim == "P" else (decode, stage)
        os.kill(lost.mover, signal.SIGKILL)
        fatal = await lost.until("fatal")
        assert fatal.message == "this agent's mover was killed by SIGKILL; the engine must restart"
        async with asyncio.timeout(10):
            assert await lost.process.wait() == 1
        assert (await witness.until("failed", 1)).failure.detail == "PD_PEER_DEAD"
        for it in made.agents:
            if it is not lost:
                await it.until_counters(lambda counters: not any(counters.values()))


@pytest.mark.parametrize("victim", ["P", "D"])
async def test_a_stopped_mover_is_named_by_the_deadline_of_the_frames_that_wait_for_it(tmp_path: Path, victim: str):
    """Its agent lives and beats. When it runs again, all is given back and the pair links again."""
    async with mesh(tmp_path, progress=0.5, drain=0.3) as made:
        decode, stage = made.replicas[0], made.stages[0]
        await complete(made, decode, 1)
        stopped = (stage if victim == "P" else decode).mover
        os.kill(stopped, signal.SIGSTOP)
        try:
            await start(made, decode, 2)
            failed = await decode.until("failed", 2)
            assert failed.failure.detail == "PD_TIMEOUT_WAIT"
            assert "a granted frame of stage 0 did not come in 0.5 s" in failed.failure.message
        finally:
            os.kill(stopped, signal.SIGCONT)
        for it in (decode, stage):
            await it.until("drained", 2)
        await decode.until_counters(lambda counters: counters["links"] == 2)
        await made.at_rest()
        await complete(made, decode, 3)
        await made.at_rest()


async def test_a_mover_that_stays_stopped_ends_its_agent(tmp_path: Path):
    async with mesh(tmp_path, progress=0.5, drain=0.3, answer=1.0) as made:
        decode, stage = made.replicas[0], made.stages[0]
        stopped = stage.mover
        os.kill(stopped, signal.SIGSTOP)
        await start(made, decode, 1)
        assert "mover did not answer within 1 s" in (await stage.until("fatal")).message
        async with asyncio.timeout(15):
            assert await stage.process.wait() == 1
        await until_gone(stopped)
        await decode.until_counters(lambda counters: not any(counters.values()))


@pytest.mark.parametrize("state", ["running", "stopped"])
async def test_a_mover_does_not_outlive_its_agent(tmp_path: Path, state: str):
    async with agent(record("decode"), tmp_path) as it:
        mover = it.mover
        if state == "stopped":
            os.kill(mover, signal.SIGSTOP)
        await it.kill()
        await until_gone(mover)
