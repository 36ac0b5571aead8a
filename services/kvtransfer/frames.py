"""Gather, scatter and sum: cache units between a rank's pools and staging frames (pure over buffers).

A frame holds whole units one after the other, so the extents of its message say all about its bytes.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from k3mesh.errors import ConfigError
from services.contracts.placement import Placement
from services.kvtransfer.messages import Units

Bytes = npt.NDArray[np.uint8]
MLOCK_ONFAULT = 1  # of <sys/mman.h>


class PoolPort(Protocol):
    """Who can reach the pools: here the agent itself; on a GPU it may be the worker's side stream."""

    def gather(self, units: Sequence[Units], frame: Bytes) -> int: ...
    def scatter(self, frame: Bytes, units: Sequence[Units]) -> None: ...


class SharedPools:
    """The worker's arenas, mapped; uint8 views of every unit of every field."""

    def __init__(self, placement: Placement, arenas: Sequence[Any]):
        """`arenas`: one buffer for each arena of the record, at least as long as it says."""
        buffers = {
            arena.arena_id: np.frombuffer(buffer, np.uint8) for arena, buffer in zip(placement.arenas, arenas, strict=True)
        }
        self._fields: list[Bytes] = []  # [units, payload] of each field of the record
        for field in placement.fields:
            shape, strides = (placement.units(field), field.payload), (field.unit_stride, 1)
            memory = buffers[field.arena_id]
            view = np.lib.stride_tricks.as_strided(memory[field.offset :], shape, strides, writeable=memory.flags.writeable)
            self._fields.append(view)

    def gather(self, units: Sequence[Units], frame: Bytes) -> int:
        """Copy `units` to the start of `frame` -> the checksum of what was copied, summed up while it is in the cache."""
        at = 0
        summed = xxhash.xxh3_64()
        for run in units:
            field = self._fields[run.field]
            for unit in run.ids:
                end = at + field.shape[1]
                frame[at:end] = field[unit]
                summed.update(frame[at:end].data)
                at = end
        return summed.intdigest()

    def scatter(self, frame: Bytes, units: Sequence[Units]) -> None:
        """Copy `frame` from its start to `units`."""
        at = 0
        for run in units:
            field = self._fields[run.field]
            for unit in run.ids:
                end = at + field.shape[1]
                field[unit] = frame[at:end]
                at = end


class Staging:
    """The ring's memory: all that an agent has, however much is under way. Frames become resident as they are first used; if
    `pinned`, they stay so."""

    def __init__(self, frames: int, frame_bytes: int):
        memory = mmap.mmap(-1, frames * frame_bytes)
        self.pinned = _pin(memory)
        self._frames: Bytes = np.frombuffer(memory, np.uint8).reshape(frames, frame_bytes)

    def frame(self, index: int, length: int | None = None) -> Bytes:
        """A frame's first `length` bytes, or all of it."""
        return self._frames[index, :length]


def _pin(memory: mmap.mmap) -> bool:
    """Lock its pages as they are touched. False where the limit on locked memory (RLIMIT_MEMLOCK) is too small."""
    address, length = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    lock = ctypes.CDLL(None).mlock2
    return lock(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(MLOCK_ONFAULT)) == 0


def checksum(frame: Bytes) -> int:
    """xxh3_64 of the bytes."""
    return xxhash.xxh3_64_intdigest(frame.data)


def check_frame_bytes(placement: Placement, frame_bytes: int) -> None:
    """A unit travels whole. ConfigError if a frame is smaller than the largest."""
    if frame_bytes < placement.largest_unit:
        raise ConfigError(
            f"--transfer-frame-bytes {frame_bytes}: must hold the largest cache unit of {placement.name}, "
            f"{placement.largest_unit} bytes; raise it",
            param="transfer_frame_bytes",
        )
