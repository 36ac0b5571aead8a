import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.ids import NULL_BLOCK, BlockId
from services.scheduler.blocks import BlockAllocator


def test_the_null_block_is_never_given_out():
    pool = BlockAllocator(5)
    blocks = pool.allocate(4)
    assert blocks is not None and sorted(blocks) == [1, 2, 3, 4]
    assert NULL_BLOCK not in blocks and pool.free_count == 0


def test_allocation_is_all_or_nothing():
    pool = BlockAllocator(4)
    assert pool.allocate(4) is None
    assert (pool.used, pool.free_count) == (0, 3)
    assert pool.allocate(0) == []


def test_a_free_starts_the_next_generation_of_that_block_alone():
    pool = BlockAllocator(4)
    first, second = pool.allocate(2) or []
    before = pool.generation(first), pool.generation(second)
    pool.free([first])
    assert (pool.generation(first), pool.generation(second)) == (before[0] + 1, before[1])


@pytest.mark.parametrize("blocks", [[0], [2], [1, 1], [1, 9]])
def test_freeing_what_is_not_held_raises_and_frees_nothing(blocks: list[int]):
    pool = BlockAllocator(4)
    assert pool.allocate(1) == [1]
    with pytest.raises(ValueError, match="not held"):
        pool.free([BlockId(n) for n in blocks])
    assert pool.used == 1
    pool.check()


def test_a_pool_without_a_usable_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks = 1"):
        BlockAllocator(1)


@given(st.lists(st.one_of(st.integers(0, 6), st.just("free"))))
def test_no_block_is_ever_lost_or_held_twice(steps: list[int | str]):
    pool = BlockAllocator(12)
    held: list[list[BlockId]] = []
    for step in steps:
        if step == "free":
            if held:
                pool.free(held.pop(0))
        else:
            blocks = pool.allocate(int(step))
            assert (blocks is None) == (int(step) > pool.capacity - sum(map(len, held)))
            if blocks is not None:
                held.append(blocks)
        pool.check()
        assert pool.used == sum(map(len, held)) == len({block for blocks in held for block in blocks})
