"""Gather, verify and scatter on a GPU against the CPU's, over pools with gaps between units."""

import struct
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from services.contracts.placement import Arena, FieldPlace, Placement
from services.kvtransfer.frames import Copy, HostMemory
from services.kvtransfer.pieces import SEAL_BYTES, Piece, Units
from services.kvtransfer.session import Limits
from tests.lib.position_sum import position_sum
from tests.lib.transfer import record

pytestmark = pytest.mark.gpu(1)
UNITS, TAG = 5, 0x0001_0002_0000_0003
LIMITS = Limits(frame_bytes=4 << 20, frames=2, piece_bytes=4 << 20)
SIZES = ((100, 128), (256, 320), (36, 64), (147456, 147456), (262144, 262208))  # payload and stride; two not multiples of 16


def placement() -> Placement:
    fields: list[FieldPlace] = []
    offset = 64
    for number, (payload, stride) in enumerate(SIZES):
        shape = (payload // 4,)
        fields.append(FieldPlace(f"t.{number}.kda_rec", number, "slot", "float32", shape, 0, offset, stride, payload))
        offset += UNITS * stride
    return replace(record("decode"), fields=tuple(fields), arenas=(Arena(0, "a", offset),), num_slots=UNITS)


@pytest.fixture
def pools() -> Any:
    """The same pools on the CPU and on a GPU: (bytes, HostMemory, bytes, CudaMemory)."""
    from services.kvtransfer.cuda_memory import CudaMemory
    from services.runtime.cuda import Device

    place, device = placement(), Device(0)
    length = place.arenas[0].length
    host = bytearray(Random(1).randbytes(length))
    arena = device.allocate(length)
    there = torch.as_tensor(arena, device="cuda:0")
    there.copy_(torch.frombuffer(host, dtype=torch.uint8))
    torch.cuda.synchronize()
    return host, HostMemory(place, [host], LIMITS.staging_bytes), there, CudaMemory(place, device, [arena.address], LIMITS)


def content(buffer: Any) -> torch.Tensor:
    return torch.as_tensor(buffer, device="cuda:0")


RUNS = [
    [Units((0,), (3,))],
    [Units((2, 0, 1), (4, 0, 2)), Units((3,), (1, 3))],
    [Units((4, 3), (2, 0, 4)), Units((2,), (0, 1, 2, 3, 4))],
    [Units((0, 1, 2, 3, 4), (1,)), Units((4,), (3,))],
]


def over(copy: Copy) -> bool:
    """Whether it was intact, in the end."""
    while not copy.completed:
        pass
    return copy.intact


def piece(units: list[Units]) -> Piece:
    return Piece(tuple(units), sum(SIZES[field][0] * len(run.ids) for run in units for field in run.fields))


@pytest.mark.parametrize("units", RUNS, ids=["one", "uneven", "two runs", "all"])
@pytest.mark.parametrize("at", [0, 1 << 20])
def test_pieces_and_pools_are_those_of_the_cpu_and_seals_those_of_the_definition(pools: Any, units: list[Units], at: int):
    host, cpu, there, gpu = pools
    it = piece(units)
    cpu.pack(at, it, TAG)
    assert over(gpu.pack(at, it, TAG))
    packed = content(gpu.buffer(at, it.length + SEAL_BYTES)).cpu().numpy()
    assert np.array_equal(packed[: it.length], cpu.buffer(at, it.length))
    assert packed[it.length :].tobytes() == struct.pack("<QQ", TAG, position_sum(bytes(cpu.buffer(at, it.length))))
    moved = piece([Units(run.fields, tuple(UNITS - 1 - unit for unit in run.ids)) for run in units])
    assert over(cpu.unpack(at, moved, TAG)) and over(gpu.unpack(at, moved, TAG))
    torch.cuda.synchronize()
    assert bytes(there.cpu().numpy()) == bytes(host), "units moved, gaps and all others as they were"


def test_a_wrong_byte_anywhere_or_another_tag_is_found_and_nothing_is_written(pools: Any):
    host, _, there, gpu = pools
    it = piece([Units((2, 0, 4), (1, 2)), Units((0,), (4,))])
    over(gpu.pack(0, it, TAG))
    received = content(gpu.buffer(0, it.length + SEAL_BYTES))
    wrong = piece([Units((2, 0, 4), (2, 1)), Units((0,), (3,))])  # it would show
    for at in [0, 7, 8, 71, it.length // 2, it.length - 17, it.length - 1, it.length, it.length + 8, it.length + 15]:
        received[at] ^= 0x10
        torch.cuda.synchronize()
        assert not over(gpu.unpack(0, wrong, TAG)), f"byte {at}"
        received[at] ^= 0x10
    torch.cuda.synchronize()
    assert not over(gpu.unpack(0, wrong, TAG + 1))
    assert bytes(there.cpu().numpy()) == bytes(host)
    assert over(gpu.unpack(0, it, TAG))
