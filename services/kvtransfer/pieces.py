"""How a frame travels: cut into pieces of whole units, each one UCX message with a seal behind it (pure).

A frame is what the sessions speak of, large so that few messages steer many bytes. A piece is what gather, UCX and scatter
have in hand, small so that it stays in the processor's cache on its way, and so that they work on several at once. Both agents
cut a frame alike: by the units' order and sizes and the length of a piece, which their hellos agree on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

SEAL_BYTES = 16  # behind a piece: its tag and the checksum of its units
ALIGNMENT = 16  # of a piece in staging memory: what a GPU reads at once


@dataclass(frozen=True, slots=True)
class Units:
    """Cache units of fields of this rank: block ids of paged fields, the slot of slot fields; field after field."""

    fields: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Units one after the other, `length` bytes; the seal follows them."""

    units: tuple[Units, ...]
    length: int


def cut(units: Sequence[Units], payloads: tuple[int, ...], piece_bytes: int) -> tuple[Piece, ...]:
    """As many whole units in each piece as `piece_bytes` hold, at least one. `payloads`: bytes of a unit, by field."""
    shape = tuple((run.fields, len(run.ids)) for run in units)
    return tuple(
        Piece(tuple(Units(it.fields, units[it.run].ids[it.first : it.first + it.count]) for it in parts), length)
        for parts, length in _plan(shape, payloads, piece_bytes)
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Some units of some fields of a run."""

    run: int
    fields: tuple[int, ...]
    first: int
    count: int


@lru_cache(maxsize=1024)  # frames of one length are alike
def _plan(
    shape: tuple[tuple[tuple[int, ...], int], ...], payloads: tuple[int, ...], piece_bytes: int
) -> tuple[tuple[tuple[_Part, ...], int], ...]:
    """The parts and the length of each piece. `shape`: fields and number of ids of each run."""
    pieces: list[tuple[tuple[_Part, ...], int]] = []
    parts: list[_Part] = []
    length = 0
    for number, (fields, ids) in enumerate(shape):
        for field in fields:
            payload, first = payloads[field], 0
            while first < ids:
                count = min(max((piece_bytes - length) // payload, 0 if parts else 1), ids - first)
                if not count:
                    pieces.append((tuple(parts), length))
                    parts, length = [], 0
                    continue
                before = parts[-1] if parts else None
                if before is not None and (before.run, before.first, before.count) == (number, 0, ids) == (
                    number,
                    first,
                    count,
                ):
                    parts[-1] = _Part(number, (*before.fields, field), 0, ids)
                else:
                    parts.append(_Part(number, (field,), first, count))
                length += payload * count
                first += count
    if parts:
        pieces.append((tuple(parts), length))
    return tuple(pieces)


def places(pieces: Sequence[Piece]) -> list[int]:
    """Where the pieces of a frame lie in its staging memory, one behind the other."""
    found: list[int] = []
    at = 0
    for piece in pieces:
        found.append(at)
        at += room_of(piece.length)
    return found


def room_of(length: int) -> int:
    """Bytes of staging memory that a piece takes."""
    return -(-(length + SEAL_BYTES) // ALIGNMENT) * ALIGNMENT


def frame_room(frame_bytes: int, piece_bytes: int) -> int:
    """Bytes of staging memory that any frame takes. Two neighbours are always longer than one piece may be, or they would be
    one, which bounds how many there are."""
    most = 2 * frame_bytes // piece_bytes + 1
    return -(-(frame_bytes + most * (SEAL_BYTES + ALIGNMENT)) // 256) * 256
