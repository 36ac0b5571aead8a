"""What a worker tells the transfer agent beside it: rows of a step, producer barriers, the end of a prompt (spec
cache-and-handoff §7). In the order in which it happened on the device."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LocalRow:
    """Prompt positions [start, end) of a room; `new_blocks` are appended to its block table."""

    room: int
    start: int
    end: int
    last: bool
    slot: int
    new_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkStarted:
    """The rows of an engine step, before its first barrier."""

    step_id: int
    rows: tuple[LocalRow, ...]


@dataclass(frozen=True, slots=True)
class FieldsReady:
    """Producer steps [lo, hi) of the stage have written the caches of this engine step (Geometry.producer_steps)."""

    step_id: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Handoff:
    """What decode begins with: the first token, and the window that begins with it."""

    token: int
    window: tuple[int, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class HandoffReady:
    """Last stage: a prompt has ended, after the final barrier of its last chunk."""

    room: int
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class ForgetLocal:
    """The rooms' block tables are dropped."""

    rooms: tuple[int, ...]


Notice = ChunkStarted | FieldsReady | HandoffReady | ForgetLocal
