"""Pieces between staging memory and pools with gaps between units, and their seals."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3mesh.errors import ConfigError
from services.contracts.placement import Arena, FieldPlace, Placement
from services.kvtransfer.frames import HostMemory, check_frame_bytes
from services.kvtransfer.pieces import SEAL_BYTES, Piece, Units
from tests.lib.transfer import record

UNITS, TAG = 5, 0x0001_0002_0000_0003


def placement(strides: tuple[int, int]) -> Placement:
    fields = tuple(
        FieldPlace(f"t.{n}.kda_rec", n, "slot", "float32", (payload // 4,), 0, 64 + n * 4096, stride, payload)
        for n, (payload, stride) in enumerate(zip((100, 256), strides, strict=True))
    )
    base = record("decode")
    return Placement(**{**vars(base), "fields": fields, "arenas": (Arena(0, "a", 8192),), "num_slots": UNITS})


def pools(strides: tuple[int, int], fill: int) -> tuple[bytearray, HostMemory]:
    memory = bytearray([fill]) * 8192
    return memory, HostMemory(placement(strides), [memory], 8192)


runs = st.lists(st.tuples(st.integers(0, 1), st.permutations(range(UNITS)).map(lambda ids: ids[:3])), min_size=1, max_size=3)


@given(runs, st.integers(0, 1 << 32))
def test_what_is_packed_is_unpacked_with_each_side_s_own_strides_and_nothing_else_changes(
    chosen: list[tuple[int, list[int]]], seed: int
):
    chosen = list(dict(chosen).items())  # a field once
    source, p = pools((128, 320), 0)
    source[:] = Random(seed).randbytes(8192)
    target, d = pools((192, 256), 0xEE)
    length = sum((100, 256)[field] * len(ids) for field, ids in chosen)
    p.pack(4096, Piece(tuple(Units((field,), tuple(ids)) for field, ids in chosen), length), TAG)
    d.buffer(0, length + SEAL_BYTES)[:] = p.buffer(4096, length + SEAL_BYTES)
    moved = tuple(Units((field,), tuple(UNITS - 1 - unit for unit in ids)) for field, ids in chosen)
    assert d.unpack(0, Piece(moved, length), TAG).intact
    wanted = bytearray([0xEE]) * 8192
    for field, ids in chosen:
        size, base = (100, 256)[field], 64 + field * 4096
        for unit in ids:
            there, here = base + (UNITS - 1 - unit) * (192, 256)[field], base + unit * (128, 320)[field]
            wanted[there : there + size] = source[here : here + size]
    assert target == wanted


PIECE = Piece((Units((0,), (1, 2)), Units((1,), (0,))), 456)


@pytest.mark.parametrize("at", [0, 300, 455, 456, 463, 464, 471])
def test_a_seal_sees_one_bit_of_the_units_of_the_tag_and_of_itself_and_then_nothing_is_written(at: int):
    target, memory = pools((128, 320), 0)
    memory.pack(0, PIECE, TAG)
    memory.buffer(0, 472)[at] ^= 1
    target[:] = b"\xee" * 8192
    assert not memory.unpack(0, PIECE, TAG).intact and set(target) == {0xEE}
    memory.buffer(0, 472)[at] ^= 1
    assert memory.unpack(0, PIECE, TAG).intact and set(target) == {0xEE, 0}


def test_a_piece_that_was_sent_for_another_frame_is_not_taken():
    _, memory = pools((128, 320), 0)
    memory.pack(0, PIECE, TAG)
    assert not memory.unpack(0, PIECE, TAG + 1).intact


def test_a_seal_holds_the_tag_and_xxh3():
    _, memory = pools((128, 320), 0)
    memory.pack(0, Piece((), 0), TAG)
    nothing = 0x2D06800538D394C2  # XXH3_64bits of no bytes, from its specification
    assert bytes(memory.buffer(0, SEAL_BYTES)) == TAG.to_bytes(8, "little") + nothing.to_bytes(8, "little")


def test_a_frame_below_the_largest_unit_is_refused():
    check_frame_bytes(record("decode"), 36 << 10)
    with pytest.raises(ConfigError, match=r"--transfer-frame-bytes 36863: must hold .* 36864 bytes"):
        check_frame_bytes(record("decode"), (36 << 10) - 1)


def test_prefill_pools_are_only_read():
    p = HostMemory(placement((128, 320)), [bytes(8192)], 4096)
    p.pack(0, PIECE, TAG)
    with pytest.raises(ValueError, match="read-only"):
        p.unpack(0, PIECE, TAG)


def test_staging_memory_that_is_pinned_is_locked_as_it_is_touched():
    before, memory = _locked(), HostMemory(placement((128, 320)), [bytes(8192)], 16 << 20)
    if not memory.pinned:
        pytest.skip("RLIMIT_MEMLOCK is too small here")
    memory.buffer(8 << 20, 4 << 20)[:] = 1
    assert _locked() - before >= 4 << 20


def _locked() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck")]
    return int(line.split()[1]) << 10
