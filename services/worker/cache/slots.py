"""KDA states of one stage, as wholes: what a checkpoint of the prefix cache is."""

from services.worker.model.batch import LayerCaches


class SlotStates:
    """Copies in the order of the steps around them. A copy, never a shared slot: a request's state changes in place."""

    def __init__(self, caches: LayerCaches):
        self._pools = [*caches.kda_rec.values(), *caches.kda_conv.values()]  # unit first

    def copy(self, source: int, target: int) -> None:
        """The recurrent state and convolution history of every layer."""
        for pool in self._pools:
            pool[target] = pool[source]
