"""What each side knows of a room and of a staging frame in use, and what makes a frame or a stage's end wrong (pure)."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from services.contracts.barriers import Handoff
from services.contracts.geometry import PAGED
from services.contracts.placement import Manifest, Placement
from services.kvtransfer import messages as m
from services.kvtransfer.pieces import Piece, Units
from services.kvtransfer.session import Phase

# ---- P
Offered = tuple[m.Link, int]  # a frame of P, by its link and sequence number


@dataclass(slots=True)
class Outgoing:
    """A frame that D knows of and does not have yet."""

    room: m.Room
    length: int
    pieces: tuple[Piece, ...]
    granted: bool = False  # and being sent


@dataclass(slots=True)
class Peer:
    placement: Placement
    next_seq: int = 0
    progress_at: float = 0.0


@dataclass(slots=True)
class Source:
    """A room whose blocks and slot this rank holds. Without a link it waits for the next one to its peer."""

    link: m.Link | None
    peer: Placement
    manifest: Manifest
    deadline: float
    phase: Phase = Phase.BOOTSTRAPPED
    table: list[int] = field(default_factory=list[int])  # this rank's block ids by logical block
    slot: int = 0
    written: list[m.Extent] = field(default_factory=list[m.Extent])  # units behind a passed barrier
    written_bytes: int = 0
    offered_bytes: int = 0
    offered_frames: int = 0
    complete: bool = False  # the last barrier of the last chunk has passed
    handoff: Handoff | None = None
    done: bool = False  # StageDone is out
    progress_at: float = 0.0
    resume_by: float = 0.0  # without a link
    held: set[Offered] = field(default_factory=set[Offered])  # its frames that are offered or being sent
    # of a failed room
    grants_over: bool = False  # the peer will not grant any more
    peer_waits: bool = False  # for our Drained
    drain_by: float | None = None

    def send_again(self, link: m.Link) -> None:
        """Nothing of what went over another link counts."""
        self.link, self.done = link, False
        self.offered_bytes = self.offered_frames = 0

    def units(self, extent: m.Extent, paged: bool) -> Units:
        first = self.manifest.first_block + extent.first
        return Units(extent.fields, tuple(self.table[first : first + extent.count]) if paged else (self.slot,))


# ---- D
@dataclass(slots=True)
class Incoming:
    """A staging frame in use on D. Once its room has failed it is quarantined: it
    holds on to the room's units until nothing writes to them any more."""

    room: m.Room
    link: m.Link
    stage: int
    frame: m.Frame
    since: float  # of its grant


@dataclass(slots=True)
class Share:
    """What one stage contributes to a room."""

    expected_bytes: int
    accepted: bool = False
    announced: dict[int, int] = field(default_factory=dict[int, int])  # field of the stage -> bit set of positions
    frames_announced: int = 0
    frames: int = 0  # installed
    bytes: int = 0
    done: m.StageDone | None = None
    acked: bool = False

    def announce(self, frame: m.Frame, record: Placement, positions: int) -> str | None:
        """Count a frame's units. Why it cannot be right, or None: every unit lies in the manifest and comes once."""
        if self.done is not None:
            return "it comes after the stage's end"
        length = 0
        for extent in frame.extents:
            if not extent.fields:
                return "an extent names no field"
            bits = (1 << extent.count) - 1 << extent.first
            for index in extent.fields:
                if index >= len(record.fields):
                    return f"field {index} is not in the stage's record"
                it = record.fields[index]
                if it.kind != record.fields[extent.fields[0]].kind:
                    return f"{it.field_id} is of another kind than the fields beside it"
                if not (extent.count >= 1 and extent.first + extent.count <= (positions if it.kind == PAGED else 1)):
                    return f"positions {extent.first}+{extent.count} of {it.field_id} are not all in the manifest"
                before = self.announced.get(index, 0)
                if before & bits:
                    return f"a unit of {it.field_id} comes twice"
                self.announced[index] = before | bits
                length += extent.count * it.payload
        if not 0 < length == frame.length:
            return f"{frame.length} bytes are announced for units of {length}"
        self.frames_announced += 1
        return None


@dataclass(slots=True)
class Sink:
    """A room that this rank is to receive. `resume_by`: it waits until then for the next pairing."""

    manifest: Manifest
    deadline: float
    accept_by: float
    shares: list[Share]
    phase: Phase = Phase.BOOTSTRAPPING
    first_byte: float = 0.0
    last_byte: float = 0.0
    handoff: Handoff | None = None
    resume_by: float | None = None
    # of a failed room
    awaited: set[m.Link] = field(default_factory=set[m.Link])  # their Drained is outstanding
    waiting: set[m.Link] = field(default_factory=set[m.Link])  # for our Drained
    drain_by: float | None = None

    def begin_again(self, resume_by: float) -> None:
        """What a stage has not completed counts for nothing: the next pairing brings all of it."""
        self.resume_by = resume_by
        self.shares = [share if share.acked else Share(share.expected_bytes) for share in self.shares]
        if not self.shares[-1].acked:
            self.handoff = None


class Claims:
    """Which room each block and slot was last armed for, and in which generation. Frames name positions in an armed manifest
    and never units, so this is where late and crossing ones are kept out of memory that is another's."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, int], tuple[int, m.Room]] = {}

    def refusal(self, manifest: Manifest, live: Container[m.Room]) -> m.Failure | None:
        """Why the manifest's units cannot be the room's, or None."""
        for (kind, unit), generation in self._of(manifest):
            before, holder = self._units.get((kind, unit), (0, 0))
            if generation < before:
                return m.transfer_failed(
                    "PD_STALE",
                    f"room {manifest.room:x}: {kind} {unit} is in generation {before}, the manifest names {generation}",
                )
            if holder in live:
                return m.transfer_failed("PD_MANIFEST", f"room {manifest.room:x}: {kind} {unit} is still room {holder:x}'s")
        return None

    def take(self, manifest: Manifest) -> None:
        self._units.update({unit: (generation, manifest.room) for unit, generation in self._of(manifest)})

    def hold(self, manifest: Manifest) -> bool:
        return all(self._units[unit] == (generation, manifest.room) for unit, generation in self._of(manifest))

    def _of(self, manifest: Manifest) -> Iterator[tuple[tuple[str, int], int]]:
        for block, generation in zip(manifest.blocks, manifest.block_gens, strict=True):
            yield ("block", block), generation
        yield ("slot", manifest.slot), manifest.slot_gen


@dataclass(frozen=True, slots=True)
class Pairing:
    """The links to one life of a prefill engine, by stage, and which of our fields each of their fields is."""

    links: tuple[m.Link, ...]
    stages: tuple[Placement, ...]
    fields: tuple[tuple[int, ...], ...]

    @property
    def life(self) -> tuple[str, int]:
        return self.stages[0].engine_id, self.stages[0].engine_epoch


def end_fault(
    done: m.StageDone, share: Share, stage: int, stages: int, manifest: Manifest, verify_width: int
) -> m.Failure | None:
    """Why this cannot be the end of the stage's share, or None."""
    room = f"room {done.room:x}, stage {stage}"
    if done.stage != stage or (share.done is not None and share.done != done):
        return m.transfer_failed("PD_ROUTE", f"{room}: an end that does not belong here: {done}")
    if done.slot_gen != manifest.slot_gen:
        return m.transfer_failed(
            "PD_STALE", f"{room}: the slot is in generation {manifest.slot_gen}, the stage says {done.slot_gen}"
        )
    if (done.bytes, done.frames) != (share.expected_bytes, share.frames_announced):
        return m.transfer_failed(
            "PD_BYTES",
            f"{room}: {done.bytes} bytes in {done.frames} frames at its end; {share.expected_bytes} bytes are due and "
            f"{share.frames_announced} frames were announced",
        )
    if (done.handoff is not None) != (stage == stages - 1):
        return m.transfer_failed("PD_CAND", f"{room}: the first token comes with the last stage and only with it")
    if done.handoff is not None:
        window = done.handoff.window
        if len(window) != verify_width or window[0] != done.handoff.token:
            return m.transfer_failed(
                "PD_CAND", f"{room}: window {list(window)} must hold {verify_width} tokens and begin with {done.handoff.token}"
            )
    return None
