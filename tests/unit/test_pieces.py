"""How frames are cut into extents, and those into pieces: both ends alike, and nothing lost."""

from hypothesis import given
from hypothesis import strategies as st

from services.kvtransfer.extents import bytes_of, frames_of
from services.kvtransfer.messages import Extent
from services.kvtransfer.pieces import SEAL_BYTES, Units, cut, frame_room, places, room_of

PAYLOADS = (1000, 64, 4096, 300, 16)
units = st.lists(
    st.builds(
        Units,
        st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple),
        st.lists(st.integers(1, 99), min_size=1, max_size=9).map(tuple),
    ),
    min_size=1,
    max_size=5,
)
extents = st.lists(
    st.builds(
        Extent,
        st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True).map(tuple),
        st.integers(0, 9),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=5,
)


def one_by_one(runs: list[Units]) -> list[tuple[int, int]]:
    return [(field, unit) for run in runs for field in run.fields for unit in run.ids]


@given(units, st.integers(1, 20_000))
def test_pieces_hold_every_unit_once_in_order_and_are_as_full_as_whole_units_make_them(runs: list[Units], piece_bytes: int):
    pieces = cut(runs, PAYLOADS, piece_bytes)
    held = [one_by_one(list(piece.units)) for piece in pieces]
    assert [unit for piece in held for unit in piece] == one_by_one(runs)
    for piece, its in zip(pieces, held, strict=True):
        assert piece.length == sum(PAYLOADS[field] for field, _ in its)
        assert piece.length <= piece_bytes or len(its) == 1
    for piece, following in zip(pieces, held[1:], strict=False):
        assert piece.length + PAYLOADS[following[0][0]] > piece_bytes, "the next unit would have fitted"


@given(units, st.integers(1, 20_000))
def test_any_frame_fits_into_the_room_of_one_and_its_pieces_do_not_overlap(runs: list[Units], piece_bytes: int):
    pieces = cut(runs, PAYLOADS, piece_bytes)
    ends = [0]
    for at, piece in zip(places(pieces), pieces, strict=True):
        assert at >= ends[-1] and at % 16 == 0
        ends.append(at + piece.length + SEAL_BYTES)
        assert room_of(piece.length) >= piece.length + SEAL_BYTES
    assert ends[-1] <= frame_room(max(4096, sum(piece.length for piece in pieces)), piece_bytes)


@given(extents, st.integers(4096, 50_000))
def test_frames_hold_every_position_of_every_extent_once_and_are_no_longer_than_they_may(written: list[Extent], size: int):
    def positions(of: list[Extent]) -> list[tuple[int, int]]:
        return sorted((field, it.first + n) for it in of for field in it.fields for n in range(it.count))

    frames = list(frames_of(written, PAYLOADS, size))
    assert positions([it for parts, _ in frames for it in parts]) == positions(written)
    for parts, length in frames:
        assert 0 < length <= size and length == sum(bytes_of(it, PAYLOADS) for it in parts)
