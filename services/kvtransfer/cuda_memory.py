"""CacheMemory of a GPU: the worker's arenas, opened by their handles, and a ring of staging frames beside them.

One kernel moves all units of a frame (units.cu), on a stream of this process's own; the copier's thread waits for it by an
event. The frames are one allocation, so that UCX opens one handle of the peer's and keeps it.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue] (compiled)

from services.contracts.placement import Placement
from services.kvtransfer.messages import Units
from services.runtime.cuda import Device, Stream, array_interface, call
from services.runtime.worker_line import CudaArena

RUN = np.dtype([("base", "u8"), ("stride", "u8"), ("payload", "u8"), ("begin", "u8"), ("ids", "u8")])  # as units.cu's
THREADS = 256
BLOCKS_PER_SM = 8
SLICE = 32 << 10  # as units.cu's: what one block of threads moves in a turn
WORD = 8  # bytes
KNOWN = 1024  # combinations of fields that are remembered
RUN_WORDS = RUN.itemsize // WORD


class Frame:
    """A frame's bytes, as UCXX takes them."""

    def __init__(self, address: int, length: int):
        self.__cuda_array_interface__ = array_interface(address, length)


class CudaMemory:
    """Made on any thread; gather, verify and scatter are one thread's, one at a time."""

    pinned = True  # device memory does not move
    checksum = "sum64"

    @classmethod
    def open(cls, placement: Placement, arenas: Sequence[CudaArena], frames: int, frame_bytes: int) -> "CudaMemory":
        """The pools of another process. ConfigError if they cannot be opened, or if the staging frames do not fit beside
        them."""
        device = Device.with_uuid(arenas[0].device)
        return cls(placement, device, [device.open(arena.handle) for arena in arenas], frames, frame_bytes)

    def __init__(self, placement: Placement, device: Device, arenas: Sequence[int], frames: int, frame_bytes: int):
        """`arenas`: addresses on the device, of each arena of the record."""
        self._device = device
        bases = {it.arena_id: address for it, address in zip(placement.arenas, arenas, strict=True)}
        self._fields = np.zeros(len(placement.fields), RUN)
        for number, it in enumerate(placement.fields):
            self._fields[number] = (bases[it.arena_id] + it.offset, it.unit_stride, it.payload, 0, 0)
        self._known: dict[tuple[int, ...], tuple[npt.NDArray[np.void], int]] = {}
        self._frame_bytes = -(-frame_bytes // 256) * 256  # the next frame is aligned too
        self._frames = device.allocate(frames * self._frame_bytes)
        source = Path(__file__).with_name("units.cu").read_text()
        self._gather, self._scatter, self._verify = device.compile(source, ("gather", "scatter", "verify"))
        self._blocks = BLOCKS_PER_SM * device.multiprocessors
        self._stream = Stream(device)
        # What a kernel is told, in pinned memory and on the device: [the sum, 0 before][runs][ids]
        units = frame_bytes // min(it.payload for it in placement.fields)
        size = WORD + units * (RUN.itemsize + WORD)
        self._table = _pinned(size)
        self._told = device.allocate(size)

    def frame(self, index: int, length: int) -> Frame:
        return Frame(self._frames.address + index * self._frame_bytes, length)

    def gather(self, index: int, units: Sequence[Units]) -> int:
        self._move(self._gather, index, units, summed=True)
        return self._wait_for_sum()

    def verify(self, index: int, length: int, checksum: int) -> bool:
        self._device.enter()
        self._table[:1] = 0
        self._tell(WORD)
        self._launch(self._verify, length // THREADS // 64 + 1, (self._address(index), length, self._told.address))
        return self._wait_for_sum() == checksum

    def scatter(self, index: int, units: Sequence[Units]) -> None:
        self._move(self._scatter, index, units, summed=False)
        self._stream.wait()

    def _move(self, kernel: Any, index: int, units: Sequence[Units], summed: bool) -> None:
        """Launch it for `units`, which lie one after the other from the frame's start on."""
        self._device.enter()
        units = [run for run in units if run.ids]
        count = sum(len(run.fields) for run in units)
        runs, ids = self._table[1 : 1 + count * RUN_WORDS].view(RUN), self._table[1 + count * RUN_WORDS :]
        at, length, place = 0, 0, 0
        for run in units:
            fields, size = self._runs_of(run.fields)
            rows = runs[at : at + len(fields)]
            rows[:] = fields
            rows["begin"] *= np.uint64(len(run.ids))
            rows["begin"] += np.uint64(length)
            rows["ids"] = place
            ids[place : place + len(run.ids)] = run.ids
            at, length, place = at + len(fields), length + size * len(run.ids), place + len(run.ids)
        self._table[0] = 0
        self._tell((1 + count * RUN_WORDS + place) * WORD)
        if count:
            told = self._told.address
            arguments = (self._address(index), length, told + WORD, count, told + (1 + count * RUN_WORDS) * WORD)
            self._launch(kernel, -(-length // SLICE), (*arguments, told) if summed else arguments)

    def _runs_of(self, fields: tuple[int, ...]) -> tuple[npt.NDArray[np.void], int]:
        """Runs of one unit of each of these fields, and their bytes together. Sessions name the same fields again and again."""
        known = self._known.get(fields)
        if known is None:
            rows = self._fields[list(fields)]
            ends = np.cumsum(rows["payload"])
            rows["begin"][1:] = ends[:-1]
            if len(self._known) >= KNOWN:
                self._known.clear()
            known = self._known[fields] = rows, int(ends[-1])
        return known

    def _address(self, index: int) -> int:
        return self._frames.address + index * self._frame_bytes

    def _tell(self, length: int) -> None:
        self._stream.write(self._told.address, self._table.ctypes.data, length)

    def _launch(self, kernel: Any, slices: int, arguments: tuple[int, ...]) -> None:
        self._stream.launch(kernel, max(1, min(slices, self._blocks)), THREADS, *arguments)

    def _wait_for_sum(self) -> int:
        self._stream.read(self._table.ctypes.data, self._told.address, WORD)
        self._stream.wait()
        return int(self._table[0])


def _pinned(length: int) -> npt.NDArray[np.uint64]:
    """Host memory that the device copies from by itself, for this process's life."""
    address = int(call(driver.cuMemHostAlloc, length, 0))
    return np.ctypeslib.as_array((ctypes.c_uint64 * (length // WORD)).from_address(address))
