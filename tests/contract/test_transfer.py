"""Transfer agents as processes: real UCX, real shared pools, the worker's own socket end, schedulers played by the test."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from k3mesh.errors import BadRequest, EngineLost
from k3mesh.v1 import transfer_pb2
from services.contracts.geometry import blocks_for
from services.contracts.ids import SlotId
from services.kvtransfer.session import Limits
from services.runtime import channels
from tests.lib.ranks import free_address
from tests.lib.transfer import EPOCHS, ROOT, SMALL, AgentProcess, Handoff, Mesh, agent, handoff, mesh, record

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: Any) -> Any:
    """Two prefill stages and two decode replicas, paired; for tests that leave them at rest."""
    async with mesh(tmp_path_factory.mktemp("agents"), replicas=2) as made:
        yield made


async def run(it: Handoff) -> transfer_pb2.RankReady:
    it.fill_cached()
    await it.expect()
    await it.ready()
    it.prefill()
    return await it.finish()


def check_pools(decode: AgentProcess, wanted: list[np.ndarray]) -> None:
    for field, found, want in zip(decode.placement.fields, decode.pools.fields, wanted, strict=True):
        assert np.array_equal(found, want), f"{field.field_id}: units {np.flatnonzero((found != want).any(axis=1))} differ"


async def test_fifty_handoffs_are_byte_exact_and_touch_nothing_else(pair: Mesh):
    """Blocks and slots are reused at once on both sides; prompts, prefixes, chunks, intervals and P's own hits are random."""
    for room in range(1, 51):
        decode = pair.replicas[room % 2]
        it = handoff(pair, decode, room)
        before = decode.pools.snapshot()
        ready = await run(it)
        check_pools(decode, it.expected(before))
        it.scribble()
        positions = len(it.manifest.blocks)
        assert ready.bytes == sum(stage.placement.expected_bytes(positions) for stage in pair.stages)
        assert (ready.attempt, ready.token, list(ready.window)) == (1, it.token, [it.token])
        assert ready.cached_tokens == it.cached, "what prefill did not compute, whatever was here"
    await pair.at_rest()


async def test_rooms_at_once_on_two_replicas_do_not_mix(pair: Mesh):
    """Three rooms on each replica, more bytes than the staging rings hold, chunk by chunk in turns."""
    rooms: list[Handoff] = []
    blocks = [Random(n).sample(range(1, 24), 21) for n in range(2)]
    table = Random(3).sample(range(1, 24), 18)
    for number in range(6):
        replica, part = number % 2, number // 2
        decode = pair.replicas[replica]
        rooms.append(
            handoff(
                pair, decode, 100 + number, prompt=384, prefix=0, cached=0, slot=1 + part, p_slot=1 + number % 5,
                blocks=blocks[replica][7 * part : 7 * part + 7], table=table[3 * number : 3 * number + 3],
            )
        )  # fmt: skip
    rooms[5].slot = 1  # P has five slots: the last room takes the first one's when that is released
    before = [decode.pools.snapshot() for decode in pair.replicas]
    for it in rooms[:5]:
        it.chunk_tokens = 128
        await it.expect()
    for it in rooms[:5]:
        await it.ready()
    for chunk in range(3):
        for it in rooms[:5]:
            it.prefill(it.chunks()[chunk : chunk + 1])
    for it in rooms[:5]:
        await it.finish()
    wanted = before
    for it in rooms[:5]:
        wanted[it.manifest.replica] = it.expected(wanted[it.manifest.replica])
    await run(rooms[5])
    wanted[1] = rooms[5].expected(wanted[1])
    for decode, want in zip(pair.replicas, wanted, strict=True):
        check_pools(decode, want)
    await pair.at_rest()


STATES = ("expected", "accepted", "first chunk", "all but the token", "done")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("side", ["D", "P"])
async def test_a_cancel_in_any_state_drains_both_sides(pair: Mesh, side: str, state: str):
    room = 200 + 10 * STATES.index(state) + (side == "P")
    decode = pair.replicas[0]
    it = handoff(pair, decode, room, prompt=1000, prefix=0, cached=0)
    it.chunk_tokens = 128
    await it.expect()
    if state != "expected":
        await it.ready()
    if state == "first chunk":
        it.prefill(it.chunks()[:1])
    elif state == "all but the token":
        it.prefill(it.chunks()[:-1])
        start, end = it.chunks()[-1]
        it._run(pair.stages[0], start, end, True, it.table[blocks_for(start) :])
    elif state == "done":
        it.prefill()
        await it.finish()
    canceller = decode if side == "D" else pair.stages[0]
    await canceller.cancel(room)
    await canceller.cancel(room)  # idempotent
    await canceller.until("drained", room)
    if state != "done":
        for other in pair.agents:
            if other in (decode, pair.stages[0]) or other.told("ready", room):
                await other.until("drained", room)
        assert not decode.told("rank_ready", room)
    await pair.at_rest()
    await run(handoff(pair, decode, room + 1000))
    await pair.at_rest()


async def test_what_comes_late_for_an_ended_room_changes_nothing(pair: Mesh):
    decode = pair.replicas[0]
    it = handoff(pair, decode, 300, prompt=300)
    await it.expect()
    await it.ready()
    await decode.cancel(300)
    await decode.until("drained", 300)
    for stage in pair.stages:
        await stage.until("drained", 300)
    before = decode.pools.snapshot()
    stale = (await decode.inspect()).totals["stale_messages"]
    it.prefill()  # the chunks that were in flight on P go on
    await it.expect()
    await run(handoff(pair, pair.replicas[1], 301))
    assert (await decode.inspect()).totals["stale_messages"] == stale + 1
    check_pools(decode, before)
    assert not decode.told("rank_ready", 300)
    await pair.at_rest()


async def test_a_manifest_that_breaks_the_rules_fails_with_its_code(pair: Mesh):
    decode = pair.replicas[0]
    await handoff(pair, decode, 310, manifest=dict(decode_epoch=1)).expect()
    assert (await decode.until("failed", 310)).failure.detail == "PD_STALE"
    wrong = handoff(pair, decode, 311)
    wrong.manifest = replace(wrong.manifest, slot=SlotId(99))
    await wrong.expect()
    failed = await decode.until("failed", 311)
    assert (failed.failure.code, failed.failure.detail) == ("transfer_failed", "PD_MANIFEST")
    assert "slot 99" in failed.failure.message
    await decode.until("drained", 311)


async def test_pairing_twice_is_answered_twice(pair: Mesh):
    decode = pair.replicas[1]
    await pair.pair(decode)
    assert sum(report.WhichOneof("report") == "paired" for report in decode.reports) == 2
    await run(handoff(pair, decode, 320))


async def test_an_agent_tells_who_it_is_and_what_it_holds(pair: Mesh):
    for it in pair.agents:
        assert (it.hello.engine_id, it.hello.engine_epoch) == (it.placement.engine_id, EPOCHS[it.placement.role])
        assert it.hello.staging_bytes == Limits(**SMALL).staging_bytes > SMALL["frames"] * SMALL["frame_bytes"]
        reply = await it.inspect()
        assert (reply.service, reply.rank, reply.ready) == ("agent", it.placement.global_rank, True)
        frames = "staging_frames_used" if it.placement.role == "decode" else "frames_offered"
        assert {"rooms", "pins", frames, "quarantined", "links", "tasks", "transfers"} <= set(reply.counters)
        assert {"bytes_sent", "bytes_received", "frames", "rooms_ok", "rooms_failed", "stale_messages"} == set(reply.totals)
        assert not Path(it.socket).stat().st_mode & 0o077, "the socket is the owner's alone"


async def test_only_one_scheduler_drives_an_agent_and_introduces_itself_first(pair: Mesh):
    stub = pair.replicas[0].stub
    for first, told in (
        (transfer_pb2.AgentCommand(fence=1, introduce=transfer_pb2.IntroduceAgent(scheduler="other")), "drives this agent"),
        (transfer_pb2.AgentCommand(fence=1, pair=transfer_pb2.PairWith()), "IntroduceAgent"),
        (transfer_pb2.AgentCommand(fence=0, introduce=transfer_pb2.IntroduceAgent(scheduler="old")), "fence 0 is below 1"),
    ):
        drive = stub.Drive()
        await drive.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await drive.read()
        error = channels.translate(refused.value, "agent")
        assert isinstance(error, BadRequest) and told in error.message
    assert (await pair.replicas[0].inspect()).ready


async def test_an_idle_agent_takes_less_than_a_hundredth_of_a_core(pair: Mesh):
    """After all that went over it; its links stand and beat."""
    await run(handoff(pair, pair.replicas[0], 330))
    await pair.at_rest()
    window, agents = 5.0, [(it.process.pid, it.mover) for it in pair.agents]
    before = [sum(map(cpu_seconds, pids)) for pids in agents]
    await asyncio.sleep(window)
    used = [sum(map(cpu_seconds, pids)) - at for pids, at in zip(agents, before, strict=True)]
    assert max(used) < 0.01 * window, used


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process so far."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


async def test_a_pair_that_does_not_fit_is_refused_naming_the_field(tmp_path: Path):
    async with agent(record("prefill", 0, stages=1), tmp_path) as stage, agent(record("decode", verify_width=8), tmp_path) as d:
        await Mesh([stage], [d]).pair(d)
        refusal = await d.until("pair_refused")
        assert (refusal.code, refusal.detail) == ("config_error", "PD_CONTRACT")
        assert "verify_width is 1 on prefill-0 rank 0 and 8 on decode-0 rank 0" in refusal.message
        await stage.until_counters(lambda counters: counters["links"] == 0)


async def test_a_decode_agent_with_smaller_frames_is_refused(tmp_path: Path):
    async with (
        agent(record("prefill", 0, stages=1), tmp_path, frame_bytes=128 << 10) as stage,
        agent(record("decode"), tmp_path) as d,
    ):
        await Mesh([stage], [d]).pair(d)
        refusal = await d.until("pair_refused")
        assert refusal.detail == "PD_CONTRACT" and "131072" in refusal.message and "65536" in refusal.message


async def test_an_agent_of_another_epoch_is_no_pair(tmp_path: Path):
    async with agent(record("prefill", 0, stages=1), tmp_path) as stage, agent(record("decode"), tmp_path) as d:
        pair = transfer_pb2.PairWith(engine_id="prefill-0", engine_epoch=99, agents=[stage.address])
        await d.command(pair=pair)
        await stage.until_counters(lambda counters: counters["links"] == 0)
        await Mesh([stage], [d]).pair(d)  # a newer word takes its place
        await d.until("paired")


async def test_the_export_of_another_rank_is_refused(tmp_path: Path):
    with pytest.raises(EngineLost, match="refused the export"):
        async with agent(record("decode"), tmp_path, as_rank=1):
            pass
    log = (tmp_path / "decode-0.log").read_text()
    assert "give each worker its own agent's socket" in log.splitlines()[-1]


async def test_a_frame_smaller_than_a_unit_is_refused_at_start(tmp_path: Path):
    with pytest.raises(EngineLost, match="refused the export"):
        async with agent(record("decode"), tmp_path, frame_bytes=8192):
            pass
    assert "--transfer-frame-bytes 8192" in (tmp_path / "decode-0.log").read_text().splitlines()[-1]


async def test_an_agent_ends_with_its_worker_and_says_so_last(tmp_path: Path):
    async with agent(record("decode"), tmp_path) as d:
        d.worker.close()
        fatal = await d.until("fatal")
        assert fatal.code == "engine_lost" and "worker is gone" in fatal.message
        async with asyncio.timeout(10):
            assert await d.process.wait() == 3


async def test_an_agent_ends_with_its_scheduler(tmp_path: Path):
    async with agent(record("decode"), tmp_path) as d:
        d.drive.cancel()
        async with asyncio.timeout(10):
            assert await d.process.wait() == 3


async def test_an_older_fence_ends_the_agent(tmp_path: Path):
    async with agent(record("decode"), tmp_path) as d:
        await d.drive.write(transfer_pb2.AgentCommand(fence=0))
        assert "another scheduler holds the lease" in (await d.until("fatal")).message


async def test_an_agent_that_is_told_to_stop_ends_its_links_and_exits_cleanly(tmp_path: Path):
    async with mesh(tmp_path, stages=1) as made:
        made.stages[0].process.terminate()
        async with asyncio.timeout(10):
            assert await made.stages[0].process.wait() == 0
        await made.replicas[0].until_counters(lambda counters: counters["links"] == 0)
        made.replicas[0].process.terminate()
        async with asyncio.timeout(10):
            assert await made.replicas[0].process.wait() == 0


async def test_the_service_itself_waits_for_its_worker_and_says_when_none_comes(tmp_path: Path):
    flags = ["--model", str(tmp_path), "--disaggregation-mode", "decode", "--max-num-seqs", "4", "--rank", "0"]
    flags += ["--listen", free_address(), "--agent-socket", str(tmp_path / "a.sock"), "--startup-timeout", "0.2"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.kvtransfer.main", *flags, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 3
    assert errors.decode().splitlines()[-1].startswith(f"error: no worker exported its pools at {tmp_path}/a.sock within 0.2 s")
    assert not (tmp_path / "a.sock").exists()
