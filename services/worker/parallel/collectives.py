"""The attention-TP group's collectives over gloo, exact and equal on every rank."""

import torch

from services.worker.parallel.group import Group


class GlooTensorParallel:
    """services.worker.model.batch.TensorParallel over one Group; with size 1 everything is the identity."""

    def __init__(self, group: Group):
        self.group = group
        self.rank = group.rank
        self.size = group.size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, ...] of one shape on every rank -> [size * n, ...] in rank order. EngineLost."""
        if self.size == 1:
            return x
        rows = x.shape[0]
        copies = x.unsqueeze(0).expand(self.size, *x.shape).flatten(0, 1).contiguous()
        out = torch.empty_like(copies)
        splits = [rows] * self.size
        self.group.exchange(out, copies, splits, splits, "all_gather").wait()
        return out

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group, same shape and dtype. EngineLost.

        Every rank gathers all parts and adds them in rank order in float32 (float64 stays), rounding once. So all ranks
        hold the same bits, and a row's sum does not depend on where in the batch it stands: chunking stays exact.
        """
        if self.size == 1:
            return x
        parts = self.all_gather(x.unsqueeze(0))
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)
