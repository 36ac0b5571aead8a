"""What crosses a stage boundary, rank t to rank t (spec k3-model §2): prefix, closed blocks, then the context sum of a DSpark
drafter where there is one (spec speculation §4).

Both ends derive the sizes from the step's row count and the boundary's layer, so no header travels.
"""

import torch

from services.contracts.model import ModelConfig
from services.contracts.topology import RankPlace
from services.worker.model.batch import Hop
from services.worker.parallel.pipeline import Pipeline


class StageBoundary:
    """One rank's ends of the boundaries around its stage. Device thread only; EngineLost when a neighbour is late or gone."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: ModelConfig,
        place: RankPlace,
        dtype: torch.dtype,
        context: int = 0,
        device: torch.device | str = "cpu",
    ):
        """`context`: width of the drafter's sum, 0 without one."""
        self._pipeline, self._device = pipeline, device
        self._hidden = model.hidden_size
        self._closed = model.closed_blocks_before(place.window.start)
        self._dtype = dtype
        self._context = context

    def receive(self, rows: int) -> Hop | None:
        """The state of `rows` rows from the stage before, None on the first stage. Waits for it."""
        if self._pipeline.is_first:
            return None
        prefix = torch.empty((rows, self._hidden), dtype=self._dtype, device=self._device)
        blocks = torch.empty((self._closed, rows, self._hidden), dtype=self._dtype, device=self._device)
        if not self._context:
            self._pipeline.recv_prev(prefix, blocks)
            return Hop(prefix, blocks)
        # Of this chunk alone: it is added to in place.
        total = torch.empty((rows, self._context), dtype=torch.float32, device=self._device)
        self._pipeline.recv_prev(prefix, blocks, total)
        return Hop(prefix, blocks, total)

    def send(self, hop: Hop) -> None:
        """Start sending to the next stage; returns while it travels."""
        extra = () if hop.accumulator is None else (hop.accumulator,)
        self._pipeline.send_next(hop.prefix, hop.blocks, *extra)
