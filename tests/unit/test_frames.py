"""Gather and scatter over pools with gaps between units, and the sums of frames."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3mesh.errors import ConfigError
from services.contracts.placement import Arena, FieldPlace, Placement
from services.kvtransfer.frames import HostMemory, check_frame_bytes
from services.kvtransfer.messages import Units
from tests.lib.transfer import record

UNITS = 5


def placement(strides: tuple[int, int]) -> Placement:
    fields = tuple(
        FieldPlace(f"t.{n}.kda_rec", n, "slot", "float32", (payload // 4,), 0, 64 + n * 4096, stride, payload)
        for n, (payload, stride) in enumerate(zip((100, 256), strides, strict=True))
    )
    base = record("decode")
    return Placement(**{**vars(base), "fields": fields, "arenas": (Arena(0, "a", 8192),), "num_slots": UNITS})


def pools(strides: tuple[int, int], fill: int) -> tuple[bytearray, HostMemory]:
    memory = bytearray([fill]) * 8192
    return memory, HostMemory(placement(strides), [memory], 2, 4096)


runs = st.lists(st.tuples(st.integers(0, 1), st.permutations(range(UNITS)).map(lambda ids: ids[:3])), min_size=1, max_size=3)


@given(runs, st.integers(0, 1 << 32))
def test_what_is_gathered_is_scattered_with_each_side_s_own_strides_and_nothing_else_changes(
    chosen: list[tuple[int, list[int]]], seed: int
):
    chosen = list(dict(chosen).items())  # a field once
    source, p = pools((128, 320), 0)
    source[:] = Random(seed).randbytes(8192)
    target, d = pools((192, 256), 0xEE)
    length = sum((100, 256)[field] * len(ids) for field, ids in chosen)
    checksum = p.gather(1, [Units((field,), tuple(ids)) for field, ids in chosen])
    d.frame(0, length)[:] = p.frame(1, length)
    assert d.verify(0, length, checksum)
    moved = [Units((field,), tuple(UNITS - 1 - unit for unit in ids)) for field, ids in chosen]
    d.scatter(0, moved)
    wanted = bytearray([0xEE]) * 8192
    for field, ids in chosen:
        size, base = (100, 256)[field], 64 + field * 4096
        for unit in ids:
            there, here = base + (UNITS - 1 - unit) * (192, 256)[field], base + unit * (128, 320)[field]
            wanted[there : there + size] = source[here : here + size]
    assert target == wanted


def test_a_checksum_is_xxh3_and_sees_one_bit():
    _, memory = pools((128, 320), 0)
    nothing = 0x2D06800538D394C2  # XXH3_64bits of no bytes, from its specification
    assert memory.gather(0, []) == nothing and memory.verify(0, 0, nothing)
    checksum = memory.gather(0, [Units((0,), (1, 2)), Units((1,), (0,))])
    assert memory.verify(0, 456, checksum) and not memory.verify(0, 455, checksum)
    memory.frame(0, 456)[300] ^= 1
    assert not memory.verify(0, 456, checksum)


def test_frames_of_the_ring_do_not_overlap():
    memory = HostMemory(placement((128, 320)), [bytes(8192)], 3, 64)
    for number in range(3):
        memory.frame(number, 64)[:] = number + 1
    assert [set(memory.frame(number, 64).tolist()) for number in range(3)] == [{1}, {2}, {3}]


def test_a_frame_below_the_largest_unit_is_refused():
    check_frame_bytes(record("decode"), 36 << 10)
    with pytest.raises(ConfigError, match=r"--transfer-frame-bytes 36863: must hold .* 36864 bytes"):
        check_frame_bytes(record("decode"), (36 << 10) - 1)


def test_prefill_pools_are_only_read():
    p = HostMemory(placement((128, 320)), [bytes(8192)], 1, 4096)
    with pytest.raises(ValueError, match="read-only"):
        p.scatter(0, [Units((1,), (0,))])


def test_staging_memory_that_is_pinned_is_locked_as_it_is_touched():
    before, memory = _locked(), HostMemory(placement((128, 320)), [bytes(8192)], 4, 4 << 20)
    if not memory.pinned:
        pytest.skip("RLIMIT_MEMLOCK is too small here")
    memory.frame(2, 4 << 20)[:] = 1
    assert _locked() - before >= 4 << 20


def _locked() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")]
    return int(line.split()[1]) << 10
