"""CacheMemory of a GPU: the worker's arenas, opened by their handles, and staging memory beside them.

One kernel moves all units of a piece (units.cu), on a stream of this process's own, and the device itself scatters only what it
has found intact: the thread puts copies on the stream and looks later whether they are over. The staging memory is one
allocation, so that UCX opens one handle of the peer's and keeps it.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] (compiled)

from services.contracts.placement import Placement
from services.kvtransfer.pieces import SEAL_BYTES, Piece
from services.kvtransfer.session import Limits
from services.runtime.cuda import Device, Event, Stream, array_interface, call
from services.runtime.worker_line import CudaArena

RUN = np.dtype([("base", "u8"), ("stride", "u8"), ("payload", "u8"), ("begin", "u8"), ("ids", "u8")])  # as units.cu's
THREADS = 256
BLOCKS_PER_SM = 8
SLICE = 32 << 10  # as units.cu's: what one block of threads moves in a turn
WORD = 8  # bytes
TABLES = 16  # made at the start
KNOWN = 4096  # shapes of pieces that are remembered


class Buffer:
    """Device memory, as UCXX takes it."""

    def __init__(self, address: int, length: int):
        self.__cuda_array_interface__ = array_interface(address, length)


class CudaMemory:
    """Of one thread, on which the device's context is current from now on: UCX looks for it there."""

    pinned = True  # device memory does not move
    checksum = "sum64"

    @classmethod
    def open(cls, placement: Placement, arenas: Sequence[CudaArena], limits: Limits) -> "CudaMemory":
        """The pools of another process. ConfigError if they cannot be opened, or if the staging memory does not fit beside
        them."""
        device = Device.with_uuid(arenas[0].device)
        return cls(placement, device, [device.open(arena.handle) for arena in arenas], limits)

    def __init__(self, placement: Placement, device: Device, arenas: Sequence[int], limits: Limits):
        """`arenas`: addresses on the device, of each arena of the record."""
        self._device = device
        bases = {it.arena_id: address for it, address in zip(placement.arenas, arenas, strict=True)}
        self._fields = np.zeros(len(placement.fields), RUN)
        for number, it in enumerate(placement.fields):
            self._fields[number] = (bases[it.arena_id] + it.offset, it.unit_stride, it.payload, 0, 0)
        self._staging = device.allocate(limits.staging_bytes)
        source = Path(__file__).with_name("units.cu").read_text()
        self._gather, self._scatter, self._verify = device.compile(source, ("gather", "scatter", "verify"))
        self._blocks = BLOCKS_PER_SM * device.multiprocessors
        self._stream = Stream(device)
        self._units = limits.longest_piece(placement.largest_unit) // min(it.payload for it in placement.fields)
        self._free = [Table(device, self._stream, self._units) for _ in range(TABLES)]
        self._known: dict[tuple[tuple[tuple[int, ...], int], ...], npt.NDArray[np.uint64]] = {}

    def buffer(self, at: int, length: int) -> Buffer:
        return Buffer(self._staging.address + at, length)

    def pack(self, at: int, piece: Piece, tag: int) -> "GpuCopy":
        table, address = self._table(), self._staging.address + at
        runs, count, ids = table.tell(self._runs(piece), piece, tag)
        table.intact[0] = True
        slices = -(-piece.length // SLICE)
        self._launch(self._gather, slices, address, piece.length, runs, count, ids, table.seal + WORD)
        self._stream.copy(address + piece.length, table.seal, SEAL_BYTES)
        return self._copy(table)

    def unpack(self, at: int, piece: Piece, tag: int) -> "GpuCopy":
        table, address = self._table(), self._staging.address + at
        runs, count, ids = table.tell(self._runs(piece), piece, tag)
        self._launch(self._verify, piece.length // THREADS // 64 + 1, address, piece.length, table.seal + WORD)
        slices = -(-piece.length // SLICE)
        self._launch(self._scatter, slices, address, piece.length, runs, count, ids, table.seal, table.intact_address)
        return self._copy(table)

    def _runs(self, piece: Piece) -> npt.NDArray[np.uint64]:
        """RUN of each field of each of its units, as words. Pieces of one shape have the same."""
        shape = tuple((run.fields, len(run.ids)) for run in piece.units)
        known = self._known.get(shape)
        if known is None:
            counts = np.array([count for fields, count in shape for _ in fields], np.uint64)
            firsts = np.cumsum([0, *(count for _, count in shape)])
            runs = self._fields[[field for fields, _ in shape for field in fields]]
            runs["begin"][1:] = np.cumsum(runs["payload"] * counts)[:-1]
            runs["ids"] = [first for first, (fields, _) in zip(firsts, shape, strict=False) for _ in fields]
            if len(self._known) >= KNOWN:
                self._known.clear()
            known = self._known[shape] = runs.view(np.uint64)
        return known

    def _table(self) -> "Table":
        """One that no copy uses. There are as many as there were copies at once, and making one stops the device."""
        return self._free.pop() if self._free else Table(self._device, self._stream, self._units)

    def _copy(self, table: "Table") -> "GpuCopy":
        table.passed.record(self._stream)
        return GpuCopy(table, self._free)

    def _launch(self, kernel: Any, slices: int, *arguments: int) -> None:
        self._stream.launch(kernel, max(1, min(slices, self._blocks)), THREADS, *arguments)


class Table:
    """What the kernels of one copy are told, in pinned memory and on the device: [tag][the sum, 0 before][runs][ids]; and
    what the host hears of it: an event, and whether the seal was right."""

    def __init__(self, device: Device, stream: Stream, units: int):
        """`units`: most that a piece has."""
        size = SEAL_BYTES + units * (RUN.itemsize + WORD)
        self._stream, self._memory, self._told = stream, _pinned(size), device.allocate(size)
        self._address = self._memory.ctypes.data
        self.seal = self._told.address
        self.intact = _pinned(WORD)
        self.intact_address = self.intact.ctypes.data
        self.passed = Event(device)

    def tell(self, runs: npt.NDArray[np.uint64], piece: Piece, tag: int) -> tuple[int, int, int]:
        """Put the units on the device -> address and number of runs, and address of ids."""
        ids = piece.units[0].ids if len(piece.units) == 1 else [unit for run in piece.units for unit in run.ids]
        begin = SEAL_BYTES // WORD
        end = begin + len(runs)
        self._memory[0], self._memory[1] = tag, 0
        self._memory[begin:end] = runs
        self._memory[end : end + len(ids)] = ids
        self._stream.write(self.seal, self._address, (end + len(ids)) * WORD)
        return self.seal + begin * WORD, len(runs) * WORD // RUN.itemsize, self.seal + end * WORD


class GpuCopy:
    """Copy of a GPU. Its table is free again once it was seen to be completed."""

    def __init__(self, table: Table, free: list[Table]):
        self._table: Table | None = table
        self._free = free
        self.intact = False

    @property
    def completed(self) -> bool:
        if self._table is not None and self._table.passed.reached:
            self.intact = bool(self._table.intact[0])
            self._free.append(self._table)
            self._table = None
        return self._table is None


def _pinned(length: int) -> npt.NDArray[np.uint64]:
    """Host memory that the device copies from by itself, for this process's life."""
    address = int(call(driver.cuMemHostAlloc, length, 0))
    return np.ctypeslib.as_array((ctypes.c_uint64 * (length // WORD)).from_address(address))
