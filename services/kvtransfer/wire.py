"""Between transfer.proto and the sessions' messages. Protobuf stops here."""

from typing import Any

from k3mesh.errors import Internal
from k3mesh.v1 import transfer_pb2
from k3mesh.v1.request_pb2 import CancelRoom as CancelRoomProto
from services.kvtransfer import messages as m
from services.runtime.wire import failure, handoff, manifest, read_failure, read_handoff, read_manifest


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
                handoff=handoff(it.handoff) if it.handoff else None,
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
            first = read_handoff(done.handoff) if done.HasField("handoff") else None
            return m.StageDone(done.room, done.attempt, done.stage, done.bytes, done.frames, done.slot_gen, first)
        case "stage_ack":
            return m.StageAck(it.stage_ack.room, it.stage_ack.attempt)
        case "cancel":
            return _read_cancel(it.cancel)
        case "drained":
            return m.Drained(it.drained.room)
        case other:
            raise Internal(f"a peer agent sent {other or 'an empty message'}, which does not belong in a running link")


def _frame(it: m.Frame) -> transfer_pb2.Frame:
    extents = [transfer_pb2.Extent(fields=extent.fields, first=extent.first, count=extent.count) for extent in it.extents]
    return transfer_pb2.Frame(seq=it.seq, length=it.length, extents=extents)


def _read_frame(it: transfer_pb2.Frame) -> m.Frame:
    extents = tuple(m.Extent(tuple(extent.fields), extent.first, extent.count) for extent in it.extents)
    return m.Frame(it.seq, it.length, extents)


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
