"""Gather, verify and scatter: cache units between a rank's pools and staging frames (pure over buffers).

A frame holds whole units one after the other, so the extents of its message say all about its bytes.
"""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from k3mesh.errors import ConfigError
from services.contracts.placement import Placement
from services.kvtransfer.messages import Units

Bytes = npt.NDArray[np.uint8]
MLOCK_ONFAULT = 1  # of <sys/mman.h>


class CacheMemory(Protocol):
    """A rank's pools and the agent's staging frames. The session knows units and frames by number; this knows where they are.

    Only `frame` is called on the loop; the others are the copier's, one at a time.
    """

    checksum: str  # which one `gather` returns: "xxh3_64", or "sum64" of units.cu
    pinned: bool  # the frames stay where they are

    def frame(self, index: int, length: int) -> Any:
        """A frame's first `length` bytes, as the transport takes them."""
        ...

    def gather(self, index: int, units: Sequence[Units]) -> int:
        """Copy `units` to the start of a frame -> the checksum of what was copied."""
        ...

    def verify(self, index: int, length: int, checksum: int) -> bool:
        """Whether a frame's first `length` bytes have this checksum."""
        ...

    def scatter(self, index: int, units: Sequence[Units]) -> None:
        """Copy a frame from its start to `units`."""
        ...


class HostMemory:
    """CacheMemory of a CPU: the worker's arenas, mapped here, and a ring of this process's own.

    Frames become resident as they are first used; if `pinned`, they stay so.
    """

    checksum = "xxh3_64"

    def __init__(self, placement: Placement, arenas: Sequence[Any], frames: int, frame_bytes: int):
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
        staging = mmap.mmap(-1, frames * frame_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared has no huge pages
        with suppress(OSError):  # a kernel without huge pages
            staging.madvise(mmap.MADV_HUGEPAGE)  # 4 faults for a frame's first use instead of 2,000
        self.pinned = _pin(staging)
        self._frames: Bytes = np.frombuffer(staging, np.uint8).reshape(frames, frame_bytes)

    def frame(self, index: int, length: int) -> Bytes:
        return self._frames[index, :length]

    def gather(self, index: int, units: Sequence[Units]) -> int:
        frame, at = self._frames[index], 0
        summed = xxhash.xxh3_64()
        for field, unit in self._each(units):
            end = at + field.shape[1]
            frame[at:end] = field[unit]
            summed.update(frame[at:end].data)  # now, while it is in the core's cache
            at = end
        return summed.intdigest()

    def verify(self, index: int, length: int, checksum: int) -> bool:
        return xxhash.xxh3_64_intdigest(self.frame(index, length).data) == checksum

    def scatter(self, index: int, units: Sequence[Units]) -> None:
        frame, at = self._frames[index], 0
        for field, unit in self._each(units):
            end = at + field.shape[1]
            field[unit] = frame[at:end]
            at = end

    def _each(self, units: Sequence[Units]) -> Iterator[tuple[Bytes, int]]:
        """Field and number of each unit, in the order of the frame."""
        for run in units:
            for index in run.fields:
                field = self._fields[index]
                for unit in run.ids:
                    yield field, unit


def _pin(memory: mmap.mmap) -> bool:
    """Lock its pages as they are touched. False where the limit on locked memory (RLIMIT_MEMLOCK) is too small."""
    address, length = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
    lock = ctypes.CDLL(None).mlock2
    return lock(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(MLOCK_ONFAULT)) == 0


def check_frame_bytes(placement: Placement, frame_bytes: int) -> None:
    """A unit travels whole. ConfigError if a frame is smaller than the largest."""
    if frame_bytes < placement.largest_unit:
        raise ConfigError(
            f"--transfer-frame-bytes {frame_bytes}: must hold the largest cache unit of {placement.name}, "
            f"{placement.largest_unit} bytes; raise it",
            param="transfer_frame_bytes",
        )
