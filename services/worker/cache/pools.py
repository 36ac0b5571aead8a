"""One rank's cache memory: arenas that its transfer agent can read and write too.

What lies where is the placement record's to say (contracts.placement). On a CPU an arena is a memfd, which has no name in the
file system: nothing to unlink, and the memory is gone with the last process that maps it, however that ends. On a GPU it is
an allocation of its own, since a CUDA IPC handle names a whole one; it is gone with this process, which the agent does not
outlive.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, fcntl

import torch

from services.contracts.placement import Arena, FieldPlace, Placement
from services.runtime.worker_line import CudaArena
from services.worker.model.batch import LayerCaches

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Pools:
    """A rank's arenas, and views for the model, unit first. Zero at the start, the null units too."""

    placement: Placement
    fds: tuple[int, ...]  # on a CPU, one for each arena of the record, in its order
    cuda: tuple[CudaArena, ...]  # on a GPU, likewise
    caches: LayerCaches

    def close(self) -> None:
        """Close the descriptors; the memory stays as long as a view of it."""
        for fd in self.fds:
            os.close(fd)


def allocate(placement: Placement, device: torch.device | str = "cpu") -> Pools:
    """The pools that the record describes. A CPU's memory is taken page by page as it is first written. ConfigError if a GPU
    is not there or has too little memory."""
    device = torch.device(device)
    if device.type == "cuda":
        from services.runtime.cuda import Device  # where CUDA is

        gpu = Device(device.index or 0)
        allocations = [gpu.allocate(arena.length) for arena in placement.arenas]
        cuda = tuple(CudaArena(allocation.handle(), gpu.uuid) for allocation in allocations)
        memories = [torch.as_tensor(allocation, device=device) for allocation in allocations]  # which keep them
        return Pools(placement, (), cuda, _views(placement, memories))
    fds = tuple(_shared_memory(arena) for arena in placement.arenas)
    maps = [mmap.mmap(fd, arena.length) for arena, fd in zip(placement.arenas, fds, strict=True)]
    return Pools(placement, fds, (), _views(placement, [torch.frombuffer(it, dtype=torch.uint8) for it in maps]))


def _views(placement: Placement, memories: Sequence[torch.Tensor]) -> LayerCaches:
    """`memories`: each arena's bytes, in the record's order."""
    views: dict[str, dict[int, torch.Tensor]] = {"mla": {}, "kda_rec": {}, "kda_conv": {}, "draft": {}}
    for arena, memory in zip(placement.arenas, memories, strict=True):
        for field in placement.fields:
            if field.arena_id == arena.arena_id:
                views[arena.name][field.layer] = _view(memory, field, placement.units(field))
    return LayerCaches(**views)


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
