"""What an agent takes for the memory that its worker exports: a CPU's is mapped, a GPU's opened by its handles."""

import mmap
from collections.abc import Sequence

from k3mesh.errors import ConfigError
from services.contracts.placement import Placement
from services.kvtransfer.frames import CacheMemory, HostMemory
from services.kvtransfer.session import Limits
from services.kvtransfer.transport import CUDA, HOST, Profile
from services.runtime.worker_line import CudaArena

Arenas = Sequence[mmap.mmap] | Sequence[CudaArena]


def profile_of(arenas: Arenas) -> Profile:
    """How frames of this memory travel."""
    return CUDA if arenas and isinstance(arenas[0], CudaArena) else HOST


def open_memory(placement: Placement, arenas: Arenas, limits: Limits) -> CacheMemory:
    """The pools and the staging memory beside them. ConfigError if this process cannot reach the memory, or lacks some."""
    on_gpu = [it for it in arenas if isinstance(it, CudaArena)]
    if not on_gpu:
        return HostMemory(placement, arenas, limits.staging_bytes)
    try:
        from services.kvtransfer.cuda_memory import CudaMemory
    except ImportError as error:
        raise ConfigError(
            f"the pools of {placement.name} are on a GPU, and {error.name} is not installed here; install cuda-bindings, or "
            "keep the pools on the CPU"
        ) from None
    return CudaMemory.open(placement, on_gpu, limits)
