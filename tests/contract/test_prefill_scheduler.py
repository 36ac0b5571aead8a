"""The prefill scheduler's process, in this one: real gRPC, real Redis, peers that play a script at the far ends."""

import asyncio
import hashlib
import json
from typing import Any

import grpc.aio
import pytest

from k3mesh.client import Finished, SamplingParams, Tokens
from k3mesh.errors import BadRequest, Cancelled, ConfigError, DeadlineExceeded, EngineLost, TransferFailed
from k3mesh.v1 import common_pb2, request_pb2, request_pb2_grpc, transfer_pb2, worker_pb2
from services.scheduler.prefill.main import main
from tests.lib.prefill_peers import END, Peers, pack
from tests.lib.ranks import free_address
from tests.lib.redis_server import RedisServer
from tests.lib.scheduler_process import PATIENCE_S, RunningScheduler, log_of, until


class Running(RunningScheduler):
    service, stub_type = "k3mesh.v1.PrefillScheduler", request_pb2_grpc.PrefillSchedulerStub

    def __init__(self, peers: Peers, redis_url: str, **changes: str):
        flags = {
            "served-model-name": "k3", "disaggregation-mode": "prefill", "pipeline-parallel-size": str(len(peers.workers)),
            "max-num-seqs": "4", "chunked-prefill-size": "256", "max-model-len": "4096", "redis-url": redis_url,
            "workers": peers.addresses(peers.workers), "agents": peers.addresses(peers.agents),
            "decode-address": peers.decode.address,
        }  # fmt: skip
        super().__init__(main, flags | {name.replace("_", "-"): value for name, value in changes.items()})


@pytest.fixture
async def peers():
    peers = Peers()
    await peers.start()
    yield peers
    await peers.stop()


@pytest.fixture
async def scheduler(peers: Peers, journal: RedisServer):
    running = Running(peers, journal.url)
    await running.ready()
    yield running
    await running.stop()


def submission(prompt: list[int], request_id: str = "r1", **sampling: Any) -> request_pb2.SubmitRequest:
    given = common_pb2.Sampling(**({"max_tokens": 4, "top_p": 1.0} | sampling))
    return request_pb2.SubmitRequest(request_id=request_id, prompt=pack(prompt), sampling=given)


# ---- the road of a request
async def test_a_request_is_queued_attached_prefilled_in_chunks_and_handed_over(scheduler, peers, journal):
    prompt = [n % 90 for n in range(600)]
    events = [event async for event in scheduler.stub.Submit(submission(prompt, temperature=0.5, top_k=5, seed=9))]
    assert [event.WhichOneof("event") for event in events] == ["queued", "attached", "handed_over"]
    asked = peers.decode.reserved[0]
    assert events[1].attached == request_pb2.Attached(decode_address=peers.decode.address, room=asked.room)
    assert (asked.request_id, asked.attempt, asked.prompt_tokens) == ("r1", 1, 600)
    assert asked.prompt_hash == hashlib.sha256(pack(prompt)).digest()
    assert asked.sampling.top_k == 5 and 0 < asked.timeout_ms <= 600_000

    first, second = (worker.steps for worker in peers.workers)
    assert first == second, "all stages get the same steps"
    rows = [row for step in first for row in step.rows]
    assert b"".join(row.tokens for row in rows) == pack(prompt)
    assert [(row.start, row.end, row.last, row.HasField("sampling")) for row in rows] == [
        (0, 256, False, False), (256, 512, False, False), (512, 600, True, True),
    ]  # fmt: skip
    assert sorted(block for row in rows for block in row.new_blocks) == [1, 2, 3, 4, 5]
    await scheduler.at_rest()
    assert all(worker.forgotten == [asked.room] for worker in peers.workers)
    assert not any(agent.cancelled for agent in peers.agents)

    await until(lambda: len(log_of(journal, "r1")) == 5)
    log = log_of(journal, "r1")
    assert [entry["state"] for entry in log] == ["QUEUED", "BOOTSTRAPPING", "PREFILLING", "TRANSFERRING", "TRANSFERRING"]
    assert [chunk[:4] for chunk in json.loads(log[3]["chunks"])][:3] == [
        [0, 0, 256, 101.0],
        [1, 0, 256, 101.0],
        [0, 256, 512, 102.0],
    ]
    assert log[4]["bytes_sent"] == "2000"


async def test_every_command_carries_the_fence_of_the_lease(scheduler, peers):
    async for _ in await scheduler.client.submit([1, 2, 3]):
        pass
    commands = [command for end in (*peers.workers, *peers.agents) for command in end.lines.heard]
    assert len(commands) >= 6 and {command.fence for command in commands} == {1}


async def test_the_client_goes_on_at_the_decode_scheduler(scheduler):
    events = [event async for event in await scheduler.client.submit([1, 2, 3])]
    *answers, finished = events
    assert [token for answer in answers for token in answer.tokens] == [8, 9] and isinstance(finished, Finished)


async def test_a_request_that_ends_with_its_first_token_never_reaches_decode(scheduler, peers, journal):
    peers.script.first_token = END
    events = [event async for event in await scheduler.client.submit([1, 2, 3], request_id="short")]
    assert events == [Tokens((END,)), Finished("stop", 3, 1, 0, END)]
    await scheduler.at_rest()
    assert [cancel.finished_on_prefill for cancel in peers.decode.cancelled] == [True]
    await until(lambda: log_of(journal, "short")[-1]["state"] == "FINISHED")


async def test_requests_share_batches_and_leave_nothing(scheduler, peers):
    peers.script.hold_steps = True
    streams = [await scheduler.client.submit([n] * 100, SamplingParams(max_tokens=4)) for n in range(1, 9)]

    async def read(stream: Any) -> list[Any]:
        return [event async for event in stream]

    readers = [asyncio.ensure_future(read(stream)) for stream in streams]
    await until(lambda: len(peers.workers[0].held) == 3)
    assert (await scheduler.counters())["batches_in_flight"] == 3
    peers.release_steps()
    for events in await asyncio.gather(*readers):
        assert isinstance(events[-1], Finished)
    assert max(len(step.rows) for step in peers.workers[0].steps) > 1
    await scheduler.at_rest()


# ---- refusals
@pytest.mark.parametrize(
    ("message", "said"),
    [
        (submission([]), "the prompt is empty"),
        (request_pb2.SubmitRequest(request_id="r1", prompt=b"abc"), "prompt of 3 bytes"),
        (submission([1, 100]), "token id 100 is outside the vocabulary of 100"),
        (submission([1], stop_token_ids=[200]), "stop_token_ids: token id 200"),
        (submission([1], request_id="a b"), "request_id 'a b'"),
        (submission([1] * 4000, max_tokens=200), "4000 prompt tokens and max_tokens = 200"),
        (submission([1], temperature=-1.0), "temperature = -1.0"),
    ],
)
async def test_bad_input_is_a_status_with_the_value_and_the_rule(scheduler, peers, message, said):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in scheduler.stub.Submit(message):
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and said in str(caught.value.details())
    await scheduler.at_rest()
    assert not peers.decode.reserved


async def test_an_id_in_use_is_refused_and_the_first_request_goes_on(scheduler, peers):
    peers.script.hold_steps = True
    first = await scheduler.client.submit([1], request_id="twin")
    reader = asyncio.ensure_future(anext(aiter(first)))
    await until(lambda: peers.workers[0].held)
    with pytest.raises(BadRequest, match="'twin' is in use"):
        async for _ in await scheduler.client.submit([1], request_id="twin"):
            pass
    peers.release_steps()
    assert (await reader).tokens[0] == 8
    await first.cancel()


async def test_what_decode_refuses_for_good_reaches_the_client(scheduler, peers):
    peers.script.refuse = TransferFailed("this room is known", detail="PD_MANIFEST")
    with pytest.raises(TransferFailed, match="this room is known"):
        async for _ in await scheduler.client.submit([1]):
            pass
    await scheduler.at_rest()


async def test_a_refused_reservation_is_asked_again_when_capacity_is_free(scheduler, peers):
    peers.script.places = 0
    reader = asyncio.ensure_future(served(scheduler))
    await until(lambda: len(peers.decode.reserved) == 1)
    peers.script.places = 1
    peers.decode.lines.say(request_pb2.DecodeToPrefill(capacity=request_pb2.CapacityFreed()))
    assert await reader == 8
    assert len({asked.room for asked in peers.decode.reserved}) == 2


# ---- cancellation
async def test_a_client_that_leaves_during_the_prefill_frees_everything(scheduler, peers, journal):
    peers.script.hold_steps = True
    call = scheduler.stub.Submit(submission([1] * 2000))
    await until(lambda: len(peers.workers[0].held) == 3)
    call.cancel()
    await until(lambda: peers.decode.cancelled and all(agent.cancelled for agent in peers.agents))
    assert (await scheduler.counters())["blocks_used"] == 6, "launched steps may still write"
    peers.release_steps()
    await scheduler.at_rest()
    assert len(peers.workers[0].steps) == 3, "no new chunk"
    await until(lambda: log_of(journal, "r1")[-1]["state"] == "CANCELLED")


@pytest.mark.parametrize("road", ["rpc", "redis"])
async def test_a_cancel_by_id_ends_the_stream(scheduler, peers, journal, road):
    peers.script.hold_ready = True
    stream = await scheduler.client.submit([1, 2], request_id="r1")
    reader = asyncio.ensure_future(anext(aiter(stream)))
    await until(lambda: peers.decode.reserved)
    if road == "rpc":
        assert await scheduler.client.cancel("r1", "enough")
        said = "enough"
    else:
        with journal.client() as client:
            client.xadd("k3:cancel", {"request_id": "r1"})
        said = "asked for in the ledger"
    with pytest.raises(Cancelled, match=said):
        await reader
    await scheduler.at_rest()
    assert [cancel.room for cancel in peers.decode.cancelled] == [peers.decode.reserved[0].room]


async def test_a_cancel_of_what_is_not_here_goes_to_decode(scheduler, peers):
    assert await scheduler.client.cancel("on-decode")
    assert not await scheduler.client.cancel("nobody")
    assert peers.decode.asked_to_cancel == ["on-decode", "nobody"]


async def test_a_deadline_is_a_typed_error(scheduler, peers):
    peers.script.hold_ready = True
    message = submission([1])
    message.timeout_ms = 200
    events = [event async for event in scheduler.stub.Submit(message)]
    assert events[-1].failure.code == DeadlineExceeded.code
    await scheduler.at_rest()


async def test_a_room_that_fails_on_an_agent_is_one_typed_error(scheduler, peers):
    peers.script.hold_ready = True
    reader = asyncio.ensure_future(served(scheduler))
    await until(lambda: peers.decode.reserved)
    failed = transfer_pb2.RoomFailed(
        room=peers.decode.reserved[0].room,
        failure=common_pb2.Failure(code="transfer_failed", message="bytes differ", detail="PD_BYTES"),
    )
    peers.agents[1].lines.say(transfer_pb2.AgentReport(failed=failed))
    with pytest.raises(TransferFailed, match="bytes differ") as caught:
        await reader
    assert caught.value.detail == "PD_BYTES"
    await until(lambda: peers.decode.cancelled)
    assert peers.decode.cancelled[0].failure.detail == "PD_BYTES", "decode learns why"
    await scheduler.at_rest()


async def test_three_rooms_with_wrong_bytes_make_the_engine_unhealthy_and_new_requests_are_refused(scheduler, peers):
    damage = common_pb2.Failure(code="transfer_failed", message="bytes differ", detail="PD_BYTES")
    for room in range(3):
        assert await scheduler.is_serving()
        peers.agents[room % 2].lines.say(transfer_pb2.AgentReport(failed=transfer_pb2.RoomFailed(room=room, failure=damage)))
    async with asyncio.timeout(PATIENCE_S):
        while await scheduler.is_serving():
            await asyncio.sleep(0.01)
    assert "wrong bytes" in (await scheduler.client.describe()).not_ready_reason
    with pytest.raises(EngineLost, match="prefill-0 is unhealthy: at least 3 handoffs") as caught:
        await served(scheduler)
    assert caught.value.detail == "PD_BYTES"


# ---- what people ask
async def test_describe_tells_the_model_its_limits_and_the_decode_scheduler(scheduler, peers):
    model = await scheduler.client.describe()
    assert (model.name, model.fingerprint, model.vocab_size, model.end_token_ids) == ("k3", "abc", 100, (END,))
    assert (model.max_model_len, model.max_prompt_tokens) == (4096, 3999)
    assert model.ready and not model.not_ready_reason and model.decode_address == peers.decode.address


async def test_inspect_counts_what_must_return_to_zero(scheduler):
    async for _ in await scheduler.client.submit([1, 2, 3]):
        pass
    await scheduler.at_rest()
    inspection = await scheduler.client.inspect()
    assert set(inspection.counters) == {
        "queued", "reserving", "running", "transferring", "releasing", "blocks_used", "slots_used", "pins",
        "batches_in_flight", "client_streams", "tasks", "cached_blocks", "cached_checkpoints",
    }  # fmt: skip
    totals = inspection.totals
    assert (totals["requests_received"], totals["requests_handed_over"], totals["prompt_tokens"], totals["steps"]) == (
        1,
        1,
        3,
        1,
    )
    assert (inspection.service, inspection.engine_id, inspection.engine_epoch, inspection.ready) == (
        "prefill-scheduler", "prefill-0", 42, True,
    )  # fmt: skip


async def test_the_engine_is_found_in_redis_with_its_load(scheduler, journal):
    with journal.client() as client:
        await until(lambda: client.hget("k3:eng:prefill-0", "health") == "ready")
        entry: Any = client.hgetall("k3:eng:prefill-0")
    assert entry["role"] == "prefill" and entry["epoch"] == "42" and entry["queued"] == "0"


# ---- the decode scheduler comes and goes
async def test_without_a_decode_scheduler_the_engine_is_up_but_not_ready(peers, journal):
    await peers.stop_decode()
    running = Running(peers, journal.url)
    async with asyncio.timeout(PATIENCE_S):
        while "decode scheduler at" not in (reason := (await describe(running)).not_ready_reason):
            await asyncio.sleep(0.01)
    assert peers.decode.address in reason and not await running.is_serving()
    with pytest.raises(EngineLost, match="decode engine is not connected"):
        async for _ in await running.client.submit([1]):
            pass
    await peers.start_decode()
    await running.ready()
    assert await served(running) == 8
    await running.stop()


async def served(running: Running, request_id: str | None = None) -> Any:
    """The first token of a request."""
    async with await running.client.submit([1], request_id=request_id) as stream:
        return (await anext(aiter(stream))).tokens[0]


async def describe(running: Running) -> Any:
    """Of a process that may not listen yet."""
    return await running.stub.Describe(request_pb2.DescribeRequest(), wait_for_ready=True)


async def test_a_lost_decode_scheduler_fails_what_it_had_not_installed_and_is_met_again(scheduler, peers):
    peers.script.hold_steps = True
    reader = asyncio.ensure_future(served(scheduler))
    await until(lambda: peers.workers[0].held)
    await peers.stop_decode()
    with pytest.raises(EngineLost, match="decode engine was lost"):
        await reader
    peers.release_steps()
    await scheduler.at_rest()
    assert not await scheduler.is_serving() and peers.decode.address in (await scheduler.client.describe()).not_ready_reason
    await peers.start_decode()
    await scheduler.ready()
    assert await served(scheduler) == 8


async def test_a_refused_pairing_is_the_reason_why_it_is_not_ready(peers, journal):
    peers.script.refuse_pairing = ConfigError("verify width: 1 on prefill-0 and 8 on decode-0", detail="PD_CONTRACT")
    running = Running(peers, journal.url)
    async with asyncio.timeout(PATIENCE_S):
        while "refuses to pair: verify width: 1" not in (await describe(running)).not_ready_reason:
            await asyncio.sleep(0.01)
    assert not await running.is_serving()
    await running.stop()


async def test_the_decode_scheduler_learns_who_pairs_with_it(scheduler, peers):
    assert peers.decode.hello == request_pb2.PrefillHello(
        engine_id="prefill-0", engine_epoch=42, stages=2, tp_size=1, agents=["peer-0", "peer-1"], model_fingerprint="abc",
        verify_width=1, max_model_len=4096,
    )  # fmt: skip


# ---- the end of the engine
@pytest.mark.parametrize("end", ["worker", "agent", "failure"])
async def test_a_lost_worker_or_agent_fails_everyone_and_ends_the_process(scheduler, peers, journal, end):
    peers.script.hold_steps = True
    reader = asyncio.ensure_future(served(scheduler, "r1"))
    await until(lambda: peers.workers[0].held)
    if end == "failure":
        told = common_pb2.Failure(code="internal", message="layer 3 is NaN")
        peers.workers[1].lines.say(worker_pb2.WorkerReport(failure=told))
    else:
        (peers.workers if end == "worker" else peers.agents)[1].lines.hang_up()
    said = {"worker": "prefill worker 1 at", "agent": "prefill agent 1 at", "failure": "layer 3 is NaN"}[end]
    with pytest.raises(EngineLost, match=said):
        await reader
    error = await scheduler.ended()
    assert isinstance(error, EngineLost) and said in error.message
    last = log_of(journal, "r1")[-1]
    assert last["state"] == "FAILED" and last["error"] == "engine_lost" and said in last["message"]


async def test_asked_to_stop_it_finishes_what_runs_and_takes_nothing_new(scheduler, peers):
    peers.script.hold_steps = True
    reader = asyncio.ensure_future(served(scheduler))
    await until(lambda: peers.workers[0].held)
    scheduler.life.stopping.set()
    async with asyncio.timeout(PATIENCE_S):
        while (await scheduler.client.describe()).not_ready_reason != "draining":
            await asyncio.sleep(0.005)
    assert not await scheduler.is_serving()
    with pytest.raises(EngineLost, match="draining"):
        async for _ in await scheduler.client.submit([2]):
            pass
    peers.release_steps()
    assert await reader == 8
    assert await scheduler.ended() is None


async def test_drain_tells_how_many_are_left(scheduler, peers):
    peers.script.hold_steps = True
    reader = asyncio.ensure_future(served(scheduler))
    await until(lambda: peers.workers[0].held)
    reply = await scheduler.stub.Drain(common_pb2.DrainRequest(timeout_ms=50))
    assert (reply.drained, reply.remaining) == (False, 1)
    again = asyncio.ensure_future(scheduler.stub.Drain(common_pb2.DrainRequest(timeout_ms=PATIENCE_S * 1000)))
    peers.release_steps()
    await reader
    assert (await again).drained
    assert (await scheduler.client.inspect()).draining


# ---- start
async def test_a_peer_that_does_not_answer_is_named(peers, journal):
    silent = free_address()
    workers = f"{peers.servers[peers.workers[0]].address},{silent}"
    running = Running(peers, journal.url, workers=workers, startup_timeout="1")
    error = await running.ended()
    assert isinstance(error, EngineLost)
    assert f"no hello within --startup-timeout 1 s from prefill worker 1 at {silent}" in error.message
    assert peers.servers[peers.workers[0]].address not in error.message
    await running.stop()


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda peers: setattr(peers.workers[1].hello, "engine_epoch", 41), EngineLost, "rank 1 lives in epoch 41"),
        (lambda peers: setattr(peers.agents[1].hello, "engine_epoch", 41), EngineLost, "rank 1 lives in epoch 41"),
        (lambda peers: setattr(peers.workers[1].hello, "rank", 0), ConfigError, "--workers: expected rank 1"),
        (lambda peers: setattr(peers.agents[0].hello, "engine_id", "other"), ConfigError, "found rank 0 of other"),
        (lambda peers: setattr(peers.workers[1].hello, "model_fingerprint", "x"), ConfigError, "disagree on model_fingerprint"),
    ],
)
async def test_peers_that_disagree_end_the_start(peers, journal, change, kind, said):
    change(peers)
    running = Running(peers, journal.url)
    error = await running.ended()
    assert isinstance(error, kind) and said in str(error)
    await running.stop()


async def test_absent_redis_and_a_taken_port_are_clear_errors(peers, journal, tmp_path):
    running = Running(peers, f"unix://{tmp_path}/nothing.sock")
    error = await running.ended()
    assert isinstance(error, ConfigError) and "Redis does not answer" in error.message
    await running.stop()
    running = Running(peers, journal.url, listen=peers.decode.address)
    error = await running.ended()
    assert isinstance(error, ConfigError) and peers.decode.address in error.message
    await running.stop()


async def test_while_redis_is_away_no_new_requests_are_taken_and_running_ones_go_on(scheduler, peers, journal):
    peers.script.hold_steps = True
    reader = asyncio.ensure_future(served(scheduler, "r1"))
    await until(lambda: peers.workers[0].held)
    journal.stop()
    peers.release_steps()
    assert await reader == 8
    async with asyncio.timeout(PATIENCE_S):
        while (await scheduler.client.describe()).not_ready_reason != "Redis is away":
            await asyncio.sleep(0.01)
    with pytest.raises(EngineLost, match="Redis is away"):
        async for _ in await scheduler.client.submit([1]):
            pass
    journal.start()
    async with asyncio.timeout(PATIENCE_S):
        while not (await scheduler.client.describe()).ready:
            await asyncio.sleep(0.01)
    await until(lambda: len(log_of(journal, "r1")) == 5)
