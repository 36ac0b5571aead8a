"""What prefill steps and decode rounds know of a drafter, whichever it is."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.ops import BLOCK_ROWS
from services.worker.model.batch import ForwardBatch, Hop
from services.worker.speculative.capture import Capture
from services.worker.speculative.context_producer import ContextSum, DSparkContextProducer
from services.worker.speculative.dspark import K3DSparkModel


@dataclass(frozen=True, slots=True)
class Steps:
    """How many proposals this replica drafts, and how many the replica does that drafts most: with those a drafter takes part
    whose experts are spread over replicas."""

    proposals: int
    most: int


class Drafter(Protocol):
    """One rank's part of a drafter. `begin` on every stage that holds a part, `draft` on the last."""

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


class DSparkDrafter:
    """Writes context rows for each batch and proposes a block after each anchor."""

    def __init__(self, model: K3DSparkModel, producer: DSparkContextProducer):
        self._model, self._producer = model, producer

    def begin(self, rows: int, hop: Hop | None) -> ContextSum:
        return self._producer.begin(rows, hop)

    def draft(
        self, batch: ForwardBatch, hidden: Tensor, capture: Capture, following: Tensor, heads: Tensor, steps: Steps
    ) -> Tensor:
        assert isinstance(capture, ContextSum)
        self._producer.write(capture, batch)  # before the block, whose rows take the place of rejected ones
        if not steps.proposals or not bool((batch.write_slots[heads] >= BLOCK_ROWS).any()):
            return heads.new_zeros(len(heads), steps.proposals)  # nobody else waits for this replica's block
        tables = batch.block_tables[sequence_of(batch, heads)]
        return self._model.propose(following[heads], batch.positions[heads] + 1, tables, steps.proposals)


def sequence_of(batch: ForwardBatch, rows: Tensor) -> Tensor:
    """[E] rows of a batch -> the sequences [E] that they belong to."""
    return (batch.cu_seqlens[1:].unsqueeze(0) <= rows.unsqueeze(1)).sum(1)
