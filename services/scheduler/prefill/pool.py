"""What one prompt holds of the engine's cache, and when it may have it (spec scheduling §2.1 step 4, §2.5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.contracts.ids import BLOCK_TOKENS, BlockId, BlockKey, SlotId
from services.scheduler.blocks import BlockAllocator
from services.scheduler.prefix import Entry, PrefixCache, held, unshared
from services.scheduler.slots import SlotAllocator


@dataclass(slots=True)
class Holding:
    """What one prompt holds on this engine. It moves from state to state and ends in Pool.give_back."""

    slot: SlotId
    blocks: list[BlockId]  # its table: those found in the cache, then its own
    promised: int  # blocks that it will still ask for
    cached: list[Entry]  # the cache's entries for its first blocks: those found, and its own when they are written
    checkpoint: SlotId | None  # holds the state behind what was found
    found: int  # tokens that need not be computed
    branch: int  # tokens whose blocks are cached; a state at their end would have saved computing them
    saving: list[SlotId] = field(default_factory=list[SlotId])  # launched steps leave a checkpoint there

    @property
    def own_blocks(self) -> list[BlockId]:
        """Those that the cache does not have."""
        return unshared(self.blocks, self.cached)


class Pool:
    """Blocks and slots. A prompt takes blocks chunk by chunk, but starts only when all of them are sure to come: so no
    running prompt ever waits for blocks that another one holds."""

    def __init__(self, num_blocks: int, num_slots: int):
        self.blocks = BlockAllocator(num_blocks)
        self.slots = SlotAllocator(num_slots)
        self.cache = PrefixCache(self.blocks, self.slots)
        self.promised = 0

    def fits(self, blocks: int, keys: Sequence[BlockKey]) -> bool:
        """Whether a prompt of `blocks` blocks may start. What it finds in the cache costs nothing if others hold it anyway."""
        found, _ = self._find(keys)
        return self.cache.slots_available > 0 and self.cache.blocks_available - self.promised >= blocks - held(found)

    def cached_tokens(self, keys: Sequence[BlockKey]) -> int:
        """Tokens of a prompt that need not be computed if it starts now."""
        return len(self._find(keys)[0]) * BLOCK_TOKENS

    def start(self, blocks: int, keys: Sequence[BlockKey]) -> Holding:
        """A slot, what the cache has, and the promise of the rest of `blocks` blocks. Only if `fits(blocks, keys)`.

        The slot may be the very one whose checkpoint was found, when that had to make way: the state is then in place.
        """
        found, branch = self._find(keys)
        self.cache.hold(found)
        checkpoint = found[-1].checkpoint if found else None
        slot = self.cache.take_slot()
        assert slot is not None, "ask fits() first"
        promised = blocks - len(found)
        self.promised += promised
        table = [entry.block for entry in found]
        return Holding(slot, table, promised, found, checkpoint, len(found) * BLOCK_TOKENS, branch * BLOCK_TOKENS)

    def grow(self, holding: Holding, blocks: int) -> None:
        """Bring the holding to `blocks` blocks."""
        new = self.cache.take_blocks(blocks - len(holding.blocks))
        assert new is not None and len(new) <= holding.promised, "promised blocks are there"
        holding.blocks += new
        holding.promised -= len(new)
        self.promised -= len(new)

    def slot_for_checkpoint(self, holding: Holding, key: BlockKey, evict: bool) -> SlotId | None:
        """Where the next step may leave the state behind the block of `key`. None if there is one, or no slot for another;
        `evict`: it may take the place of an older one."""
        slot = None if self.cache.has_checkpoint(key) else self.cache.take_slot(evict)
        if slot is not None:
            holding.saving.append(slot)
        return slot

    def written(self, holding: Holding, keys: Sequence[BlockKey], checkpoint: SlotId | None) -> None:
        """All stages have written the blocks of `keys`, and the state behind the last of them if there is a checkpoint."""
        for place in range(len(holding.cached), len(keys)):
            before = holding.cached[-1] if holding.cached else None
            holding.cached.append(self.cache.add(before, keys[place], holding.blocks[place]))
        if checkpoint is not None:
            holding.saving.remove(checkpoint)
            self.cache.add_checkpoint(holding.cached[len(keys) - 1], checkpoint)

    def give_back(self, holding: Holding) -> None:
        self.promised -= holding.promised
        self.blocks.free(holding.own_blocks)
        self.cache.let_go(holding.cached)
        self.slots.free(holding.slot)
        for slot in holding.saving:  # steps that will never be answered: the engine is lost
            self.slots.free(slot)

    def _find(self, keys: Sequence[BlockKey]) -> tuple[list[Entry], int]:
        """What a prompt can start behind, up to the last entry with a checkpoint, and how many entries there are."""
        entries = self.cache.find(keys)
        count = next((n for n in range(len(entries), 0, -1) if entries[n - 1].checkpoint is not None), 0)
        return entries[:count], len(entries)
