"""What a replica's host memory holds of suspended requests (spec scheduling §3.5): which blocks of it are whose."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.contracts.ids import BlockKey, ImageBlock, Replica


@dataclass(frozen=True, slots=True)
class Image:
    """Where the state of a suspended request is in host memory, the same on every rank of its replica."""

    replica: Replica
    blocks: tuple[ImageBlock, ...]  # one for each data block, in order, then those of the KDA state
    keys: tuple[BlockKey, ...]  # of its first data blocks, those that the prefix cache named


class ImagePool:
    """One replica's host memory for images, in blocks of the size of a cache block; a KDA state takes `state_blocks` of them.
    At most `limit` requests are suspended. Without blocks nobody is."""

    def __init__(self, replica: Replica, blocks: int, state_blocks: int, limit: int):
        self.replica, self.capacity = replica, blocks
        self._state_blocks, self._limit = state_blocks, limit
        self._free = [ImageBlock(n) for n in range(blocks - 1, -1, -1)]  # a stack: what was freed last is given first
        self._images: set[Image] = set()

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def shortfall(self, data_blocks: int) -> str:
        """Why there is no room for an image of so many data blocks; empty if there is."""
        need = data_blocks + self._state_blocks
        if len(self._images) >= self._limit:
            return f"{self._limit} requests are suspended, as many as may be (give a higher --max-num-seqs)"
        if need > len(self._free):
            return (
                f"an image takes {need} blocks of host memory, {len(self._free)} of {self.capacity} are free (give a higher "
                "--retraction-snapshot-ratio)"
            )
        return ""

    def take(self, data_blocks: int, keys: Sequence[BlockKey]) -> Image:
        """There must be room."""
        assert not self.shortfall(data_blocks)
        blocks = tuple(self._free.pop() for _ in range(data_blocks + self._state_blocks))
        image = Image(self.replica, blocks, tuple(keys))
        self._images.add(image)
        return image

    def free(self, image: Image) -> None:
        """Its blocks may be the next image's at once: workers copy in the order of plans."""
        if image not in self._images:
            raise ValueError(f"replica {self.replica}: {image} is not held")
        self._images.remove(image)
        self._free += reversed(image.blocks)

    def check(self, images: Collection[Image]) -> None:
        """`images` are all there are on this replica: no block is held twice or lost."""
        taken = [block for image in images for block in image.blocks]
        assert len(images) == len(self._images) and self._images == set(images), f"replica {self.replica}: images lost"
        assert sorted(taken + self._free) == list(range(self.capacity)), f"replica {self.replica}: image blocks shared or lost"
        assert len(images) <= self._limit, f"replica {self.replica}: more than {self._limit} requests suspended"
