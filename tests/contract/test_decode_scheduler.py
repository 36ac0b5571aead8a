"""One request's road through the decode scheduler's process, and its ends: real gRPC, real Redis, scripted peers."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest

from k3mesh.errors import TransferFailed
from k3mesh.v1 import common_pb2, request_pb2
from tests.lib.decode_peers import END, FIRST, DecodePeers
from tests.lib.decode_process import RunningDecode, journalled, until
from tests.lib.redis_server import RedisServer


@pytest.fixture(autouse=True)
def short_drain(monkeypatch: pytest.MonkeyPatch):
    """Some tests leave requests behind on purpose."""
    monkeypatch.setattr("services.scheduler.decode.main.DRAIN_S", 0.2)


@pytest.fixture
async def peers():
    peers = DecodePeers()
    await peers.start()
    yield peers
    await peers.stop()


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


def tokens_of(events: list[request_pb2.RequestEvent]) -> list[int]:
    return [token for event in events for token in event.tokens.tokens]


# ---- the road of a request
async def test_a_request_is_reserved_received_installed_decoded_and_finished(scheduler, prefill, peers, journal):
    room = await prefill.reserved("r1", prompt_tokens=200, max_tokens=4)
    call = scheduler.attach("r1", room)
    assert (await prefill.hear()).installed.room == room
    events = [event async for event in call]
    assert tokens_of(events) == [FIRST, FIRST + 1, FIRST + 2, FIRST + 3]
    assert events[-1].finished == request_pb2.Finished(
        reason=common_pb2.FINISH_REASON_LENGTH, prompt_tokens=200, completion_tokens=4
    )
    await scheduler.at_rest()
    entries = await journalled(journal, "r1", "FINISHED")
    assert [entry["state"] for entry in entries] == ["RESERVED", "INSTALLED", "DECODING", "FINISHING", "FINISHED"]
    reserved, installed, *_, finished = entries
    assert (reserved["d_engine"], reserved["blocks"], reserved["attempt"]) == ("decode-0", "2", "1")
    assert (installed["bytes"], installed["transfer_seconds"], installed["gb_s"]) == ("10000000", "0.5", "0.02")
    assert (finished["rounds"], finished["completion_tokens"], finished["reason"]) == ("3", "4", "length")


async def test_the_replicas_agents_and_only_they_get_one_manifest(scheduler, prefill, peers):
    peers.script.hold_ready = True
    rooms = [await prefill.reserved(f"r{n}", prompt_tokens=200) for n in range(2)]
    await until(lambda: sum(len(agent.manifests) for agent in peers.agents) == 4)
    first, same, second, also = (agent.manifests for agent in peers.agents)
    assert first == same and second == also and set(first) | set(second) == set(rooms)
    manifest = first[rooms[0]]
    assert (manifest.replica, manifest.decode_epoch, manifest.prompt_tokens, manifest.prefix_tokens) == (0, 43, 200, 0)
    assert len(manifest.blocks) == len(manifest.block_gens) == 2 and 0 not in manifest.blocks and manifest.slot
    assert manifest.prompt_hash == b"h" * 32 and 0 < manifest.timeout_ms <= 60_000


async def test_all_leaders_get_every_round_with_one_bucket_idle_replicas_too(scheduler, prefill, peers):
    room = await prefill.reserved("r1", max_tokens=6)
    async for _ in scheduler.attach("r1", room):
        pass
    busy, idle = (worker.rounds for worker in peers.workers)
    await until(lambda: len(idle) == len(busy))
    heads = [[(plan.round_id, plan.bucket, plan.mode) for plan in rounds] for rounds in (busy, idle)]
    assert heads[0] == heads[1] and [round_id for round_id, _, _ in heads[0]] == list(range(1, len(busy) + 1))
    assert [len(plan.live) for plan in busy[:5]] == [1] * 5 and not any(plan.live for plan in idle)


async def test_block_tables_grow_with_the_answer(scheduler, prefill, peers):
    room = await prefill.reserved("r1", prompt_tokens=120, max_tokens=200)
    async for _ in scheduler.attach("r1", room):
        pass
    plans = peers.workers[0].rounds
    assert len(plans[0].installs[0].blocks) == 1
    grown = [(plan.round_id, len(delta.blocks)) for plan in plans for delta in plan.deltas]
    assert grown == [(8, 1), (136, 1)], "a round before positions 128 and 256 are written"


async def test_a_client_that_attaches_late_gets_every_token_once(scheduler, prefill):
    room = await prefill.reserved("r1", max_tokens=5)
    await scheduler.until_counters(receiving=1)
    events = [event async for event in scheduler.attach("r1", room)]
    assert tokens_of(events) == [FIRST + n for n in range(5)] and events[-1].HasField("finished")
    await scheduler.at_rest()
    again = [event async for event in scheduler.attach("r1", room)]
    assert [event.failure.code for event in again] == ["bad_request"]


# ---- many requests on one stream
async def answers_on(call: Any, rooms: Sequence[int]) -> dict[int, tuple[list[int], request_pb2.RequestEvent]]:
    """What a Follow stream says of these requests, to the end of each: tokens and the last event."""
    tokens: dict[int, list[int]] = {}
    answers: dict[int, tuple[list[int], request_pb2.RequestEvent]] = {}
    while set(rooms) - set(answers):
        events = await call.read()
        flat = iter(events.tokens)
        for room, count in zip(events.rooms, events.counts, strict=True):
            tokens.setdefault(room, []).extend(islice(flat, count))
        answers |= {end.room: (tokens.get(end.room, []), end.last) for end in events.ends}
    return answers


async def test_a_stream_that_follows_many_gets_each_ones_tokens_and_end(scheduler, prefill):
    rooms = [await prefill.reserved(f"r{n}", max_tokens=3 + n) for n in range(3)]
    call = scheduler.follow(*((f"r{n}", room) for n, room in enumerate(rooms)), ("stranger", 77))
    answers = await answers_on(await call, [*rooms, 77])
    for n, room in enumerate(rooms):
        tokens, last = answers[room]
        assert tokens == [FIRST + k for k in range(3 + n)] and last.finished.completion_tokens == 3 + n
    assert answers[77][0] == [] and answers[77][1].failure.code == "not_found"
    await scheduler.at_rest()


async def test_a_round_is_one_message_for_all_that_a_stream_follows(scheduler, prefill, peers):
    peers.script.hold_rounds = True
    rooms = [await prefill.reserved(f"r{n}", max_tokens=9) for n in range(4)]
    call = await scheduler.follow(*((f"r{n}", room) for n, room in enumerate(rooms)))
    heard: set[int] = set()
    while heard != set(rooms):
        heard |= set((await call.read()).rooms)
    peers.release_rounds()
    most = 0
    while not (events := await call.read()).ends:
        most = max(most, len(events.rooms))
    assert most == 4


async def test_who_leaves_one_request_of_a_stream_cancels_it_and_no_other(scheduler, prefill, peers, journal):
    peers.script.hold_rounds = True
    leaves, stays = [await prefill.reserved(name, max_tokens=5) for name in ("leaves", "stays")]
    call = await scheduler.follow(("leaves", leaves), ("stays", stays))
    await scheduler.until_counters(resident=2)
    await call.write(request_pb2.FollowRequest(leave=leaves))
    peers.release_rounds()
    answers = await answers_on(call, [stays])
    assert answers[stays][0] == [FIRST + k for k in range(5)]
    await journalled(journal, "leaves", "CANCELLED")
    await scheduler.at_rest()


async def test_the_end_of_a_stream_cancels_all_that_it_follows(scheduler, prefill, peers, journal):
    peers.script.hold_rounds = True
    rooms = [await prefill.reserved(f"r{n}", max_tokens=5) for n in range(3)]
    call = await scheduler.follow(*((f"r{n}", room) for n, room in enumerate(rooms)))
    await scheduler.until_counters(resident=3)
    call.cancel()
    await scheduler.until_counters(resident=0)
    peers.release_rounds()
    for n in range(3):
        await journalled(journal, f"r{n}", "CANCELLED")
    await scheduler.at_rest()


async def test_an_end_token_ends_the_answer_and_is_part_of_it(scheduler, prefill, peers):
    peers.script.first_token = END - 2
    room = await prefill.reserved("r1", max_tokens=100)
    events = [event async for event in scheduler.attach("r1", room)]
    assert tokens_of(events) == [END - 2, END - 1, END]
    finished = events[-1].finished
    assert (finished.reason, finished.matched_stop_token, finished.stop_token) == (common_pb2.FINISH_REASON_STOP, True, END)


async def test_requests_beyond_the_places_wait_and_are_told_when_there_is_room(scheduler, prefill, peers):
    peers.script.hold_rounds = True
    for n in range(8):
        room = await prefill.reserved(f"r{n}", prompt_tokens=100, max_tokens=3)
        scheduler.attach(f"r{n}", room)
        assert (await prefill.hear()).WhichOneof("message") == "installed"
    refused = await prefill.reserve("late", prompt_tokens=100)
    answer = (await prefill.hear()).reserved
    assert (answer.room, answer.accepted, answer.HasField("failure")) == (refused, False, False)
    peers.release_rounds()
    assert (await prefill.hear()).WhichOneof("message") == "capacity"
    await prefill.reserved("late-again", prompt_tokens=100)


async def test_a_request_that_never_fits_is_refused_with_the_numbers(scheduler, prefill):
    await prefill.reserve("r1", prompt_tokens=1500, max_tokens=10)
    answer = (await prefill.hear()).reserved
    assert (answer.accepted, answer.failure.code) == (False, "bad_request")
    assert "1500" in answer.failure.message and "1024" in answer.failure.message


# ---- ends before their time
async def test_a_client_that_leaves_frees_everything(scheduler, prefill, peers, journal):
    peers.script.hold_rounds = True
    room = await prefill.reserved("r1", max_tokens=500)
    call = scheduler.attach("r1", room)
    assert tokens_of([await call.read()]) == [FIRST]
    await until(lambda: all(worker.held for worker in peers.workers))
    call.cancel()
    await scheduler.until_counters(finishing=1, blocks_used=2)
    peers.release_rounds()
    await scheduler.at_rest()
    assert (await journalled(journal, "r1", "CANCELLED"))[-1]["error"] == "cancelled"


async def test_fifty_clients_that_drop_while_they_wait_for_the_handoff_leave_nothing(scheduler, prefill, peers):
    peers.script.hold_ready = True
    for n in range(50):
        room = await prefill.reserved(f"r{n}")
        call = scheduler.attach(f"r{n}", room)
        await scheduler.until_counters(client_streams=1)
        call.cancel()
        ended = (await prefill.hear()).ended
        assert ended.room == room and not ended.HasField("failure")
    await scheduler.at_rest()


async def test_a_cancel_ends_the_stream_and_is_idempotent(scheduler, prefill, peers):
    peers.script.hold_rounds = True
    room = await prefill.reserved("r1", max_tokens=500)
    call = scheduler.attach("r1", room)
    await call.read()
    known = [await scheduler.stub.Cancel(request_pb2.CancelRequest(request_id=name)) for name in ("r1", "r1", "nobody")]
    assert [reply.known for reply in known][::2] == [True, False]
    assert (await call.read()).failure.code == "cancelled"
    peers.release_rounds()
    await scheduler.at_rest()


async def test_a_cancel_through_redis_reaches_the_request(scheduler, prefill, peers, journal):
    peers.script.hold_rounds = True
    room = await prefill.reserved("r1", max_tokens=500)
    call = scheduler.attach("r1", room)
    await call.read()
    with journal.client() as client:
        client.xadd("k3:cancel", {"request_id": "r1"})
    assert (await call.read()).failure.code == "cancelled"


async def test_blocks_of_a_cancelled_room_are_free_only_when_its_agents_are_out_of_it(scheduler, prefill, peers):
    peers.script.hold_ready = peers.script.hold_drained = True
    room = await prefill.reserved("r1", prompt_tokens=200)
    await prefill.cancel(room, reason="client left")
    await until(lambda: [agent.cancelled for agent in peers.agents] == [[room], [room], [], []])
    peers.agents[0].drained(room)
    await scheduler.until_counters(quarantined=1, blocks_used=2)
    peers.agents[1].drained(room)
    assert (await prefill.hear()).ended.room == room
    await scheduler.at_rest()
    peers.agents[1].ready(room)
    await scheduler.until_counters(receiving=0, blocks_used=0)
    assert (await scheduler.inspect()).totals["late_messages"] == 1


async def test_a_request_that_ended_on_prefill_gets_no_token_here(scheduler, prefill, peers):
    peers.script.first_token = END
    room = await prefill.reserved("r1")
    call = scheduler.attach("r1", room)
    await scheduler.until_counters(receiving=1, client_streams=1)
    await prefill.cancel(room, finished_on_prefill=True)
    assert [event async for event in call] == []
    ended = (await prefill.hear()).ended
    assert ended.room == room and not ended.HasField("failure")
    await scheduler.at_rest()


async def test_one_ranks_failure_ends_the_room_for_all_and_is_told_to_prefill(scheduler, prefill, peers):
    peers.script.hold_ready = True
    room = await prefill.reserved("r1")
    call = scheduler.attach("r1", room)
    await until(lambda: room in peers.agents[1].manifests)
    peers.agents[0].ready(room)
    peers.agents[1].failed(room, TransferFailed("checksum differs", detail="PD_BYTES"))
    ended = (await prefill.hear()).ended
    assert (ended.room, ended.failure.code, ended.failure.detail) == (room, "transfer_failed", "PD_BYTES")
    assert [event async for event in call] == [], "the prefill stream tells the client"
    await scheduler.at_rest()


async def test_ranks_that_disagree_on_the_first_token_install_nothing(scheduler, prefill, peers):
    peers.script.hold_ready = True
    room = await prefill.reserved("r1")
    await until(lambda: room in peers.agents[1].manifests)
    peers.agents[0].ready(room, 30)
    peers.agents[1].ready(room, 31)
    assert (await prefill.hear()).ended.failure.detail == "PD_CAND"
    await scheduler.at_rest()


async def test_an_unknown_room_cannot_be_attached(scheduler, prefill):
    events = [event async for event in scheduler.attach("r1", 12345)]
    assert [event.failure.code for event in events] == ["not_found"]
    room = await prefill.reserved("r1", max_tokens=500)
    events = [event async for event in scheduler.attach("another", room)]
    assert [event.failure.code for event in events] == ["not_found"]
