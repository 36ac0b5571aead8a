"""What goes on the wire is what comes off it."""

import pytest

from k3mesh.errors import BY_CODE, TransferFailed
from k3mesh.v1 import common_pb2, request_pb2, transfer_pb2, worker_pb2
from services.contracts.ids import BlockId, GlobalRank, ImageBlock, Place, Replica, RequestId, Room, SlotId, Token
from services.contracts.placement import Manifest
from services.runtime.wire import failure, read_failure, read_sampling, sampling
from services.scheduler.decode import events as ev
from services.scheduler.decode import wire
from services.scheduler.decode.buckets import RoundMode
from services.scheduler.decode.widths import IDLE, Width

ROOM = Room((1 << 63) - 1)
SAMPLING = ev.Sampling(0.75, 0.5, 40, (1 << 64) - 1, 100, True, (Token(3), Token(163_000)))
FAILURE = ev.Failure("transfer_failed", "checksum differs", "PD_BYTES")


def test_sampling_survives_the_round_trip():
    assert read_sampling(sampling(SAMPLING)) == SAMPLING


def test_a_failure_survives_the_round_trip_and_says_whether_to_try_again():
    for code, kind in BY_CODE.items():
        told = failure(ev.Failure(code, "why", "detail"))
        assert told.retryable == kind.retryable
        assert read_failure(told) == ev.Failure(code, "why", "detail")
    error = FAILURE.error()
    assert isinstance(error, TransferFailed) and ev.Failure.of(error) == FAILURE


def test_a_reservation_and_a_cancel_come_off_the_wire():
    asked = request_pb2.Reserve(
        request_id="r1", room=ROOM, attempt=2, prompt_tokens=300, prompt_hash=b"hash", sampling=sampling(SAMPLING),
        timeout_ms=1500, block_keys=[b"one", b"two"], tail=(44).to_bytes(4, "little") + (1 << 20).to_bytes(4, "little"),
    )  # fmt: skip
    assert wire.prefill_event(ev.Pair(4), request_pb2.PrefillToDecode(reserve=asked)) == ev.ReserveAsked(
        ev.Pair(4), RequestId("r1"), ROOM, 2, 300, b"hash", SAMPLING, 1.5, (b"one", b"two"), (Token(44), Token(1 << 20))
    )
    cancel = request_pb2.CancelRoom(room=ROOM, reason="gone", failure=failure(FAILURE), finished_on_prefill=True)
    event = wire.prefill_event(ev.Pair(4), request_pb2.PrefillToDecode(cancel=cancel))
    assert event == ev.CancelRoom(ev.Pair(4), ROOM, "gone", FAILURE, True)
    plain = request_pb2.PrefillToDecode(cancel=request_pb2.CancelRoom(room=ROOM))
    assert wire.prefill_event(ev.Pair(4), plain) == ev.CancelRoom(ev.Pair(4), ROOM, "", None, False)


def test_answers_to_prefill_keep_refused_for_now_and_refused_for_good_apart():
    later = wire.to_prefill(ev.AnswerReserve(ev.Pair(1), ROOM, accepted=False)).reserved
    never = wire.to_prefill(ev.AnswerReserve(ev.Pair(1), ROOM, accepted=False, failure=FAILURE)).reserved
    yes = ev.AnswerReserve(ev.Pair(1), ROOM, accepted=True, replica=Replica(3), proposals=7, prefix_tokens=256)
    granted = wire.to_prefill(yes).reserved
    assert (later.accepted, later.HasField("failure"), later.room) == (False, False, ROOM)
    assert (never.accepted, never.failure.detail) == (False, "PD_BYTES")
    assert (granted.accepted, granted.replica, granted.prefix_tokens, granted.HasField("failure")) == (True, 3, 256, False)
    assert (granted.proposals, later.proposals) == (7, 0)
    cancelled, failed = (wire.to_prefill(ev.RoomEnded(ev.Pair(1), ROOM, it)).ended for it in (None, FAILURE))
    assert not cancelled.HasField("failure") and failed.failure.code == "transfer_failed"


def test_a_manifest_keeps_its_blocks_in_order_with_their_generations():
    manifest = Manifest(
        RequestId("r1"),
        ROOM,
        2,
        1 << 62,
        1,
        0,
        300,
        b"hash",
        (BlockId(9), BlockId(4), BlockId(7)),
        (1, 5, 2),
        SlotId(3),
        8,
        2.5,
    )
    command = wire.expect_command(manifest, fence=6)
    sent = command.expect
    assert command.fence == 6 and (sent.room, sent.attempt, sent.decode_epoch, sent.replica) == (ROOM, 2, 1 << 62, 1)
    assert (list(sent.blocks), list(sent.block_gens)) == ([9, 4, 7], [1, 5, 2])
    assert (sent.slot, sent.slot_gen, sent.timeout_ms, sent.prompt_hash) == (3, 8, 2500, b"hash")


def test_every_replica_gets_the_rounds_head_and_its_own_rows():
    install = ev.PlaceInstall(Place(2), ROOM, (BlockId(9), BlockId(4)), SlotId(3), 200, (Token(7),), SAMPLING)
    busy = ev.ReplicaPlan((Place(2),), (install,), (Place(0), Place(2)), Width(4, 7))
    plan = ev.RoundPlan(
        17, 4, RoundMode.LOW_LATENCY_EAGER, (busy, ev.ReplicaPlan((), (), (), IDLE)), {Replica(0): {Place(0): (BlockId(5),)}}
    )
    first, second = wire.round_commands(plan, fence=6)
    for command in (first, second):
        assert (command.fence, command.round.round_id, command.round.bucket) == (6, 17, 4)
        assert command.round.mode == worker_pb2.ROUND_MODE_LOW_LATENCY_EAGER
    row = first.round.installs[0]
    assert (row.place, row.room, list(row.blocks), row.slot, row.position, list(row.window)) == (2, ROOM, [9, 4], 3, 200, [7])
    assert read_sampling(row.sampling) == SAMPLING
    assert (list(first.round.clears), list(first.round.live)) == ([2], [0, 2])
    assert [(delta.place, list(delta.blocks)) for delta in first.round.deltas] == [(0, [5])]
    assert not second.round.live and not second.round.installs
    assert (first.round.width, first.round.proposals, first.round.most_proposals) == (4, 7, 7)
    assert (second.round.width, second.round.proposals, second.round.most_proposals) == (1, 0, 7)


def test_what_is_copied_to_images_and_back_goes_to_its_replica_alone():
    install = ev.PlaceInstall(Place(1), ROOM, (BlockId(9), BlockId(4)), SlotId(3), 200, (Token(7), Token(8)), SAMPLING)
    out, back = (ImageBlock(5), ImageBlock(2)), (ImageBlock(8), ImageBlock(1), ImageBlock(0))
    retract = ev.PlaceRetract(Place(2), Room(77), 128, out)
    busy = ev.ReplicaPlan((), (), (), IDLE, (retract,), (ev.PlaceRestore(install, 1, back),))
    plan = ev.RoundPlan(17, 0, RoundMode.LOW_LATENCY_EAGER, (busy, ev.ReplicaPlan((), (), (), IDLE)), {})
    first, second = (command.round for command in wire.round_commands(plan, fence=6))
    (gone,), (came,) = first.retracts, first.restores
    assert (gone.place, gone.room, gone.position, list(gone.image)) == (2, 77, 128, [5, 2])
    assert (came.install.place, came.install.room, came.install.position, list(came.install.blocks)) == (1, ROOM, 200, [9, 4])
    assert (came.install.slot, list(came.install.window), read_sampling(came.install.sampling)) == (3, [7, 8], SAMPLING)
    assert (came.found, list(came.image)) == (1, [8, 1, 0])
    assert not second.retracts and not second.restores


def test_every_mode_of_a_plan_has_its_number():
    assert set(wire.MODES) == set(RoundMode) and len(set(wire.MODES.values())) == len(RoundMode)


def test_a_rounds_result_comes_off_the_wire():
    result = worker_pb2.RoundResult(
        round_id=17, replica=1, copied=[ROOM, 4], places=[2, 5], counts=[2, 1], tokens=[5, 6, 7], proposals=[8, 9]
    )  # fmt: skip
    rows = (
        ev.PlaceTokens(Place(2), (Token(5), Token(6)), (Token(6), Token(8))),
        ev.PlaceTokens(Place(5), (Token(7),), (Token(7), Token(9))),
    )
    assert wire.worker_report(worker_pb2.WorkerReport(round=result)) == wire.RoundResult(17, Replica(1), rows, (ROOM, Room(4)))


def test_agents_reports_come_off_the_wire_with_the_rank_of_their_stream():
    ready = transfer_pb2.RankReady(
        room=ROOM, attempt=2, token=5, window=[5, 6], bytes=1 << 40, first_byte=1.5, last_byte=2.5, cached_tokens=128
    )
    rank = GlobalRank(3)
    assert wire.agent_report(rank, transfer_pb2.AgentReport(rank_ready=ready)) == ev.AgentRankReady(
        rank, ROOM, 2, Token(5), (Token(5), Token(6)), 1 << 40, 1.5, 2.5, 128
    )
    failed = transfer_pb2.RoomFailed(room=ROOM, attempt=2, failure=failure(FAILURE))
    assert wire.agent_report(rank, transfer_pb2.AgentReport(failed=failed)) == ev.AgentRoomFailed(rank, ROOM, 2, FAILURE)
    drained = transfer_pb2.AgentReport(drained=transfer_pb2.Drained(room=ROOM))
    assert wire.agent_report(rank, drained) == ev.AgentDrained(rank, ROOM)
    assert wire.agent_report(rank, transfer_pb2.AgentReport(fatal=failure(FAILURE))) == FAILURE


@pytest.mark.parametrize(
    ("end", "event"),
    [
        (
            ev.Finished("stop", 10, 3, 128, Token(0)),
            request_pb2.Finished(
                reason=common_pb2.FINISH_REASON_STOP, prompt_tokens=10, completion_tokens=3, cached_tokens=128,
                matched_stop_token=True,
            ),
        ),
        (
            ev.Finished("length", 10, 3, 0, None),
            request_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, prompt_tokens=10, completion_tokens=3),
        ),
        (
            ev.Finished("length", 10, 9, 0, None, ev.Drafts(2, 6, 3, (2, 1, 0))),
            request_pb2.Finished(
                reason=common_pb2.FINISH_REASON_LENGTH, prompt_tokens=10, completion_tokens=9,
                drafts=request_pb2.Drafts(windows=2, proposed=6, accepted=3, accepted_at=[2, 1, 0]),
            ),
        ),
    ],
)  # fmt: skip
def test_an_end_is_told_as_it_was_and_token_zero_may_be_the_stop_token(end: ev.Finished, event: request_pb2.Finished):
    sent = wire.end_event(end)
    assert sent is not None and sent.finished == event


def test_a_stream_whose_end_stands_on_prefill_just_ends():
    assert wire.end_event(ev.ToldByPrefill()) is None
