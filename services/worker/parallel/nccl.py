"""One group of ranks over NCCL, whose rows stay on their GPUs; and the attention-TP group's collectives by it.

A wait puts the compute stream behind the transfer and returns: the host goes on. So the deadline is NCCL's own: its watchdog
ends the process of a rank whose collective is late, and with it the epoch (decision 6). What the host itself does wrong, and
what NCCL tells at once, is EngineLost as with gloo.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import Store, Work  # pyright: ignore[reportPrivateImportUsage]

from services.worker.parallel.group import Group


class NcclGroup(Group):
    """services.worker.parallel.group.Group between GPUs, one for each rank. What lies on the host goes by way of the GPU."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        store: Store | None,
        hostname: str,
        timeout_s: float,
        device: torch.device,
    ):
        self.home = device
        super().__init__(name, ranks, rank, store, hostname, timeout_s)

    def _open(self, store: Store | None, hostname: str) -> Any:
        from torch.distributed import ProcessGroupNCCL  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

        backend: Any = ProcessGroupNCCL  # a build for CPUs has none
        options = backend.Options()
        options._timeout = self.timeout
        return backend(store, self.rank, self.size, options)

    def finish(self, work: Work) -> None:
        work.wait()

    def gather(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """rows [n, ...] of each rank -> out [size * n, ...], both contiguous, in the order of the compute stream."""
        self.run("all_gather", lambda: self._backend._allgather_base(out, rows).wait())

    def reduce(self, rows: torch.Tensor) -> None:
        """In place, contiguous: the sum over the ranks, the same bits on each."""
        self.run("all_reduce", lambda: self._backend.allreduce([rows]).wait())


class NcclTensorParallel:
    """services.worker.model.batch.TensorParallel over one NcclGroup. Sums are NCCL's own: equal on every rank, but how a row is
    rounded may depend on where in the batch it stands."""

    def __init__(self, group: NcclGroup):
        self.group = group
        self.rank = group.rank
        self.size = group.size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self.group.gather(out, x.contiguous())
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            x = x.contiguous()
            self.group.reduce(x)
        return x
