"""The prefix cache of one pool: blocks that outlive their requests, and KDA states at some of their ends (spec scheduling
§2.5, cache-and-handoff §13).

Its blocks form a tree: an entry follows the entry of the tokens before it. Whoever holds an entry holds all before it too,
and lets go of the last first. So the entry that nobody has held for the longest time has none behind it, and may leave.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.contracts.ids import BlockId, BlockKey, SlotId
from services.scheduler.blocks import BlockAllocator
from services.scheduler.slots import SlotAllocator


@dataclass(slots=True, eq=False)
class Entry:
    """A full block whose rows are final. Nobody writes to it while it is here."""

    key: BlockKey
    before: "Entry | None"
    block: BlockId
    holders: int = 1
    checkpoint: SlotId | None = None  # holds the KDA state behind the block's last token


def held(entries: Sequence[Entry]) -> int:
    """How many of these somebody holds: using them too takes nothing from what is available."""
    return sum(entry.holders > 0 for entry in entries)


def unshared(blocks: Sequence[BlockId], entries: Sequence[Entry]) -> list[BlockId]:
    """Of a request's blocks, whose first ones the entries are of: those that are its own, to be freed when it ends."""
    own = [block for block, entry in zip(blocks, entries, strict=False) if block != entry.block]
    return [*own, *blocks[len(entries) :]]


class PrefixCache:
    """Takes blocks and slots from their allocators, and gives those back that are needed for something else.

    A block that is taken belongs to its taker until it becomes an entry here; entries that nobody holds (idle) count as
    available. Checkpoints are copied on use, so nobody holds them: each may go at any time.
    """

    def __init__(self, blocks: BlockAllocator, slots: SlotAllocator):
        self._blocks, self._slots = blocks, slots
        self._entries: dict[BlockKey, Entry] = {}
        self._idle: OrderedDict[BlockKey, Entry] = OrderedDict()  # held by nobody, the longest first
        self._checkpoints: OrderedDict[SlotId, Entry] = OrderedDict()  # used by nobody for the longest time first
        self.blocks_evicted = 0
        self.checkpoints_evicted = 0

    # ---- questions
    @property
    def cached_blocks(self) -> int:
        return len(self._entries)

    @property
    def cached_checkpoints(self) -> int:
        return len(self._checkpoints)

    @property
    def blocks_in_use(self) -> int:
        return self._blocks.used - len(self._idle)

    @property
    def blocks_available(self) -> int:
        return self._blocks.free_count + len(self._idle)

    @property
    def slots_in_use(self) -> int:
        return self._slots.used - len(self._checkpoints)

    @property
    def slots_available(self) -> int:
        return self._slots.free_count + len(self._checkpoints)

    def find(self, keys: Sequence[BlockKey]) -> list[Entry]:
        """The longest run of cached blocks from the first key on."""
        found: list[Entry] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            found.append(entry)
        return found

    def has_checkpoint(self, key: BlockKey) -> bool:
        return key in self._entries and self._entries[key].checkpoint is not None

    # ---- blocks
    def take_blocks(self, count: int) -> list[BlockId] | None:
        """`count` blocks, idle entries making way; None and no change if there are not enough."""
        if count > self.blocks_available:
            return None
        while self._blocks.free_count < count:
            self._evict()
        return self._blocks.allocate(count)

    def hold(self, entries: Sequence[Entry]) -> None:
        """From now on these stay. All entries before the first must be held by the caller already."""
        for entry in entries:
            entry.holders += 1
            self._idle.pop(entry.key, None)
            if entry.checkpoint is not None:
                self._checkpoints.move_to_end(entry.checkpoint)

    def let_go(self, entries: Sequence[Entry]) -> None:
        """The holder of these, from the first block on, needs them no more."""
        for entry in reversed(entries):
            entry.holders -= 1
            if not entry.holders:
                self._idle[entry.key] = entry

    def add(self, before: Entry | None, key: BlockKey, block: BlockId) -> Entry:
        """The caller's block becomes an entry, which it holds. If the key is here already, the entry's own block stays while
        somebody reads it, and the caller's goes on to be the caller's: `entry.block` tells."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key, before, block)
            return entry
        if not entry.holders:
            self._blocks.free([entry.block])
            entry.block = block
        self.hold([entry])
        return entry

    def take_over(self, entry: Entry, block: BlockId) -> bool:
        """A holder has the entry's rows in a block of its own, which becomes the entry's, whose block is free then: if nobody
        else holds it."""
        if entry.holders > 1 or entry.block == block:
            return False
        self._blocks.free([entry.block])
        entry.block = block
        return True

    # ---- slots
    def take_slot(self, evict: bool = True) -> SlotId | None:
        """A slot, the checkpoint that was not used for the longest time making way if `evict`."""
        if not self._slots.free_count and self._checkpoints and evict:
            slot, entry = self._checkpoints.popitem(last=False)
            self._drop_checkpoint(entry, slot)
        return self._slots.allocate()

    def add_checkpoint(self, entry: Entry, slot: SlotId) -> None:
        """The slot now has the state behind this entry."""
        if entry.checkpoint is not None:
            self._slots.free(slot)
        else:
            entry.checkpoint = slot
            self._checkpoints[slot] = entry

    # ----
    def _evict(self) -> None:
        _, entry = self._idle.popitem(last=False)
        del self._entries[entry.key]
        self._blocks.free([entry.block])
        self.blocks_evicted += 1
        if (slot := entry.checkpoint) is not None:
            del self._checkpoints[slot]
            self._drop_checkpoint(entry, slot)

    def _drop_checkpoint(self, entry: Entry, slot: SlotId) -> None:
        entry.checkpoint = None
        self._slots.free(slot)
        self.checkpoints_evicted += 1

    def check(self) -> None:
        """Raises AssertionError. Who holds what is for the holders to compare."""
        self._blocks.check()
        self._slots.check()
        blocks = {entry.block for entry in self._entries.values()}
        assert len(blocks) == len(self._entries), "two entries share a block"
        assert self._idle == {key: entry for key, entry in self._entries.items() if not entry.holders}, "idle is wrong"
        at = {key: place for place, key in enumerate(self._idle)}
        for key, entry in self._entries.items():
            assert key == entry.key and entry.holders >= 0
            if (before := entry.before) is not None:
                assert self._entries.get(before.key) is before, "an entry's predecessor has left before it"
                assert before.holders >= entry.holders, "whoever holds an entry holds its predecessor"
                assert before.holders or at[key] < at[before.key], "a predecessor would leave first"
        assert {entry.checkpoint: entry for entry in self._entries.values() if entry.checkpoint is not None} == dict(
            self._checkpoints
        ), "a checkpoint without its block, or in two places"
