"""Start, pairing, loss and end of the decode scheduler's process: real gRPC, real Redis, scripted peers."""

import asyncio

import grpc.aio
import pytest

from k3mesh.errors import ConfigError, EngineLost, TransferFailed
from k3mesh.v1 import common_pb2, request_pb2, worker_pb2
from services.runtime.channels import failure
from tests.lib.decode_peers import FIRST, DecodePeers, PrefillEnd
from tests.lib.decode_process import RunningDecode, journalled, rest_of, until
from tests.lib.redis_server import RedisServer
from tests.lib.scheduler_process import PATIENCE_S


@pytest.fixture
async def peers():
    peers = DecodePeers()
    await peers.start()
    yield peers
    await peers.stop()


@pytest.fixture
def short_drain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.scheduler.decode.main.DRAIN_S", 0.1)


@pytest.fixture
async def scheduler(peers: DecodePeers, journal: RedisServer):
    running = RunningDecode(peers, journal.url)
    await running.ready()
    yield running
    await running.stop()


@pytest.fixture
async def prefill(scheduler: RunningDecode):
    prefill = await scheduler.paired()
    yield prefill
    prefill.hang_up()


# ---- start
async def test_it_introduces_itself_with_its_fence_and_serves_when_all_have_said_hello(scheduler, peers):
    firsts = [end.lines.heard[0] for end in (*peers.workers, *peers.agents)]
    assert {first.introduce.scheduler for first in firsts} == {"decode-0 decode-scheduler"}
    assert {first.fence for first in firsts} == {1}
    seen = await scheduler.inspect()
    assert (seen.engine_id, seen.engine_epoch, seen.ready) == ("decode-0", 43, False)
    assert seen.not_ready_reason == "no prefill engine is paired"


@pytest.mark.parametrize(
    ("kind", "field", "value", "told"),
    [
        ("agents", "rank", 7, "expected rank 1 of decode-0 and found rank 7"),
        ("agents", "engine_id", "decode-9", "found rank 1 of decode-9"),
        ("workers", "model_fingerprint", "other", "disagree on model_fingerprint"),
        ("agents", "placement_fingerprint", "other", "records have placement fingerprints"),
        ("workers", "rank", 1, "expected rank 2 of decode-0 and found rank 1"),
    ],
)
async def test_an_engine_whose_parts_disagree_is_refused(peers, journal, kind, field, value, told):
    setattr(getattr(peers, kind)[1].hello, field, value)
    error = await RunningDecode(peers, journal.url).ended()
    assert isinstance(error, ConfigError) and told in error.message


async def test_ranks_of_two_epochs_are_no_engine(peers, journal):
    peers.agents[3].hello.engine_epoch = 44
    error = await RunningDecode(peers, journal.url).ended()
    assert isinstance(error, EngineLost) and "rank 3 lives in epoch 44" in error.message


async def test_a_part_that_never_answers_is_named_when_the_start_up_time_is_over(peers, journal):
    await peers.servers[peers.agents[2]].stop(0)
    error = await RunningDecode(peers, journal.url, startup_timeout="0.5").ended()
    assert isinstance(error, EngineLost)
    assert "decode agent 2" in error.message and "--startup-timeout 0.5" in error.message
    assert "decode agent 1" not in error.message


async def test_absent_redis_and_a_port_in_use_are_refused_at_once(peers, journal, scheduler):
    error = await RunningDecode(peers, "unix:///nowhere/redis.sock").ended()
    assert isinstance(error, ConfigError) and "--redis-url" in error.message
    error = await RunningDecode(peers, journal.url, listen=scheduler.address).ended()
    assert isinstance(error, ConfigError) and scheduler.address in error.message


# ---- pairing
async def test_each_agent_is_paired_with_the_prefill_agents_of_its_shard(scheduler, peers):
    prefill = await scheduler.paired(agents=["s0t0", "s0t1", "s1t0", "s1t1"])
    sources = [list(agent.pairs[0].agents) for agent in peers.agents]
    assert sources == [["s0t0", "s1t0"], ["s0t1", "s1t1"]] * 2
    assert {(agent.pairs[0].engine_id, agent.pairs[0].engine_epoch) for agent in peers.agents} == {("prefill-0", 42)}
    assert (await scheduler.inspect()).ready
    prefill.hang_up()


async def test_the_hello_tells_where_clients_attach_and_what_one_request_may_have(scheduler):
    prefill = PrefillEnd(scheduler.stub)
    hello = (await prefill.pair()).hello
    assert (hello.engine_id, hello.engine_epoch, hello.client_address) == ("decode-0", 43, scheduler.address)
    assert (hello.replicas, hello.tp_size, hello.verify_width) == (2, 2, 1)
    assert hello.max_request_tokens == hello.max_model_len == 1024
    prefill.hang_up()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tp_size": 4}, "attention tensor-parallel size: 4 on prefill-0 and 2 on decode-0"),
        ({"verify_width": 8}, "verify width: 8 on prefill-0 and 1 on decode-0"),
        ({"max_model_len": 4096}, "context length: 4096 on prefill-0 and 1024 on decode-0"),
        ({"model_fingerprint": "xyz"}, "model fingerprint: xyz on prefill-0 and abc on decode-0"),
        ({"agents": ["a:0"]}, "count of agents: 1 on prefill-0"),
    ],
)
async def test_an_engine_that_does_not_fit_is_refused_with_both_values(scheduler, changes, told):
    answer = await PrefillEnd(scheduler.stub, **changes).pair()
    assert answer.WhichOneof("message") == "refused"
    assert told in answer.refused.message and answer.refused.detail == "PD_CONTRACT"


async def test_the_agents_refusal_reaches_the_prefill_scheduler_and_it_may_come_again(scheduler, peers):
    peers.script.refuse_pairing = TransferFailed("field t.3.mla differs", detail="PD_CONTRACT")
    answer = await PrefillEnd(scheduler.stub).pair()
    assert (answer.refused.code, answer.refused.message) == ("transfer_failed", "field t.3.mla differs")
    peers.script.refuse_pairing = None
    await scheduler.paired()


async def test_a_restarted_prefill_engine_takes_the_place_of_the_old_one_and_never_the_reverse(scheduler, peers):
    peers.script.hold_ready = True
    old = await scheduler.paired(epoch=42)
    room = await old.reserved("r1")
    new = await scheduler.paired(epoch=50)
    await until(lambda: room in peers.agents[0].cancelled)
    await scheduler.until_counters(blocks_used=0)
    answer = await PrefillEnd(scheduler.stub, epoch=42).pair()
    assert "epoch 50 is paired already" in answer.refused.message
    await new.reserved("r2")
    new.hang_up()


async def test_another_prefill_engine_is_refused_until_the_one_that_is_paired_is_gone(scheduler, peers):
    first = await scheduler.paired()
    answer = await PrefillEnd(scheduler.stub, engine_id="prefill-9").pair()
    assert "decode-0 is paired with prefill-0; give prefill-9 one of its own" in answer.refused.message
    assert all(len(agent.pairs) == 1 for agent in peers.agents), "the agents left the engine that they were linked to"
    await first.reserved("r1")
    first.hang_up()
    async with asyncio.timeout(PATIENCE_S):
        while (await scheduler.inspect()).ready:
            await asyncio.sleep(0.01)
    second = await scheduler.paired(engine_id="prefill-9")
    second.hang_up()


async def test_a_pairing_whose_agents_gave_up_their_links_starts_again(scheduler, peers):
    peers.script.hold_ready = True
    prefill = await scheduler.paired()
    room = await prefill.reserved("r1")
    peers.agents[1].say(pair_refused=failure(EngineLost("the prefill agent at s1t1 does not answer")))
    assert await prefill.hear() is grpc.aio.EOF
    assert not (await scheduler.inspect()).ready
    await until(lambda: room in peers.agents[0].cancelled)
    again = await scheduler.paired()
    assert all(len(agent.pairs) == 2 for agent in peers.agents)
    again.hang_up()


# ---- loss
async def test_when_prefill_is_lost_its_waiting_rooms_end_and_residents_go_on(scheduler, prefill, peers, journal):
    peers.script.hold_rounds = True
    resident = await prefill.reserved("resident", max_tokens=5)
    living = scheduler.attach("resident", resident)
    assert (await prefill.hear()).installed.room == resident
    assert (await living.read()).tokens.tokens == [FIRST]
    peers.script.hold_ready = True
    waiting = await prefill.reserved("waiting")
    bereft = scheduler.attach("waiting", waiting)
    await scheduler.until_counters(client_streams=2)
    prefill.hang_up()
    assert [event.failure.code async for event in bereft] == ["engine_lost"]
    assert (await journalled(journal, "waiting", "FAILED"))[-1]["error"] == "engine_lost"
    peers.release_rounds()
    events = await rest_of(living)
    assert events[-1].finished.completion_tokens == 5
    await scheduler.at_rest()


@pytest.mark.parametrize("who", ["worker", "worker says so", "agent"])
async def test_when_a_part_is_lost_everyone_is_told_and_the_process_ends(scheduler, prefill, peers, journal, who):
    peers.script.hold_rounds = True
    resident = await prefill.reserved("resident", max_tokens=500)
    call = scheduler.attach("resident", resident)
    assert (await prefill.hear()).installed.room == resident
    await call.read()
    peers.script.hold_ready = True
    waiting = await prefill.reserved("waiting")
    if who == "worker":
        await peers.servers[peers.workers[1]].stop(0)
    elif who == "agent":
        await peers.servers[peers.agents[3]].stop(0)
    else:
        peers.workers[0].lines.say(worker_pb2.WorkerReport(failure=failure(EngineLost("rank 1 died"))))
    last = (await call.read()).failure
    assert last.code == "engine_lost" and last.retryable
    ended = (await prefill.hear()).ended
    assert (ended.room, ended.failure.code) == (waiting, "engine_lost")
    error = await scheduler.ended()
    assert isinstance(error, EngineLost)
    assert {"worker": "decode worker 2", "worker says so": "rank 1 died", "agent": "decode agent 3"}[who] in error.message
    assert (await journalled(journal, "resident", "FAILED"))[-1]["err_type"] == "503"


# ---- drain and end
async def test_drain_admits_nobody_and_answers_when_the_last_one_is_gone(scheduler, prefill, peers):
    peers.script.hold_rounds = True
    room = await prefill.reserved("r1", max_tokens=5)
    call = scheduler.attach("r1", room)
    assert (await prefill.hear()).installed.room == room
    early = await scheduler.stub.Drain(common_pb2.DrainRequest(timeout_ms=50))
    assert (early.drained, early.remaining) == (False, 1)
    await prefill.reserve("late")
    assert (await prefill.hear()).reserved.failure.code == "engine_lost"
    draining = asyncio.ensure_future(scheduler.stub.Drain(common_pb2.DrainRequest(timeout_ms=20_000)))
    peers.release_rounds()
    assert [event async for event in call][-1].HasField("finished")
    assert (await draining) == common_pb2.DrainReply(drained=True)


async def test_sigterm_lets_residents_finish_and_then_the_process_ends_well(scheduler, prefill, peers, journal):
    peers.script.hold_rounds = True
    room = await prefill.reserved("r1", max_tokens=5)
    call = scheduler.attach("r1", room)
    await call.read()
    scheduler.life.stopping.set()
    await until(lambda: len(peers.workers[0].held) == 2)  # one runs, one is planned behind it
    async with asyncio.timeout(10):
        while await scheduler.is_serving():
            await asyncio.sleep(0.01)
    peers.release_rounds()
    assert (await rest_of(call))[-1].finished.completion_tokens == 5
    assert await scheduler.ended() is None
    assert (await journalled(journal, "r1", "FINISHED"))[-1]["state"] == "FINISHED"


async def test_who_is_left_when_the_drain_is_over_gets_a_last_word(short_drain, scheduler, prefill, peers):
    peers.script.hold_rounds = True
    room = await prefill.reserved("r1", max_tokens=5)
    call = scheduler.attach("r1", room)
    await call.read()
    scheduler.life.stopping.set()
    last = await call.read()
    assert last.failure.code == "engine_lost" and "shut down" in last.failure.message
    assert await scheduler.ended() is None


async def test_before_the_engine_is_up_calls_are_answered_and_refused(peers, journal):
    await peers.servers[peers.agents[0]].stop(0)
    running = RunningDecode(peers, journal.url, startup_timeout="30")
    async with asyncio.timeout(10):
        while True:
            try:
                seen = await running.inspect()
                break
            except EngineLost:
                await asyncio.sleep(0.02)
    assert (seen.ready, seen.not_ready_reason) == (False, "the decode engine is starting")
    with pytest.raises(EngineLost):
        await running.client._call(running.stub.Cancel(request_pb2.CancelRequest(request_id="r1")), running.address)
    running.life.stopping.set()
    assert await running.ended() is None
    await running.stop()
