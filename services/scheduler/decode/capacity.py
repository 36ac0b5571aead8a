"""What a decode replica can hold: its places, blocks and slots, and which replica a newcomer gets (spec scheduling §3.2)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS, BlockId, BlockKey, Place, Replica, SlotId
from services.scheduler.blocks import BlockAllocator
from services.scheduler.prefix import Entry, PrefixCache, held, unshared
from services.scheduler.slots import SlotAllocator

GROWTH_TOKENS = 512  # headroom that admission leaves to everyone who is already there
QUARANTINE_SHARE = 0.1  # of a replica's blocks; beyond it nobody is admitted there


@dataclass(slots=True)
class Holding:
    """What one request holds on its replica. It moves from state to state and ends in Pool.give_back."""

    replica: Replica
    place: Place
    slot: SlotId
    blocks: list[BlockId]  # its table: those found in the cache, then its own
    cached: list[Entry]  # the cache's entries for its first blocks: those found, and its own when their rows are final
    found: int = 0  # blocks that need not be sent

    @property
    def own_blocks(self) -> list[BlockId]:
        """Those that the cache does not have."""
        return unshared(self.blocks, self.cached)

    @property
    def released(self) -> int:
        """Blocks that become available when the holding is given back."""
        return len(self.own_blocks) + sum(entry.holders == 1 for entry in self.cached)


class Pool:
    """One replica's places, blocks and slots."""

    def __init__(self, replica: Replica, places: int, num_blocks: int, num_slots: int):
        self.replica = replica
        self.places = places
        self.blocks = BlockAllocator(num_blocks)
        self.slots = SlotAllocator(num_slots)
        self.cache = PrefixCache(self.blocks, self.slots)  # of blocks alone: the state always comes with the request
        self.clears: set[Place] = set()  # places that ended since the last plan; the workers still know them
        self._free_places = set(map(Place, range(places)))

    @property
    def places_used(self) -> int:
        return self.places - len(self._free_places)

    def take(self, blocks: int, keys: Sequence[BlockKey] = ()) -> Holding | None:
        """The lowest free place, a slot and `blocks` blocks, those of `keys` from the cache as far as it has them; None and no
        change if something is missing."""
        found = self.cache.find(keys)
        lacking = self.cache.blocks_available < blocks - held(found)
        if lacking or not self._free_places or not self.cache.slots_available:
            return None
        self.cache.hold(found)
        more, slot = self.cache.take_blocks(blocks - len(found)), self.cache.take_slot()
        assert more is not None and slot is not None
        place = min(self._free_places)
        self._free_places.remove(place)
        return Holding(self.replica, place, slot, [entry.block for entry in found] + more, found, len(found))

    def grow(self, holding: Holding, blocks: int) -> bool:
        """Bring the holding to `blocks` blocks; False and no change if they are not there."""
        more = self.cache.take_blocks(max(0, blocks - len(holding.blocks)))
        if more is None:
            return False
        holding.blocks += more
        return True

    def merge(self, holding: Holding) -> bool:
        """Give up what the holding has twice: a block of its own beside a cached one that others have let go of meanwhile ->
        whether there was any."""
        merged = [self.cache.take_over(entry, block) for block, entry in zip(holding.blocks, holding.cached, strict=False)]
        return any(merged)

    def lacking(self, holding: Holding, blocks: int) -> int:
        """How many blocks are not there to bring the holding to `blocks`."""
        return max(0, blocks - len(holding.blocks) - self.cache.blocks_available)

    def cede(self, holding: Holding, count: int) -> None:
        """Make `count` of the blocks that the holding would release available, the last ones; the rest stays with it."""
        enough = self.cache.blocks_available + count
        while self.cache.blocks_available < enough:
            block = holding.blocks.pop()
            if len(holding.blocks) < len(holding.cached):
                entry = holding.cached.pop()
                self.cache.let_go([entry])
                if entry.block == block:
                    continue
            self.blocks.free([block])

    def final(self, holding: Holding, key: BlockKey) -> None:
        """The rows of the holding's first block that is not cached will not change any more; `key` names it."""
        before = holding.cached[-1] if holding.cached else None
        holding.cached.append(self.cache.add(before, key, holding.blocks[len(holding.cached)]))

    def give_back(self, holding: Holding) -> None:
        """Free everything; the holding is empty afterwards and must not be used again."""
        if holding.place in self._free_places:
            raise ValueError(f"place {holding.place} of replica {self.replica} is given back twice")
        self.blocks.free(holding.own_blocks)
        self.cache.let_go(holding.cached)
        self.slots.free(holding.slot)
        self._free_places.add(holding.place)
        holding.blocks, holding.cached = [], []

    def check(self, holdings: Sequence[Holding]) -> None:
        """`holdings` are all there are on this replica: nothing is held twice, nothing is lost."""
        self.cache.check()
        own = [block for holding in holdings for block in holding.own_blocks]
        held = Counter(entry for holding in holdings for entry in holding.cached)
        slots = {holding.slot for holding in holdings}
        places = {holding.place for holding in holdings}
        in_use = self.cache.blocks_in_use
        assert len(own) == len(set(own)) == in_use - len(held), f"replica {self.replica}: blocks doubly owned or lost"
        assert len(own) == self.blocks.used - self.cache.cached_blocks, f"replica {self.replica}: a cached block is somebody's"
        assert all(entry.holders == count for entry, count in held.items()), f"replica {self.replica}: wrong holders"
        assert len(slots) == len(holdings) == self.cache.slots_in_use, f"replica {self.replica}: slots shared or lost"
        assert len(places) == len(holdings) == self.places_used, f"replica {self.replica}: places shared or lost"
        assert not places & self._free_places, f"replica {self.replica}: places both held and free"


@dataclass(frozen=True, slots=True)
class Load:
    """A replica as admission sees it."""

    pool: Pool
    promised: int  # blocks that those who hold a place there may still ask for, within GROWTH_TOKENS
    quarantined: int = 0  # blocks of ended rooms that an agent may still write to
    found: int = 0  # blocks of the newcomer that are here already
    shared: int = 0  # of them held by others anyway
    closed: bool = False  # somebody who was there before waits to come back

    def admits(self, need: int) -> bool:
        """Whether `need` blocks, a place and a slot are there for one more, and everybody can still grow as promised."""
        pool = self.pool
        return (
            not self.closed
            and pool.places_used < pool.places
            and pool.cache.slots_available > 0
            and self.quarantined <= QUARANTINE_SHARE * pool.blocks.capacity
            and pool.cache.blocks_available - self.promised >= need - self.shared
        )


def growth(position: int, remaining: int, rows: int, held: int) -> int:
    """Blocks that a request at `position` with `remaining` tokens to go asks for within its next GROWTH_TOKENS.

    The last round starts at most remaining - 1 rows further on and writes `rows` rows.
    """
    if remaining < 1:
        return 0
    return max(0, blocks_for(position + min(remaining, GROWTH_TOKENS) - 1 + rows) - held)


def choose(loads: Sequence[Load], blocks: int, growth_blocks: int) -> Replica | None:
    """The replica for a newcomer that needs `blocks` now and `growth_blocks` soon, or None if it must wait.

    Fewest places taken first, then most blocks that are there already, then most free ones, then the lowest number. Reserved
    requests count like running ones.
    """
    open_loads = [load for load in loads if load.admits(blocks + growth_blocks)]
    if not open_loads:
        return None
    return min(open_loads, key=_preference).pool.replica


def max_request_tokens(num_blocks: int, max_model_len: int, rows: int) -> int:
    """Prompt and new tokens that one request may have on an empty replica."""
    return min(max_model_len, (num_blocks - 1) * BLOCK_TOKENS - (rows - 1))


def _preference(load: Load) -> tuple[int, int, int, Replica]:
    pool = load.pool
    return pool.places_used, -load.found, -pool.cache.blocks_available, pool.replica
