"""Agents that die, stop, or damage frames in the middle of a handoff. The survivors end every room, get every frame back, and
serve the next life."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.transfer import AgentProcess, Handoff, Mesh, agent, handoff, mesh, record

EPOCH_2 = dict(prefill=12, decode=23)


async def start(made: Mesh, decode: AgentProcess, room: int) -> Handoff:
    """A request of many frames whose prefill has run; with `damage="hold"` stage 0's third frame stays in flight."""
    it = handoff(made, decode, room, prompt=1200, prefix=0, cached=0)
    await it.expect()
    await it.ready()
    it.prefill()
    return it


async def until_held(made: Mesh) -> None:
    """Stage 0's third frame was granted and does not come: it has sent three others since."""
    await made.stages[0].until_inspected(lambda reply: reply.totals["frames"] >= 3)


async def complete(made: Mesh, decode: AgentProcess, room: int) -> None:
    """A whole handoff, byte for byte."""
    it = handoff(made, decode, room, manifest=dict(decode_epoch=decode.placement.engine_epoch))
    before = decode.pools.snapshot()
    it.fill_cached()
    await it.expect()
    await it.ready()
    it.prefill()
    await it.finish()
    assert all(map(np.array_equal, decode.pools.fields, it.expected(before)))


async def test_a_damaged_frame_fails_its_room_alone(tmp_path: Path):
    async with mesh(tmp_path, damage="flip") as made:
        decode = made.replicas[0]
        await start(made, decode, 1)
        failed = await decode.until("failed", 1)
        assert (failed.failure.code, failed.failure.detail) == ("transfer_failed", "PD_BYTES")
        assert "checksum" in failed.failure.message
        for it in made.agents:
            await it.until("drained", 1)
        assert (await made.stages[0].until("failed", 1)).failure.detail == "PD_BYTES", "P learns why"
        assert not decode.told("rank_ready", 1)
        await made.at_rest()
        await complete(made, decode, 2)
        await made.at_rest()


async def test_a_dead_decode_agent_frees_p_and_its_next_life_is_served(tmp_path: Path):
    async with mesh(tmp_path, damage="hold") as made:
        decode = made.replicas[0]
        await start(made, decode, 1)
        await until_held(made)
        await decode.kill()
        for stage in made.stages:
            if not stage.told("released", 1):
                assert (await stage.until("failed", 1)).failure.detail == "PD_PEER_DEAD"
                await stage.until("drained", 1)
        for stage in made.stages:
            await stage.until_counters(lambda counters: not any(counters.values()))
        async with agent(record("decode", engine_epoch=EPOCH_2["decode"]), tmp_path / "2") as again:
            made.replicas = [again]
            await made.pair(again)
            await again.until("paired")
            await complete(made, again, 2)
            await made.at_rest()


async def test_a_dead_prefill_agent_fails_the_room_everywhere_and_its_next_life_is_paired(tmp_path: Path):
    async with mesh(tmp_path, damage="hold") as made:
        decode = made.replicas[0]
        before = decode.pools.snapshot()
        it = await start(made, decode, 1)
        await until_held(made)
        await made.stages[0].kill()
        assert (await decode.until("failed", 1)).failure.detail == "PD_PEER_DEAD"
        await decode.until("drained", 1)
        await decode.until_counters(lambda counters: not any(counters.values()))
        assert not decode.told("rank_ready", 1)
        others = [n for n in range(decode.placement.num_blocks) if n not in it.manifest.blocks]
        mla = [n for n, field in enumerate(decode.placement.fields) if field.kind == "paged"]
        assert all(np.array_equal(decode.pools.fields[n][others], before[n][others]) for n in mla)
        await made.stages[1].until_counters(lambda counters: not any(counters.values()))
        late = handoff(made, decode, 2)
        await late.expect()
        assert (await decode.until("failed", 2)).failure.detail == "PD_PEER_DEAD", "nobody to ask: refused at once"
        await made.stages[1].kill()  # an engine restarts as a whole
        async with (
            agent(record("prefill", 0, engine_epoch=EPOCH_2["prefill"]), tmp_path / "2") as first,
            agent(record("prefill", 1, engine_epoch=EPOCH_2["prefill"]), tmp_path / "2") as second,
        ):
            made.stages = [first, second]
            await made.pair(decode, epoch=EPOCH_2["prefill"])
            await complete(made, decode, 3)
            await made.at_rest()


@pytest.mark.parametrize("victim", ["P", "D"])
async def test_a_stopped_agent_is_named_by_its_peers_after_two_heartbeats(tmp_path: Path, victim: str):
    """UCX reports nothing of a process that does not run; the link's silence does. When it runs again it is paired again."""
    async with mesh(tmp_path, damage="hold", beat=1.0) as made:
        decode, stage = made.replicas[0], made.stages[0]
        await start(made, decode, 1)
        await until_held(made)
        stopped, witness = (stage, decode) if victim == "P" else (decode, stage)
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            failed = await witness.until("failed", 1)
            assert failed.failure.detail == "PD_PEER_DEAD"
            assert f"the link to {stopped.placement.name} is lost: 2 heartbeats missed" in failed.failure.message
            await witness.until("drained", 1)
            await witness.until_counters(lambda counters: not any(counters.values()))
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        await stopped.until("drained", 1)
        await decode.until_counters(lambda counters: counters["links"] == 2)
        await made.at_rest()


@pytest.mark.parametrize("side", ["D", "P"])
async def test_a_room_that_does_not_drain_is_fenced_by_cutting_its_link(tmp_path: Path, side: str):
    """A frame that was granted never comes: the endpoint is aborted, its memory comes back, and the pair links again."""
    async with mesh(tmp_path, damage="hold", drain=0.3) as made:
        decode = made.replicas[0]
        await start(made, decode, 1)
        await until_held(made)
        await (decode if side == "D" else made.stages[0]).cancel(1)
        for it in (decode, made.stages[0]):
            await it.until("drained", 1)
        await decode.until_counters(lambda counters: counters["links"] == 2)
        await made.at_rest()


async def test_a_link_that_is_cut_costs_no_other_room_a_byte(tmp_path: Path):
    """One room is stuck and its link is cut; the other, which has begun over that link, is sent whole over the next."""
    async with mesh(tmp_path, damage="hold", drain=0.3) as made:
        decode = made.replicas[0]
        stuck = await start(made, decode, 1)
        await until_held(made)
        free = [n for n in range(1, decode.placement.num_blocks) if n not in stuck.manifest.blocks]
        table = [n for n in range(1, made.stages[0].placement.num_blocks) if n not in stuck.table]
        slot, p_slot = 1 + stuck.manifest.slot % 5, 1 + stuck.slot % 5
        other = handoff(
            made, decode, 2, prompt=1100, prefix=0, cached=0, blocks=free[:9], table=table[:9], slot=slot, p_slot=p_slot
        )
        before = decode.pools.snapshot()
        await other.expect()
        await other.ready()
        other.prefill(other.chunks()[:1])
        await made.stages[1].until_inspected(lambda reply: reply.totals["frames"] > 0)
        await decode.cancel(1)
        for it in (decode, made.stages[0]):
            await it.until("drained", 1)
        other.prefill(other.chunks()[1:])
        await other.finish()
        wanted = other.expected(before)
        for index, it in enumerate(decode.placement.fields):  # the stuck room's units hold whatever had come
            units = list(other.manifest.blocks) if it.kind == "paged" else [other.manifest.slot]
            assert np.array_equal(decode.pools.fields[index][units], wanted[index][units]), it.field_id
        assert all(not it.told("failed", 2) for it in made.agents)
        await made.at_rest()


async def test_a_granted_frame_that_does_not_come_fails_the_room_in_time(tmp_path: Path):
    async with mesh(tmp_path, damage="hold", drain=0.3, progress=0.5) as made:
        decode = made.replicas[0]
        await start(made, decode, 1)
        failed = await decode.until("failed", 1)
        assert failed.failure.detail == "PD_TIMEOUT_WAIT"
        for it in (decode, made.stages[0]):
            await it.until("drained", 1)
        await made.at_rest()


async def test_the_death_of_a_worker_ends_its_agent_and_the_rooms_of_its_peers(tmp_path: Path):
    async with mesh(tmp_path) as made:
        decode = made.replicas[0]
        it = handoff(made, decode, 1, prompt=1000, prefix=0, cached=0)
        await it.expect()
        await it.ready()
        it.prefill(it.chunks()[:1])
        made.stages[1].worker.close()
        await made.stages[1].until("fatal")
        async with asyncio.timeout(10):
            assert await made.stages[1].process.wait() == 3
        assert (await decode.until("failed", 1)).failure.detail == "PD_PEER_DEAD"
        for other in (decode, made.stages[0]):
            await other.until("drained", 1)
            await other.until_counters(lambda counters: not any(counters.values()))


@pytest.mark.parametrize("lives", [4, pytest.param(10, marks=pytest.mark.soak)])
async def test_many_lives_of_a_pairing_leave_nothing_behind(tmp_path: Path, lives: int):
    """Kill and restart the decode agent again and again under load; the prefill agents serve every life."""
    async with mesh(tmp_path, replicas=0) as made:
        room = 0
        for life in range(lives):
            changes: dict[str, Any] = dict(engine_epoch=100 + life)
            async with agent(record("decode", **changes), tmp_path / f"life-{life}") as decode:
                made.replicas = [decode]
                await made.pair(decode)
                await decode.until("paired")
                room += 1
                it = handoff(made, decode, room, manifest=dict(decode_epoch=100 + life))
                it.fill_cached()
                await it.expect()
                await it.ready()
                it.prefill()
                if life % 2:
                    await decode.kill()
                else:
                    await it.finish()
            for stage in made.stages:
                await stage.until_counters(lambda counters: not any(counters.values()))
