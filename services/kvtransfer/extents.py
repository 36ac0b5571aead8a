"""What is written of a request's cache, divided into frames (pure)."""

from collections.abc import Iterable, Iterator, Sequence

from services.kvtransfer.messages import Extent


def bytes_of(extent: Extent, payloads: Sequence[int]) -> int:
    """`payloads`: bytes of a unit, by field."""
    return sum(payloads[index] for index in extent.fields) * extent.count


def frames_of(extents: Iterable[Extent], payloads: Sequence[int], frame_bytes: int) -> Iterator[tuple[tuple[Extent, ...], int]]:
    """Extents and length of one frame after the other, each as full as whole units make it. No unit is larger than a frame."""
    frame: list[Extent] = []
    length = 0
    waiting = list(extents)[::-1]
    while waiting:
        fits, rest = _split(waiting.pop(), payloads, frame_bytes - length)
        frame += fits
        length += sum(bytes_of(it, payloads) for it in fits)
        waiting += rest[::-1]
        if rest:
            yield tuple(frame), length
            frame, length = [], 0
    if frame:
        yield tuple(frame), length


def _split(extent: Extent, payloads: Sequence[int], space: int) -> tuple[list[Extent], list[Extent]]:
    """What of it fits into `space` bytes, and the rest: whole fields, units of the field that the cut goes through."""
    if bytes_of(extent, payloads) <= space:
        return [extent], []
    whole = 0  # fields
    while (size := payloads[extent.fields[whole]] * extent.count) <= space:
        whole, space = whole + 1, space - size
    here, units = extent.fields[whole], space // payloads[extent.fields[whole]]
    fits = [Extent(extent.fields[:whole], extent.first, extent.count), Extent((here,), extent.first, units)]
    rest = [
        Extent((here,), extent.first + units, extent.count - units),
        Extent(extent.fields[whole + 1 :], extent.first, extent.count),
    ]
    return [it for it in fits if it.fields and it.count], [it for it in rest if it.fields]
