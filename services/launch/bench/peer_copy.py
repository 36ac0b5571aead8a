"""The ceiling of a transfer between two GPUs: the driver's own copy from one to the other, and nothing else."""

import os
import time

import torch

from k3mesh.errors import ConfigError
from services.launch.bench.samples import Sample


def two_gpus() -> tuple[torch.device, torch.device]:
    """ConfigError if there are not two here that reach each other."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        raise ConfigError(f"--device cuda: two GPUs are needed, {count} are visible; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    if not torch.cuda.can_device_access_peer(0, 1):
        raise ConfigError("--device cuda: GPUs 0 and 1 do not reach each other; choose two that do by CUDA_VISIBLE_DEVICES")
    return torch.device("cuda", 0), torch.device("cuda", 1)


class PeerCopy:
    """A buffer on each of two GPUs. `transfer` copies by cudaMemcpyPeerAsync, which is what torch does across devices."""

    def __init__(self, size: int):
        self._source, self._target = (torch.ones(size, dtype=torch.uint8, device=device) for device in two_gpus())

    async def transfer(self, size: int, times: int) -> Sample:
        """`size` bytes, `times` times, one after the other without a wait between them."""
        cpu, began = sum(os.times()[:2]), time.perf_counter()
        for _ in range(times):
            self._target[:size].copy_(self._source[:size])
        for it in (self._source, self._target):
            torch.cuda.synchronize(it.device)
        return Sample(time.perf_counter() - began, size * times, sum(os.times()[:2]) - cpu)
