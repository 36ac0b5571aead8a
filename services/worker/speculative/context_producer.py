"""The context of a DSpark drafter: one float32 sum over the taps of all stages, then the drafter's cache rows of every
position (spec speculation §4, §5). The same road with and without a pipeline."""

from dataclasses import replace

import torch
from torch import Tensor

from k3mesh.errors import Internal
from services.worker.model.batch import Hop
from services.worker.speculative.dspark import K3DSparkModel


class ContextSum:
    """A = sum over taps of tap_i W_i^T for the T rows of one batch in flight; a Capture."""

    def __init__(self, model: K3DSparkModel, total: Tensor):
        self._model = model
        self.total = total  # [T, d] float32, of this batch alone

    def take(self, index: int, rows: Tensor) -> None:
        if rows.shape[0] != self.total.shape[0]:
            raise Internal(f"tap {index} has {rows.shape[0]} rows, the context sum {self.total.shape[0]}", detail="CTX_ROWS")
        self.total += self._model.project(index, rows)

    def onto(self, hop: Hop) -> Hop:
        return replace(hop, accumulator=self.total)


class TapRows:
    """The taps of one batch as they are, to be summed later; a Capture of a stage that is all of the pipeline."""

    def __init__(self):
        self.rows: dict[int, Tensor] = {}  # [T, h] by tap

    def take(self, index: int, rows: Tensor) -> None:
        self.rows[index] = rows.clone()

    def onto(self, hop: Hop) -> Hop:
        raise AssertionError("there is no next stage")


class DSparkContextProducer:
    """One rank's part: begins sums where the stage before left them, and on the last stage writes the cache rows."""

    def __init__(self, model: K3DSparkModel, first: bool):
        """`first`: this stage starts the sum."""
        self._model, self._first = model, first

    def begin(self, rows: int, hop: Hop | None) -> ContextSum:
        """The sum of a batch of `rows` rows, as it enters this stage. Internal (CTX_ACC) if it is not as the stage expects."""
        incoming = None if hop is None else hop.accumulator
        wanted = (rows, self._model.width)
        if self._first:
            if incoming is not None:
                raise Internal("the first stage was sent a context sum", detail="CTX_ACC")
            return ContextSum(self._model, self.empty(rows))
        if incoming is None or incoming.dtype != torch.float32 or tuple(incoming.shape) != wanted:
            found = "none" if incoming is None else f"{incoming.dtype} {list(incoming.shape)}"
            raise Internal(
                f"the context sum from the stage before is {found}, expected float32 {list(wanted)}", detail="CTX_ACC"
            )
        return ContextSum(self._model, incoming)

    def empty(self, rows: int) -> Tensor:
        """A sum to which no tap has been added: [rows, d] float32."""
        return torch.zeros((rows, self._model.width), dtype=torch.float32, device=self._model.device)

    def write(self, context: ContextSum, positions: Tensor, write_slots: Tensor) -> None:
        """The complete sum of T rows becomes every draft layer's cache rows of positions [T] (last stage). Overwrites what a
        block of proposals left there."""
        rows = {len(context.total), len(positions), len(write_slots)}
        if len(rows) > 1:
            raise Internal(f"context rows, positions and slots differ in number: {sorted(rows)}", detail="CTX_ROWS")
        self._model.write_context(self._model.context(context.total), positions, write_slots)
