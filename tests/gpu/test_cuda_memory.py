"""Gather, verify and scatter on a GPU against the CPU's, over pools with gaps between units."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from services.contracts.placement import Arena, FieldPlace, Placement
from services.kvtransfer.frames import HostMemory
from services.kvtransfer.messages import Units
from tests.lib.position_sum import position_sum
from tests.lib.transfer import record

pytestmark = pytest.mark.gpu(1)
UNITS, FRAME = 5, 4 << 20
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
    return host, HostMemory(place, [host], 2, FRAME), there, CudaMemory(place, device, [arena.address], 2, FRAME)


def content(frame: Any) -> torch.Tensor:
    return torch.as_tensor(frame, device="cuda:0")


RUNS = [
    [Units((0,), (3,))],
    [Units((2, 0, 1), (4, 0, 2)), Units((3,), (1, 3))],
    [Units((0,), ()), Units((4, 3), (2, 0, 4)), Units((1,), ()), Units((2,), (0, 1, 2, 3, 4))],
    [Units((0, 1, 2, 3, 4), (1,)), Units((4,), (3,))],
    [],
]


@pytest.mark.parametrize("units", RUNS, ids=["one", "uneven", "empty runs", "all", "nothing"])
def test_frames_pools_and_sums_are_those_of_the_cpu_and_of_the_definition(pools: Any, units: list[Units]):
    host, cpu, there, gpu = pools
    place = placement()
    length = sum(place.fields[field].payload * len(run.ids) for run in units for field in run.fields)
    cpu.gather(0, units)
    checksum = gpu.gather(0, units)
    if length:
        frame = content(gpu.frame(0, length)).cpu().numpy()
        assert np.array_equal(frame, cpu.frame(0, length))
    assert checksum == position_sum(bytes(cpu.frame(0, length)))
    assert gpu.verify(0, length, checksum)
    moved = [Units(run.fields, tuple(UNITS - 1 - unit for unit in run.ids)) for run in units]
    cpu.scatter(0, moved)
    gpu.scatter(0, moved)
    torch.cuda.synchronize()
    assert bytes(there.cpu().numpy()) == bytes(host), "units moved, gaps and all others as they were"


def test_any_wrong_byte_of_a_received_frame_is_found(pools: Any):
    _, _, _, gpu = pools
    units = [Units((2, 0, 4), (1, 2)), Units((0,), (4,))]
    length = 2 * (36 + 100 + 262144) + 100
    checksum = gpu.gather(1, units)
    frame = content(gpu.frame(1, length))
    for at in [0, 7, 8, 71, length // 2, length - 17, length - 1]:
        frame[at] ^= 0x10
        torch.cuda.synchronize()
        assert not gpu.verify(1, length, checksum), f"byte {at}"
        frame[at] ^= 0x10
    torch.cuda.synchronize()
    assert gpu.verify(1, length, checksum)


def test_frames_of_the_ring_do_not_overlap(pools: Any):
    _, _, _, gpu = pools
    for number in range(2):
        content(gpu.frame(number, FRAME)).fill_(number + 1)
    assert [content(gpu.frame(number, FRAME)).unique().tolist() for number in range(2)] == [[1], [2]]
