"""What prefill steps and decode rounds know of a drafter, whichever it is."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.model.batch import ForwardBatch, Hop
from services.worker.speculative.capture import Capture
from services.worker.speculative.context_producer import ContextSum, DSparkContextProducer, TapRows
from services.worker.speculative.dspark import K3DSparkModel


@dataclass(frozen=True, slots=True)
class Steps:
    """How many proposals this replica drafts, and how many the replica does that drafts most: with those a drafter takes part
    whose experts are spread over replicas."""

    proposals: int
    most: int


class Drafter(Protocol):
    """One rank's part of a drafter. `begin` on every stage that holds a part, `draft` on the last.

    Of a batch after which nobody drafts, the cache rows can be written later: `watch` in the place of `begin`, `inputs` in
    the place of `draft`, and `write` in the end (Backlog). Only where one stage is all of the pipeline.
    """

    collective: bool  # whether all replicas of the engine draft together

    def context_rows(self, rows: int) -> Tensor | None:
        """What comes to a later stage beside the target's state of a batch of `rows` rows, not yet filled; None for nothing."""
        ...

    def begin(self, rows: int, hop: Hop | None) -> Capture:
        """Before the target's stage runs a batch of `rows` rows that came with `hop`."""
        ...

    def draft(
        self, batch: ForwardBatch, hidden: Tensor, capture: Capture, following: Tensor, heads: Tensor, steps: Steps
    ) -> Tensor:
        """After it: writes the drafter's cache rows of the batch, and proposes tokens. Collective over TP, NextN over EP too.

        hidden [T, h] is the last stage's output; following [T] int64 the token after each row, as the target chose it or as
        the prompt has it; heads [E] int64 are the last rows that count of E sequences, each of them followed by its anchor.
        -> [E, steps.proposals] int64, equal on all TP ranks. Rows are written also where nothing is proposed: the cost of
        being ready to propose again.
        """
        ...

    def watch(self) -> Capture:
        """Before the target's stage runs a batch whose rows are written later."""
        ...

    def inputs(self, capture: Capture, hidden: Tensor, following: Tensor) -> tuple[Tensor, ...]:
        """After it: what its rows are made of, [T, ...] each. The capture is that of `watch`, the rest as for `draft`."""
        ...

    def write(self, inputs: tuple[Tensor, ...], positions: Tensor, write_slots: Tensor) -> None:
        """The cache rows of any number of batches, as `draft` would have written them. Collective over TP."""
        ...


class DSparkDrafter:
    """Writes context rows for each batch and proposes a block after each anchor."""

    collective = False

    def __init__(self, model: K3DSparkModel, producer: DSparkContextProducer):
        self.model, self._producer = model, producer

    def context_rows(self, rows: int) -> Tensor:
        return self._producer.empty(rows)

    def begin(self, rows: int, hop: Hop | None) -> ContextSum:
        return self._producer.begin(rows, hop)

    def draft(
        self, batch: ForwardBatch, hidden: Tensor, capture: Capture, following: Tensor, heads: Tensor, steps: Steps
    ) -> Tensor:
        assert isinstance(capture, ContextSum)
        # Before the block, whose rows take the place of rejected ones.
        self._producer.write(capture, batch.positions, batch.write_slots)
        if not steps.proposals or not len(heads):
            return heads.new_zeros(len(heads), steps.proposals)
        tables = batch.block_tables[sequence_of(batch, heads)]
        return self.model.propose(following[heads], batch.positions[heads] + 1, tables, steps.proposals)

    def watch(self) -> TapRows:
        return TapRows()

    def inputs(self, capture: Capture, hidden: Tensor, following: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(capture, TapRows)
        return tuple(rows for _, rows in sorted(capture.rows.items()))

    def write(self, inputs: tuple[Tensor, ...], positions: Tensor, write_slots: Tensor) -> None:
        context = self._producer.begin(len(positions), None)
        for index, rows in enumerate(inputs):
            context.take(index, rows)
        self._producer.write(context, positions, write_slots)


def sequence_of(batch: ForwardBatch, rows: Tensor) -> Tensor:
    """[E] rows of a batch -> the sequences [E] that they belong to."""
    return (batch.cu_seqlens[1:].unsqueeze(0) <= rows.unsqueeze(1)).sum(1)
