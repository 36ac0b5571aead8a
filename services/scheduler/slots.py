"""The recurrent-state slots of one cache pool: one for each request that the engine holds (spec cache-and-handoff §2, §14)."""

from services.contracts.ids import NULL_SLOT, SlotId


class SlotAllocator:
    """Hands out slots 1..num_slots-1 of a pool of `num_slots`; slot 0 is the null slot and stays out."""

    def __init__(self, num_slots: int):
        if num_slots < 2:
            raise ValueError(f"num_slots = {num_slots}: a pool needs the null slot and at least one more")
        self.num_slots = num_slots
        self._free = [SlotId(n) for n in range(num_slots - 1, NULL_SLOT, -1)]  # a stack: the slot freed last is given first
        self._held: set[SlotId] = set()
        self._generations = [1] * num_slots

    @property
    def used(self) -> int:
        return len(self._held)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def allocate(self) -> SlotId | None:
        if not self._free:
            return None
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def free(self, slot: SlotId) -> None:
        """Take a slot back and start its next generation. Raises if it is not held."""
        if slot not in self._held:
            raise ValueError(f"free({slot}): the slot is not held")
        self._held.remove(slot)
        self._generations[slot] += 1
        self._free.append(slot)

    def generation(self, slot: SlotId) -> int:
        """Counts the frees of a slot from 1: a holder of an older number holds it no more."""
        return self._generations[slot]

    def check(self) -> None:
        """Every slot is free once or held once, and the null slot is neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is twice on the free list"
        assert not free & self._held, f"slots both free and held: {sorted(free & self._held)}"
        assert free | self._held == set(range(1, self.num_slots)), "slots lost, or the null slot given out"
