"""Attention residuals: what a stage carries from layer to layer instead of a residual stream (spec k3-model §2)."""

from collections.abc import MutableMapping

from torch import Tensor

from kernels.ops import AttnResMix
from services.worker.model.batch import Hop


def take_mix_weight(weights: MutableMapping[str, Tensor], name: str) -> Tensor:
    """[h] float32: the norm's weight and the constant query only occur as a product."""
    return weights.pop(f"{name}_norm.weight") * weights.pop(f"{name}_proj.weight")


class Residual:
    """The closed blocks and the running sum of the open one, for T rows."""

    def __init__(self, prefix: Tensor, closed: Tensor | None, capacity: int, mix: AttnResMix, eps: float):
        """prefix [T, h]; closed [n, T, h] or None; `capacity` blocks will be closed when the stage is done."""
        self.prefix = prefix
        self._blocks = prefix.new_empty(capacity, *prefix.shape)
        self._count = 0
        if closed is not None:
            self._count = closed.shape[0]
            self._blocks[: self._count] = closed
        self._mix = mix
        self._eps = eps

    @property
    def blocks(self) -> Tensor:
        """[closed so far, T, h]"""
        return self._blocks[: self._count]

    def mix(self, weight: Tensor) -> Tensor:
        """MIX(blocks + [prefix]) -> [T, h]."""
        return self._mix(self.blocks, self.prefix, weight, self._eps)

    def close(self, a: Tensor) -> None:
        """The open block is complete; the next one starts from `a` alone."""
        self._blocks[self._count] = self.prefix
        self._count += 1
        self.prefix = a

    def add(self, x: Tensor) -> None:
        self.prefix = self.prefix + x

    def hop(self) -> Hop:
        """What the next stage needs."""
        return Hop(prefix=self.prefix, blocks=self.blocks)
