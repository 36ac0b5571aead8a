"""The blocks of one cache pool: who holds which, and in which generation (spec cache-and-handoff §2, §14)."""

from collections.abc import Sequence

from services.contracts.ids import NULL_BLOCK, BlockId


class BlockAllocator:
    """Hands out blocks 1..num_blocks-1 of a pool of `num_blocks`; block 0 is the null block and stays out.

    The block freed last is given first, so that a reuse that comes too early shows up at once in tests.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks = {num_blocks}: a pool needs the null block and at least one more")
        self.num_blocks = num_blocks
        self._free = [BlockId(n) for n in range(num_blocks - 1, NULL_BLOCK, -1)]  # a stack
        self._held: set[BlockId] = set()
        self._generations = [1] * num_blocks

    @property
    def used(self) -> int:
        return len(self._held)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that can be held at all."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[BlockId] | None:
        """`count` blocks, or None and no change if there are not enough."""
        if count < 0:
            raise ValueError(f"allocate({count}): the count cannot be negative")
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._held.update(blocks)
        return blocks

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Take blocks back and start their next generation. Raises, with nothing freed, if one of them is not held."""
        if len(set(blocks)) != len(blocks) or not self._held.issuperset(blocks):
            raise ValueError(f"free({list(blocks)}): not held, or named twice: {self._strangers(blocks)}")
        for block in reversed(blocks):
            self._held.remove(block)
            self._generations[block] += 1
            self._free.append(block)

    def generation(self, block: BlockId) -> int:
        """Counts the frees of a block from 1: a holder of an older number holds it no more."""
        return self._generations[block]

    def check(self) -> None:
        """Every block is free once or held once, and the null block is neither."""
        free = set(self._free)
        assert len(free) == len(self._free), f"blocks twice on the free list: {self._strangers(self._free)}"
        assert not free & self._held, f"blocks both free and held: {sorted(free & self._held)}"
        assert free | self._held == set(range(1, self.num_blocks)), "blocks lost, or the null block given out"

    def _strangers(self, blocks: Sequence[BlockId]) -> list[BlockId]:
        return sorted({block for block in blocks if block not in self._held or blocks.count(block) > 1})
