"""What a mover takes for the memory that its worker exports: a CPU's is mapped, a GPU's opened by its handles."""

import mmap
import os
from collections.abc import Sequence

from k3mesh.errors import ConfigError
from services.contracts.placement import Placement
from services.kvtransfer.frames import CacheMemory, HostMemory
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import CUDA, HOST, Profile
from services.runtime.worker_line import CudaArena


def profile_of(cuda: Sequence[CudaArena]) -> Profile:
    """How frames travel of memory that is on a GPU, in these arenas, or else in the host's."""
    return CUDA if cuda else HOST


def open_export(placement: Placement, cuda: Sequence[CudaArena], descriptors: Sequence[int], limits: Limits) -> CacheMemory:
    """The pools and the staging memory beside them. ConfigError if this process cannot reach the memory, or lacks some, or if
    it is not what the record says."""
    if not cuda:
        return HostMemory(placement, _map(placement, descriptors), limits.staging_bytes)
    try:
        from services.kvtransfer.cuda_memory import CudaMemory
    except ImportError as error:
        raise ConfigError(
            f"the pools of {placement.name} are on a GPU, and {error.name} is not installed here; install cuda-bindings, or "
            "keep the pools on the CPU"
        ) from None
    return CudaMemory.open(placement, cuda, limits)


def _map(placement: Placement, descriptors: Sequence[int]) -> list[mmap.mmap]:
    """A prefill rank's pools are only read here, a decode rank's written."""
    if len(descriptors) != len(placement.arenas):
        raise ConfigError(f"{placement.name} hands over {len(descriptors)} arenas, its record has {len(placement.arenas)}")
    access = mmap.ACCESS_READ if placement.role == "prefill" else mmap.ACCESS_WRITE
    arenas: list[mmap.mmap] = []
    for arena, descriptor in zip(placement.arenas, descriptors, strict=True):
        size = os.fstat(descriptor).st_size
        if size < arena.length or not arena.length:
            raise ConfigError(f"{placement.name}: arena {arena.name} has {size} bytes, its record says {arena.length}")
        arenas.append(mmap.mmap(descriptor, arena.length, access=access))
    return arenas
