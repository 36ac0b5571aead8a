import pytest

from services.contracts.ids import NULL_SLOT, SlotId
from services.scheduler.slots import SlotAllocator


def test_every_slot_but_the_null_slot_is_given_out_once():
    pool = SlotAllocator(4)
    assert sorted(slot for slot in (pool.allocate() for _ in range(3)) if slot is not None) == [1, 2, 3]
    assert pool.allocate() is None
    assert (pool.used, pool.free_count) == (3, 0)
    pool.check()


def test_a_free_starts_the_slots_next_generation_and_gives_it_back():
    pool = SlotAllocator(2)
    slot = pool.allocate()
    assert slot == 1
    generation = pool.generation(slot)
    pool.free(slot)
    assert pool.generation(slot) == generation + 1
    assert pool.allocate() == slot
    pool.check()


@pytest.mark.parametrize("slot", [NULL_SLOT, SlotId(1), SlotId(7)])
def test_freeing_a_slot_that_is_not_held_raises(slot: SlotId):
    pool = SlotAllocator(4)
    with pytest.raises(ValueError, match="not held"):
        pool.free(slot)


def test_a_double_free_raises():
    pool = SlotAllocator(3)
    slot = pool.allocate()
    assert slot is not None
    pool.free(slot)
    with pytest.raises(ValueError, match="not held"):
        pool.free(slot)


def test_a_pool_without_a_usable_slot_is_refused():
    with pytest.raises(ValueError, match="num_slots = 1"):
        SlotAllocator(1)
