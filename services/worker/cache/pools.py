"""One rank's cache memory: arenas in anonymous shared memory, so that its transfer agent can read and write them too.

What lies where is the placement record's to say (contracts.placement). memfds have no name in the file system: nothing to
unlink, and the memory is gone with the last process that maps it, however that ends.
"""

import mmap
import os
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, fcntl

import torch

from services.contracts.placement import Arena, FieldPlace, Placement
from services.worker.model.batch import LayerCaches

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Pools:
    """A rank's arenas, and views for the model, unit first. Zero at the start, the null units too."""

    placement: Placement
    fds: tuple[int, ...]  # one for each arena of the record, in its order
    caches: LayerCaches

    def close(self) -> None:
        """Close the descriptors; the memory stays as long as a view of it."""
        for fd in self.fds:
            os.close(fd)


def allocate(placement: Placement) -> Pools:
    """The pools that the record describes. Memory is taken page by page as it is first written."""
    fds = tuple(_shared_memory(arena) for arena in placement.arenas)
    views: dict[str, dict[int, torch.Tensor]] = {"mla": {}, "kda_rec": {}, "kda_conv": {}, "draft": {}}
    for arena, fd in zip(placement.arenas, fds, strict=True):
        memory = torch.frombuffer(mmap.mmap(fd, arena.length), dtype=torch.uint8)
        for field in placement.fields:
            if field.arena_id == arena.arena_id:
                views[arena.name][field.layer] = _view(memory, field, placement.units(field))
    caches = LayerCaches(**views)
    return Pools(placement, fds, caches)


def _shared_memory(arena: Arena) -> int:
    """A zeroed memfd whose size is final, so that no process that maps it can pull the memory from under another."""
    fd = os.memfd_create(f"k3mesh-{arena.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, arena.length)
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    return fd


def _view(memory: torch.Tensor, field: FieldPlace, units: int) -> torch.Tensor:
    """[units, *shape] of the field's dtype, over the arena's bytes."""
    rows = memory[field.offset : field.offset + units * field.unit_stride].view(units, field.unit_stride)
    return rows[:, : field.payload].view(DTYPES[field.dtype]).unflatten(1, field.shape)
