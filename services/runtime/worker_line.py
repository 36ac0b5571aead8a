"""The line between a worker and the transfer agent beside it, as both ends must speak it.

A Unix stream socket that the worker connects to once: [u32 length, little-endian][LocalMessage] frames. The first is `export`,
and the descriptors of the record's arenas, in its order, ride on its length; arenas on a GPU have handles in the record
instead. The agent answers it with one byte and says nothing after. The end of the socket is the end of the epoch, on both
sides.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from k3mesh.errors import ConfigError, Internal
from k3mesh.v1 import transfer_pb2
from services.contracts.barriers import ChunkStarted, FieldsReady, ForgetLocal, HandoffReady, LocalRow, Notice
from services.contracts.placement import Placement
from services.runtime.wire import handoff, placement, read_handoff

LENGTH = struct.Struct("<I")
MESSAGE_LIMIT = 16 << 20  # bytes
ACCEPTED = b"\x01"
HANDLE_BYTES, UUID_BYTES = 64, 16  # of CUDA


@dataclass(frozen=True, slots=True)
class CudaArena:
    """An arena on a GPU, as another process of the host finds it."""

    handle: bytes  # CUipcMemHandle, of an allocation that the arena has to itself
    device: bytes  # its UUID


def export(it: Placement, cuda: Sequence[CudaArena] = ()) -> transfer_pb2.LocalMessage:
    """`cuda`: where each arena of the record is, if they are on a GPU."""
    record = placement(it)
    for arena, there in zip(record.arenas, cuda, strict=bool(cuda)):
        arena.cuda_handle, arena.cuda_device = there.handle, there.device
    return transfer_pb2.LocalMessage(export=record)


def read_cuda_arenas(it: transfer_pb2.Placement) -> list[CudaArena]:
    """Of a record whose arenas are on a GPU, in its order; of any other: none. ConfigError if they cannot be of one GPU."""
    arenas = [CudaArena(arena.cuda_handle, arena.cuda_device) for arena in it.arenas if arena.cuda_handle]
    sizes = {(len(arena.handle), len(arena.device)) for arena in arenas}
    devices = {arena.device for arena in arenas}
    if arenas and (len(arenas) != len(it.arenas) or sizes != {(HANDLE_BYTES, UUID_BYTES)} or len(devices) != 1):
        raise ConfigError(
            f"{it.engine_id} rank {it.global_rank}: {len(arenas)} of {len(it.arenas)} arenas have CUDA handles, on "
            f"{len(devices)} devices, of (handle, UUID) bytes {sorted(sizes)}; all must be on one device, with "
            f"{HANDLE_BYTES} and {UUID_BYTES} bytes"
        )
    return arenas


def notice(it: Notice) -> transfer_pb2.LocalMessage:
    pb = transfer_pb2
    match it:
        case ChunkStarted():
            rows = [
                pb.LocalRow(
                    room=row.room, start=row.start, end=row.end, last=row.last, slot=row.slot, new_blocks=row.new_blocks
                )
                for row in it.rows
            ]
            return pb.LocalMessage(chunk=pb.ChunkStarted(step_id=it.step_id, rows=rows))
        case FieldsReady(step_id, lo, hi):
            return pb.LocalMessage(ready=pb.FieldsReady(step_id=step_id, lo=lo, hi=hi))
        case HandoffReady(room, first):
            return pb.LocalMessage(handoff=pb.HandoffReady(room=room, handoff=handoff(first)))
        case ForgetLocal(rooms):
            return pb.LocalMessage(forget=pb.ForgetLocal(rooms=rooms))


def read_notice(it: transfer_pb2.LocalMessage) -> Notice:
    """What follows the export. Internal if it is nothing that does."""
    match it.WhichOneof("message"):
        case "chunk":
            rows = tuple(
                LocalRow(row.room, row.start, row.end, row.last, row.slot, tuple(row.new_blocks)) for row in it.chunk.rows
            )
            return ChunkStarted(it.chunk.step_id, rows)
        case "ready":
            return FieldsReady(it.ready.step_id, it.ready.lo, it.ready.hi)
        case "handoff":
            return HandoffReady(it.handoff.room, read_handoff(it.handoff.handoff))
        case "forget":
            return ForgetLocal(tuple(it.forget.rooms))
        case other:
            raise Internal(f"the worker sent {other or 'an empty message'} after its export")
