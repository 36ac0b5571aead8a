"""What a decode replica can hold: its places, blocks and slots, and which replica a newcomer gets (spec scheduling §3.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS, BlockId, Place, Replica, SlotId
from services.scheduler.blocks import BlockAllocator
from services.scheduler.slots import SlotAllocator

GROWTH_TOKENS = 512  # headroom that admission leaves to everyone who is already there
QUARANTINE_SHARE = 0.1  # of a replica's blocks; beyond it nobody is admitted there


@dataclass(slots=True)
class Holding:
    """What one request holds on its replica. It moves from state to state and ends in Pool.give_back."""

    replica: Replica
    place: Place
    slot: SlotId
    blocks: list[BlockId]


class Pool:
    """One replica's places, blocks and slots."""

    def __init__(self, replica: Replica, places: int, num_blocks: int, num_slots: int):
        self.replica = replica
        self.places = places
        self.blocks = BlockAllocator(num_blocks)
        self.slots = SlotAllocator(num_slots)
        self.clears: set[Place] = set()  # places that ended since the last plan; the workers still know them
        self._free_places = set(map(Place, range(places)))

    @property
    def places_used(self) -> int:
        return self.places - len(self._free_places)

    def take(self, blocks: int) -> Holding | None:
        """The lowest free place, a slot and `blocks` blocks; None and no change if one of them is missing."""
        if not self._free_places or not self.slots.free_count:
            return None
        table = self.blocks.allocate(blocks)
        slot = self.slots.allocate() if table is not None else None
        if table is None or slot is None:
            return None
        place = min(self._free_places)
        self._free_places.remove(place)
        return Holding(self.replica, place, slot, table)

    def grow(self, holding: Holding, blocks: int) -> bool:
        """Bring the holding to `blocks` blocks; False and no change if they are not there."""
        more = self.blocks.allocate(max(0, blocks - len(holding.blocks)))
        if more is None:
            return False
        holding.blocks += more
        return True

    def give_back(self, holding: Holding) -> None:
        """Free everything; the holding is empty afterwards and must not be used again."""
        if holding.place in self._free_places:
            raise ValueError(f"place {holding.place} of replica {self.replica} is given back twice")
        self.blocks.free(holding.blocks)
        self.slots.free(holding.slot)
        self._free_places.add(holding.place)
        holding.blocks = []

    def check(self, holdings: Sequence[Holding]) -> None:
        """`holdings` are all there are on this replica: nothing is held twice, nothing is lost."""
        self.blocks.check()
        self.slots.check()
        blocks = [block for holding in holdings for block in holding.blocks]
        slots = {holding.slot for holding in holdings}
        places = {holding.place for holding in holdings}
        assert len(blocks) == len(set(blocks)) == self.blocks.used, f"replica {self.replica}: blocks shared or lost"
        assert len(slots) == len(holdings) == self.slots.used, f"replica {self.replica}: slots shared or lost"
        assert len(places) == len(holdings) == self.places_used, f"replica {self.replica}: places shared or lost"
        assert not places & self._free_places, f"replica {self.replica}: places both held and free"


@dataclass(frozen=True, slots=True)
class Load:
    """A replica as admission sees it."""

    pool: Pool
    promised: int  # blocks that those who hold a place there may still ask for, within GROWTH_TOKENS
    quarantined: int  # blocks of ended rooms that an agent may still write to


def growth(position: int, remaining: int, rows: int, held: int) -> int:
    """Blocks that a request at `position` with `remaining` tokens to go asks for within its next GROWTH_TOKENS.

    The last round starts at most remaining - 1 rows further on and writes `rows` rows.
    """
    if remaining < 1:
        return 0
    return max(0, blocks_for(position + min(remaining, GROWTH_TOKENS) - 1 + rows) - held)


def choose(loads: Sequence[Load], blocks: int, growth_blocks: int) -> Replica | None:
    """The replica for a newcomer that needs `blocks` now and `growth_blocks` soon, or None if it must wait.

    Fewest places taken first, then most free blocks, then the lowest number. Reserved requests count like running ones.
    """
    open_loads = [load for load in loads if _admits(load, blocks + growth_blocks)]
    if not open_loads:
        return None
    best = min(open_loads, key=lambda load: (load.pool.places_used, -load.pool.blocks.free_count, load.pool.replica))
    return best.pool.replica


def max_request_tokens(num_blocks: int, max_model_len: int, rows: int) -> int:
    """Prompt and new tokens that one request may have on an empty replica."""
    return min(max_model_len, (num_blocks - 1) * BLOCK_TOKENS - (rows - 1))


def _admits(load: Load, need: int) -> bool:
    pool = load.pool
    return (
        pool.places_used < pool.places
        and pool.slots.free_count > 0
        and load.quarantined <= QUARANTINE_SHARE * pool.blocks.capacity
        and pool.blocks.free_count - load.promised >= need
    )
