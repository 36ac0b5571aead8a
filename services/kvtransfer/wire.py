"""Between transfer.proto and the sessions' messages. Protobuf stops here."""

from typing import Any

from k3mesh.errors import ConfigError, Internal
from k3mesh.v1 import transfer_pb2
from k3mesh.v1.request_pb2 import CancelRoom as CancelRoomProto
from services.contracts import placement as fp
from services.contracts.ids import BlockId, RequestId, SlotId
from services.contracts.ids import Room as RoomId
from services.kvtransfer import messages as m
from services.runtime.wire import failure, manifest, read_failure


# ---- records
def placement(it: fp.Placement) -> transfer_pb2.Placement:
    return transfer_pb2.Placement(
        contract=it.contract,
        engine_id=it.engine_id,
        role=it.role,
        engine_epoch=it.engine_epoch,
        stage=it.stage,
        num_stages=it.num_stages,
        tp_rank=it.tp_rank,
        tp_size=it.tp_size,
        dp_rank=it.dp_rank,
        dp_size=it.dp_size,
        global_rank=it.global_rank,
        model_fingerprint=it.model_fingerprint,
        draft_fingerprint=it.draft_fingerprint,
        block_tokens=it.block_tokens,
        num_blocks=it.num_blocks,
        num_slots=it.num_slots,
        verify_width=it.verify_width,
        speculative_algorithm=it.speculative_algorithm,
        layer_lo=it.layer_lo,
        layer_hi=it.layer_hi,
        arenas=[transfer_pb2.Arena(arena_id=arena.arena_id, name=arena.name, length=arena.length) for arena in it.arenas],
        fields=[
            transfer_pb2.Field(
                field_id=field.field_id,
                layer=field.layer,
                kind=field.kind,
                dtype=field.dtype,
                shape=field.shape,
                arena_id=field.arena_id,
                offset=field.offset,
                unit_stride=field.unit_stride,
                payload=field.payload,
                parts=field.parts,
            )
            for field in it.fields
        ],
        fingerprint=it.fingerprint,
    )


def read_placement(it: transfer_pb2.Placement) -> fp.Placement:
    """ConfigError if the record's fingerprint is not that of its content: the other side reads the contract differently."""
    record = fp.Placement(
        contract=it.contract,
        engine_id=it.engine_id,
        role=it.role,
        engine_epoch=it.engine_epoch,
        stage=it.stage,
        num_stages=it.num_stages,
        tp_rank=it.tp_rank,
        tp_size=it.tp_size,
        dp_rank=it.dp_rank,
        dp_size=it.dp_size,
        global_rank=it.global_rank,
        model_fingerprint=it.model_fingerprint,
        draft_fingerprint=it.draft_fingerprint,
        block_tokens=it.block_tokens,
        num_blocks=it.num_blocks,
        num_slots=it.num_slots,
        verify_width=it.verify_width,
        speculative_algorithm=it.speculative_algorithm,
        layer_lo=it.layer_lo,
        layer_hi=it.layer_hi,
        arenas=tuple(fp.Arena(arena.arena_id, arena.name, arena.length) for arena in it.arenas),
        fields=tuple(
            fp.FieldPlace(
                field_id=field.field_id,
                layer=field.layer,
                kind=field.kind,
                dtype=field.dtype,
                shape=tuple(field.shape),
                arena_id=field.arena_id,
                offset=field.offset,
                unit_stride=field.unit_stride,
                payload=field.payload,
                parts=tuple(field.parts),
            )
            for field in it.fields
        ),
    )
    if record.fingerprint != it.fingerprint:
        raise ConfigError(
            f"{record.name}: the placement record has fingerprint {record.fingerprint}, it says {it.fingerprint!r}; "
            "run the same release in all processes",
            detail="PD_CONTRACT",
        )
    return record


def read_manifest(it: transfer_pb2.Manifest) -> fp.Manifest:
    return fp.Manifest(
        request_id=RequestId(it.request_id),
        room=RoomId(it.room),
        attempt=it.attempt,
        decode_epoch=it.decode_epoch,
        replica=it.replica,
        prefix_tokens=it.prefix_tokens,
        prompt_tokens=it.prompt_tokens,
        prompt_hash=it.prompt_hash,
        blocks=tuple(map(BlockId, it.blocks)),
        block_gens=tuple(it.block_gens),
        slot=SlotId(it.slot),
        slot_gen=it.slot_gen,
        timeout=it.timeout_ms / 1000,
    )


# ---- peers
def peer_message(it: m.PeerMessage) -> transfer_pb2.PeerMessage:
    pb = transfer_pb2
    match it:
        case m.Offer(wanted):
            return pb.PeerMessage(offer=manifest(wanted))
        case m.OfferReply(room, attempt, refusal):
            reply = pb.OfferReply(room=room, attempt=attempt, failure=failure(refusal) if refusal else None)
            return pb.PeerMessage(offer_reply=reply)
        case m.FrameBatch(room, attempt, frames):
            return pb.PeerMessage(frames=pb.FrameBatch(room=room, attempt=attempt, frames=map(_frame, frames)))
        case m.Grant(room, seqs):
            return pb.PeerMessage(grant=pb.Grant(room=room, seqs=seqs))
        case m.StageDone():
            done = pb.StageDone(
                room=it.room,
                attempt=it.attempt,
                stage=it.stage,
                bytes=it.bytes,
                frames=it.frames,
                slot_gen=it.slot_gen,
                handoff=_handoff(it.handoff) if it.handoff else None,
            )
            return pb.PeerMessage(stage_done=done)
        case m.StageAck(room, attempt):
            return pb.PeerMessage(stage_ack=pb.StageAck(room=room, attempt=attempt))
        case m.CancelRoom(room, reason, cause):
            cancel = CancelRoomProto(room=room, reason=reason, failure=failure(cause) if cause else None)
            return pb.PeerMessage(cancel=cancel)
        case m.Drained(room):
            return pb.PeerMessage(drained=pb.Drained(room=room))


def read_peer_message(it: transfer_pb2.PeerMessage) -> m.PeerMessage:
    """What belongs to a room; hello, heartbeat and refusal are the link's own."""
    match it.WhichOneof("message"):
        case "offer":
            return m.Offer(read_manifest(it.offer))
        case "offer_reply":
            reply = it.offer_reply
            return m.OfferReply(reply.room, reply.attempt, read_failure(reply.failure) if reply.HasField("failure") else None)
        case "frames":
            return m.FrameBatch(it.frames.room, it.frames.attempt, tuple(map(_read_frame, it.frames.frames)))
        case "grant":
            return m.Grant(it.grant.room, tuple(it.grant.seqs))
        case "stage_done":
            done = it.stage_done
            handoff = _read_handoff(done.handoff) if done.HasField("handoff") else None
            return m.StageDone(done.room, done.attempt, done.stage, done.bytes, done.frames, done.slot_gen, handoff)
        case "stage_ack":
            return m.StageAck(it.stage_ack.room, it.stage_ack.attempt)
        case "cancel":
            return _read_cancel(it.cancel)
        case "drained":
            return m.Drained(it.drained.room)
        case other:
            raise Internal(f"a peer agent sent {other or 'an empty message'}, which does not belong in a running link")


def _frame(it: m.Frame) -> transfer_pb2.Frame:
    extents = [transfer_pb2.Extent(field=extent.field, first=extent.first, count=extent.count) for extent in it.extents]
    return transfer_pb2.Frame(seq=it.seq, length=it.length, checksum=it.checksum, extents=extents)


def _read_frame(it: transfer_pb2.Frame) -> m.Frame:
    extents = tuple(m.Extent(extent.field, extent.first, extent.count) for extent in it.extents)
    return m.Frame(it.seq, it.length, it.checksum, extents)


def _handoff(it: m.Handoff) -> transfer_pb2.Handoff:
    return transfer_pb2.Handoff(token=it.token, window=it.window, cached_tokens=it.cached_tokens)


def _read_handoff(it: transfer_pb2.Handoff) -> m.Handoff:
    return m.Handoff(it.token, tuple(it.window), it.cached_tokens)


def _read_cancel(it: Any) -> m.CancelRoom:
    return m.CancelRoom(it.room, it.reason, read_failure(it.failure) if it.HasField("failure") else None)


# ---- the scheduler
def read_command(it: transfer_pb2.AgentCommand) -> m.Command:
    """A command about a room; introduce and pair are the shell's own."""
    match it.WhichOneof("command"):
        case "expect":
            return read_manifest(it.expect)
        case "cancel":
            return _read_cancel(it.cancel)
        case other:
            raise Internal(f"the scheduler sent {other or 'an empty command'}, which an agent cannot do")


def report(it: m.Report, unix_offset: float) -> transfer_pb2.AgentReport:
    """`unix_offset`: seconds from the session's clock to the Unix clock."""
    pb = transfer_pb2
    match it:
        case m.RoomReady(room, attempt, prompt_tokens):
            return pb.AgentReport(ready=pb.RoomReady(room=room, attempt=attempt, prompt_tokens=prompt_tokens))
        case m.RankReady():
            ready = pb.RankReady(
                room=it.room,
                attempt=it.attempt,
                token=it.token,
                window=it.window,
                bytes=it.bytes,
                first_byte=it.first_byte + unix_offset,
                last_byte=it.last_byte + unix_offset,
                cached_tokens=it.cached_tokens,
            )
            return pb.AgentReport(rank_ready=ready)
        case m.SourceReleased(room, count):
            return pb.AgentReport(released=pb.SourceReleased(room=room, bytes=count))
        case m.RoomFailed(room, attempt, cause):
            return pb.AgentReport(failed=pb.RoomFailed(room=room, attempt=attempt, failure=failure(cause)))
        case m.Drained(room):
            return pb.AgentReport(drained=pb.Drained(room=room))


# ---- the worker
def read_local(it: transfer_pb2.LocalMessage) -> m.LocalMessage:
    """What follows the export."""
    match it.WhichOneof("message"):
        case "chunk":
            rows = tuple(
                m.LocalRow(row.room, row.start, row.end, row.last, row.slot, tuple(row.new_blocks)) for row in it.chunk.rows
            )
            return m.ChunkStarted(it.chunk.step_id, rows)
        case "ready":
            return m.FieldsReady(it.ready.step_id, it.ready.lo, it.ready.hi)
        case "handoff":
            return m.HandoffReady(it.handoff.room, _read_handoff(it.handoff.handoff))
        case "forget":
            return m.ForgetLocal(tuple(it.forget.rooms))
        case other:
            raise Internal(f"the worker sent {other or 'an empty message'} after its export")
