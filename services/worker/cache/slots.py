"""KDA states of one stage, as wholes: what a checkpoint of the prefix cache is."""

from collections.abc import Sequence

from torch import Tensor

from services.worker.model.batch import LayerCaches


class SlotStates:
    """Copies in the order of the steps around them. A copy, never a shared slot: a request's state changes in place."""

    def __init__(self, caches: LayerCaches):
        self._pools = [*caches.kda_rec.values(), *caches.kda_conv.values()]  # unit first

    def copy(self, source: int, target: int) -> None:
        """The recurrent state and convolution history of every layer."""
        for pool in self._pools:
            pool[target] = pool[source]

    def read(self, slots: Tensor) -> list[Tensor]:
        """Of each field, those of slots [n] int64, [n, ...]."""
        return [pool[slots] for pool in self._pools]

    def write(self, slots: Tensor, states: Sequence[Tensor]) -> None:
        """The way back."""
        for pool, state in zip(self._pools, states, strict=True):
            pool[slots] = state
