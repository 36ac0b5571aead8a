"""Host memory for images of suspended requests: whole cache blocks and KDA states, as bytes (spec scheduling §3.5).

One pool serves both, in blocks of a cache block's size: a request's image is a block for each of its data blocks, then as many
as its KDA state fills. Which they are is the scheduler's to say. Nothing of a request is kept besides: its row, position,
window and sampling, comes back with the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3mesh.errors import Internal
from services.worker.model.batch import LayerCaches, TensorParallel


@dataclass(frozen=True, slots=True)
class _Field:
    """One cache field, unit first, and where its bytes lie in a block or state."""

    pool: Tensor
    begin: int
    end: int


class ImagePool:
    """One rank's images. Device thread only; copies are in the order of the rounds around them."""

    def __init__(self, caches: LayerCaches, blocks: int, tp: TensorParallel):
        paged = [pool for pools in (caches.mla, caches.draft) for _, pool in sorted(pools.items())]
        slots = [pool for pools in (caches.kda_rec, caches.kda_conv) for _, pool in sorted(pools.items())]
        self._paged, self.block_bytes = _fields(paged)
        self._slots, state_bytes = _fields(slots)
        self.state_blocks = -(-state_bytes // max(1, self.block_bytes))
        self._tp = tp
        self._device = next((pool.device for pool in paged), torch.device("cpu"))
        pinned = self._device.type == "cuda"
        self._memory = torch.empty((blocks, self.block_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._state = torch.empty((self.state_blocks, self.block_bytes), dtype=torch.uint8, pin_memory=pinned)

    def __len__(self) -> int:
        """Blocks."""
        return len(self._memory)

    def save(self, blocks: Tensor, slot: int, image: Sequence[int]) -> None:
        """Cache blocks [n] and a slot -> `image`, n + state_blocks blocks of the pool."""
        data, state = self._split(image, len(blocks))
        for field in self._paged:
            self._memory[data, field.begin : field.end] = _bytes(field.pool[blocks]).to(self._memory.device)
        flat = self._state.view(-1)
        for field in self._slots:
            flat[field.begin : field.end] = _bytes(field.pool[slot : slot + 1])[0].to(flat.device)
        self._memory[state] = self._state

    def load(self, image: Sequence[int], blocks: Tensor, slot: int, found: int) -> None:
        """The way back; the first `found` of the cache blocks are left as they are."""
        data, state = self._split(image, len(blocks))
        blocks, data = blocks[found:], data[found:]
        for field in self._paged:
            field.pool[blocks] = _like(self._memory[data, field.begin : field.end], field.pool)
        self._state.copy_(self._memory[state])
        flat = self._state.view(-1)
        for field in self._slots:
            field.pool[slot : slot + 1] = _like(flat[field.begin : field.end].unsqueeze(0), field.pool)

    def acknowledge(self, round_id: int, copies: int) -> None:
        """Every rank of the replica has done the round's copies, as many as this one. Collective over TP."""
        told = self._tp.all_gather(torch.tensor([[round_id, copies]], device=self._device))
        if not bool((told == told[:1]).all()):
            raise Internal(f"the ranks of a replica copied different images: {told.tolist()} (round, images) by rank")

    def _split(self, image: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        whole = torch.tensor(image, dtype=torch.long)
        inside = bool(((whole >= 0) & (whole < len(self))).all())
        if len(whole) != count + self.state_blocks or len(whole.unique()) != len(whole) or not inside:
            raise Internal(
                f"an image of {count} blocks and a state takes {count + self.state_blocks} different blocks below {len(self)}, "
                f"the plan names {list(image)}"
            )
        return whole[:count], whole[count:]


def _fields(pools: Sequence[Tensor]) -> tuple[list[_Field], int]:
    """One behind the other -> the fields, and the bytes of a unit of all of them."""
    fields: list[_Field] = []
    end = 0
    for pool in pools:
        begin, end = end, end + pool[0].numel() * pool.element_size()
        fields.append(_Field(pool, begin, end))
    return fields, end


def _bytes(units: Tensor) -> Tensor:
    """[n, ...] -> [n, bytes of a unit]."""
    return units.flatten(1).contiguous().view(torch.uint8)


def _like(rows: Tensor, pool: Tensor) -> Tensor:
    """[n, bytes] -> n units of the pool's shape and dtype, on its device."""
    return rows.contiguous().to(pool.device).view(pool.dtype).view(-1, *pool.shape[1:])
