"""The embedding, whose vocabulary rows are sharded over TP."""

import torch
from torch import Tensor

from services.worker.model.batch import TensorParallel


class Embedding:
    """Each rank knows a range of the vocabulary, equally many rows each."""

    def __init__(self, weight: Tensor, tp: TensorParallel):
        """weight [vocab / TP, h]"""
        self._weight, self._tp = weight, tp

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] int64 -> [T, h]. The others' rows are zero on each rank, so the sum is exact. Collective over TP."""
        rows = self._weight.shape[0]
        local = tokens - self._tp.rank * rows
        mine = (local >= 0) & (local < rows)
        return self._tp.all_reduce(torch.where(mine.unsqueeze(-1), self._weight[torch.where(mine, local, 0)], 0.0))


def gather_vocabulary(shard: Tensor, tp: TensorParallel) -> Tensor:
    """[R, vocab / TP] on each rank -> [R, vocab]. Collective over TP."""
    return tp.all_gather(shard).unflatten(0, (tp.size, -1)).transpose(0, 1).flatten(1)
