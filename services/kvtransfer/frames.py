"""Gather, verify and scatter: pieces of frames between a rank's pools and staging memory (pure over buffers)."""

import ctypes
import mmap
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from k3mesh.errors import ConfigError
from services.contracts.placement import Placement
from services.kvtransfer.pieces import SEAL_BYTES, Piece, Units

Bytes = npt.NDArray[np.uint8]
MLOCK_ONFAULT = 1  # of <sys/mman.h>
SEAL = struct.Struct("<QQ")  # tag, checksum
assert SEAL.size == SEAL_BYTES


class Copy(Protocol):
    """Of a piece between pools and staging memory."""

    @property
    def completed(self) -> bool:
        """Neither is touched any more."""
        ...

    @property
    def intact(self) -> bool:
        """The seal was right. Once it is completed."""
        ...


class CacheMemory(Protocol):
    """A rank's pools and the agent's staging memory. The session knows units by number; this knows where they are."""

    checksum: str  # which one seals hold: "xxh3_64", or "sum64" of units.cu
    pinned: bool  # the staging memory stays where it is

    def buffer(self, at: int, length: int) -> Any:
        """`length` bytes of staging memory, as the transport takes them."""
        ...

    def pack(self, at: int, piece: Piece, tag: int) -> Copy:
        """Copy a piece's units to the staging memory at `at`, and put its seal behind them."""
        ...

    def unpack(self, at: int, piece: Piece, tag: int) -> Copy:
        """Copy a piece from there to its units if its seal is right; if not, touch none of them."""
        ...


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that is over when it is known."""

    intact: bool = True

    @property
    def completed(self) -> bool:
        return True


class HostMemory:
    """CacheMemory of a CPU: the worker's arenas, mapped here, and staging memory of this process's own.

    That becomes resident as it is first used; if `pinned`, it stays so.
    """

    checksum = "xxh3_64"

    def __init__(self, placement: Placement, arenas: Sequence[Any], staging_bytes: int):
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
        staging = mmap.mmap(-1, staging_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared has no huge pages
        with suppress(OSError):  # a kernel without huge pages
            staging.madvise(mmap.MADV_HUGEPAGE)  # one fault for a piece's first use instead of 256
        self.pinned = _pin(staging)
        self._staging: Bytes = np.frombuffer(staging, np.uint8)

    def buffer(self, at: int, length: int) -> Bytes:
        return self._staging[at : at + length]

    def pack(self, at: int, piece: Piece, tag: int) -> Copied:
        staging, summed = self._staging, xxhash.xxh3_64()
        for field, unit in _each(self._fields, piece.units):
            end = at + field.shape[1]
            staging[at:end] = field[unit]
            summed.update(staging[at:end].data)  # now, while it is in the core's cache
            at = end
        SEAL.pack_into(staging.data, at, tag, summed.intdigest())
        return Copied()

    def unpack(self, at: int, piece: Piece, tag: int) -> Copied:
        staging, end = self._staging, at + piece.length
        if SEAL.unpack_from(staging.data, end) != (tag, xxhash.xxh3_64_intdigest(staging[at:end].data)):
            return Copied(intact=False)
        for field, unit in _each(self._fields, piece.units):
            end = at + field.shape[1]
            field[unit] = staging[at:end]
            at = end
        return Copied()


def _each(fields: Sequence[Bytes], units: Sequence[Units]) -> Iterator[tuple[Bytes, int]]:
    """Field and number of each unit, in the order of the piece."""
    for run in units:
        for index in run.fields:
            field = fields[index]
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
