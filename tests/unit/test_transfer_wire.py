"""What agents say: every field of every message survives the wire, and what does not belong there is refused."""

from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from k3mesh.errors import ConfigError, Internal
from k3mesh.v1 import transfer_pb2
from services.contracts.barriers import ChunkStarted, FieldsReady, ForgetLocal, Handoff, HandoffReady, LocalRow, Notice
from services.contracts.ids import BlockId, RequestId, Room, SlotId
from services.contracts.messages import Failure
from services.contracts.placement import Arena, FieldPlace, Manifest, Placement
from services.kvtransfer import messages as m
from services.kvtransfer import wire
from services.runtime.wire import placement, read_placement
from services.runtime.worker_line import CudaArena, export, notice, read_cuda_arenas, read_notice

FIELD = FieldPlace("t.0.kda_conv", 4, "slot", "bfloat16", (6, 3), 1, 64, 128, 36, (2, 2, 2))
PLACEMENT = Placement(
    engine_id="p", role="prefill", engine_epoch=1, stage=2, num_stages=3, tp_rank=4, tp_size=5, dp_rank=6, dp_size=7,
    global_rank=8, model_fingerprint="m", draft_fingerprint="d", num_blocks=9, num_slots=10, verify_width=11,
    speculative_algorithm="MTP", layer_lo=12, layer_hi=13, arenas=(Arena(1, "mla", 14),), fields=(FIELD,),
)  # fmt: skip
FAILURE = Failure("transfer_failed", "message", "PD_BYTES")
HANDOFF = Handoff(7, (7, 8), 128)
MANIFEST = Manifest(
    RequestId("r"), Room((1 << 63) - 1), 2, 3, 4, 128, 300, b"hash", (BlockId(5), BlockId(6)), (7, 8), SlotId(9), 10, 1.5
)
FRAMES = (
    m.Frame(3, 4, (m.Extent((5, 4), 6, 7), m.Extent((8,), 9, 10))),
    m.Frame(11, 12, (m.Extent((1,), 2, 3),)),
)
NOTICES: list[Notice] = [
    ChunkStarted(3, (LocalRow(1, 2, 3, True, 4, (5, 6)), LocalRow(7, 8, 9, False, 10, ()))),
    FieldsReady(3, 1, 2),
    HandoffReady(6, HANDOFF),
    ForgetLocal((4, 5)),
]
PEER_MESSAGES: list[m.PeerMessage] = [
    m.Offer(MANIFEST),
    m.OfferReply(1, 2),
    m.OfferReply(1, 2, FAILURE),
    m.FrameBatch(1, 2, FRAMES),
    m.Grant(1, (2, 3)),
    m.StageDone(1, 2, 3, 4, 5, 6, None),
    m.StageDone(1, 2, 3, 4, 5, 6, HANDOFF),
    m.StageAck(1, 2),
    m.CancelRoom(1, "why"),
    m.CancelRoom(1, "why", FAILURE),
    m.Drained(1),
]


def test_a_record_survives_the_wire_with_every_field():
    assert all(getattr(PLACEMENT, field.name) for field in fields(PLACEMENT)), "a field with a default would not be seen"
    assert read_placement(placement(PLACEMENT)) == PLACEMENT
    assert read_placement(export(PLACEMENT).export) == PLACEMENT


def test_where_arenas_are_on_a_gpu_is_told_to_the_agent_alone():
    arena = CudaArena(bytes(range(64)), bytes(range(16)))
    message = export(PLACEMENT, [arena]).export
    assert read_cuda_arenas(message) == [arena] and read_placement(message) == PLACEMENT
    assert read_cuda_arenas(export(PLACEMENT).export) == [] == read_cuda_arenas(placement(PLACEMENT))


@pytest.mark.parametrize(
    ("arenas", "cause"),
    [
        ([CudaArena(bytes(range(63)), bytes(16))], r"bytes \[\(63, 16\)\]"),
        ([CudaArena(bytes(range(64)), bytes(4))], r"bytes \[\(64, 4\)\]"),
        ([CudaArena(bytes(range(64)), bytes(16)), CudaArena(b"", b"")], "1 of 2 arenas"),
        ([CudaArena(bytes(range(64)), bytes(16)), CudaArena(bytes(range(64)), bytes(range(16)))], "on 2 devices"),
    ],
)
def test_arenas_that_cannot_be_of_one_gpu_are_refused(arenas: list[CudaArena], cause: str):
    record = replace(PLACEMENT, arenas=tuple(Arena(n, "mla", 14) for n in range(len(arenas))))
    with pytest.raises(ConfigError, match=f"p rank 8: .*{cause}"):
        read_cuda_arenas(export(record, arenas).export)


def test_a_record_whose_fingerprint_is_not_its_content_s_is_refused():
    message = placement(PLACEMENT)
    message.num_blocks += 1
    with pytest.raises(ConfigError, match="fingerprint") as refused:
        read_placement(message)
    assert refused.value.detail == "PD_CONTRACT"


@pytest.mark.parametrize("it", NOTICES, ids=lambda it: type(it).__name__)
def test_what_a_worker_tells_its_agent_survives_the_wire(it: Notice):
    assert read_notice(notice(it)) == it


@pytest.mark.parametrize("it", PEER_MESSAGES, ids=lambda it: type(it).__name__)
def test_what_agents_tell_each_other_survives_the_wire(it: m.PeerMessage):
    assert wire.read_peer_message(wire.peer_message(it)) == it


def test_every_kind_of_message_is_among_those_tried():
    assert {type(it) for it in NOTICES} == set(get_args(Notice))
    assert {type(it) for it in PEER_MESSAGES} == set(get_args(m.PeerMessage))


def test_reports_carry_every_field_and_times_of_the_unix_clock():
    ready = wire.report(m.RankReady(1, 2, 3, (3, 4), 5, 6.5, 7.5, 8), unix_offset=1000.0).rank_ready
    assert (ready.room, ready.attempt, ready.token, list(ready.window)) == (1, 2, 3, [3, 4])
    assert (ready.bytes, ready.first_byte, ready.last_byte, ready.cached_tokens) == (5, 1006.5, 1007.5, 8)
    room_ready = wire.report(m.RoomReady(1, 2, 3), 0.0).ready
    assert (room_ready.room, room_ready.attempt, room_ready.prompt_tokens) == (1, 2, 3)
    released = wire.report(m.SourceReleased(1, 2), 0.0).released
    assert (released.room, released.bytes) == (1, 2)
    failed = wire.report(m.RoomFailed(1, 2, FAILURE), 0.0).failed
    assert (failed.room, failed.attempt, failed.failure.message, failed.failure.detail) == (1, 2, "message", "PD_BYTES")
    assert wire.report(m.Drained(5), 0.0).drained.room == 5


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (read_notice, transfer_pb2.LocalMessage()),
        (read_notice, export(PLACEMENT)),
        (wire.read_peer_message, transfer_pb2.PeerMessage()),
        (wire.read_peer_message, transfer_pb2.PeerMessage(heartbeat=transfer_pb2.Heartbeat(sequence=1))),
        (wire.read_command, transfer_pb2.AgentCommand()),
        (wire.read_command, transfer_pb2.AgentCommand(introduce=transfer_pb2.IntroduceAgent(scheduler="x"))),
    ],
)
def test_a_message_that_does_not_belong_there_is_refused(read: Any, message: Any):
    with pytest.raises(Internal):
        read(message)
