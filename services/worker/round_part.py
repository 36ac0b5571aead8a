"""The device's part of a decode round, in two halves with the choice of tokens between them.

`evaluate` runs the windows through the target; `settle` takes the chosen tokens, counts what was right, moves the KDA states on
and drafts. Both read nothing but memory at fixed addresses and a shape, so that each shape can be captured once and replayed
(round_graphs); who lives and where is in that memory, which the host fills before each round.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.contracts.geometry import verify_widths
from services.worker.model.batch import ForwardBatch, Mode, cache_slots
from services.worker.model.decoder import DecoderStage
from services.worker.round_rows import RoundRows
from services.worker.speculative.capture import Capture
from services.worker.speculative.drafter import Drafter, Steps
from services.worker.speculative.verify import accepted


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What is the same whoever is in the round."""

    bucket: int  # places, padding included
    width: int  # rows of each
    steps: Steps
    puts_off: bool = False  # the drafter's rows are written later
    mode: Mode = "decode"


@dataclass(frozen=True, slots=True)
class Settled:
    """What `settle` leaves."""

    results: Tensor  # [bucket, w + 1 + window] int64: the target's tokens, how many rows count, the next window
    inputs: tuple[Tensor, ...]  # of rows that the drafter writes later, [bucket, ...] each; none otherwise


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What `evaluate` leaves."""

    batch: ForwardBatch
    hidden: Tensor  # [bucket * w, h]
    logits: Tensor  # [bucket * w, vocab] float32
    capture: Capture | None


class Rounds(Protocol):
    """Either way to run a round."""

    def evaluate(self, shape: RoundShape) -> Tensor:
        """-> logits [bucket * w, vocab] float32, until the next round. Collective over TP and EP."""
        ...

    def settle(self, shape: RoundShape, chosen: Tensor) -> Settled:
        """chosen [bucket, w] int64, of the last `evaluate` of this shape. Valid until the next round. Collective."""
        ...


class CapturedRounds(Rounds, Protocol):
    """Some shapes by replay."""

    def covers(self, shape: RoundShape) -> bool: ...

    def totals(self) -> dict[str, int]: ...


class RoundPart:
    """Both halves as functions, over the rows that the host fills."""

    def __init__(self, stage: DecoderStage, drafter: Drafter | None, rows: RoundRows, verify_width: int, device: torch.device):
        self._stage, self._drafter, self._rows = stage, drafter, rows.there
        places = len(self._rows.slots)
        self._offsets = torch.arange(verify_width, device=device)
        self._lengths = torch.arange(places + 1, dtype=torch.int32, device=device)
        self._bounds = {width: self._lengths * width for width in verify_widths(verify_width)}  # constants to a graph
        self._fresh = torch.zeros(places, dtype=torch.bool, device=device)

    def evaluate(self, shape: RoundShape) -> Evaluated:
        batch = self._batch(shape)
        capture = None
        if self._drafter is not None:
            capture = self._drafter.watch() if shape.puts_off else self._drafter.begin(len(batch.tokens), None)
        hidden = self._stage.forward(batch, None, _no_barrier, capture.take if capture is not None else None)
        assert isinstance(hidden, Tensor), "decode has one stage"
        return Evaluated(batch, hidden, self._stage.logits(hidden), capture)

    def settle(self, shape: RoundShape, it: Evaluated, chosen: Tensor) -> Settled:
        counts = accepted(self._rows.windows[: shape.bucket, : shape.width], chosen)
        windows = chosen.gather(1, counts.unsqueeze(1) - 1)  # the new anchors
        if it.batch.verify:
            self._stage.commit(it.batch, counts)
        inputs: tuple[Tensor, ...] = ()
        if self._drafter is not None and it.capture is not None:
            following = chosen.flatten()
            if shape.puts_off:
                inputs = self._drafter.inputs(it.capture, it.hidden, following)
            else:
                heads = it.batch.cu_seqlens[:-1].long() + counts - 1
                drafted = self._drafter.draft(it.batch, it.hidden, it.capture, following, heads, shape.steps)
                windows = torch.cat([windows, drafted], 1)
        return Settled(torch.cat([chosen, counts.unsqueeze(1), windows], 1), inputs)

    def slots(self, shape: RoundShape) -> Tensor:
        """[bucket] KDA slots of the round."""
        return self._rows.slots[: shape.bucket]

    def addresses(self) -> tuple[int, ...]:
        """Of the memory that the host fills."""
        return (self._rows.memory.data_ptr(),)

    def _batch(self, shape: RoundShape) -> ForwardBatch:
        """The first `bucket` places, `width` rows each."""
        bucket, width, rows = shape.bucket, shape.width, self._rows
        tables, anchors = rows.tables[:bucket], rows.positions[:bucket]
        positions = anchors.unsqueeze(1) + self._offsets[:width]
        return ForwardBatch(
            mode=shape.mode,
            tokens=rows.windows[:bucket, :width].flatten(),
            positions=positions.flatten(),
            cu_seqlens=self._bounds[width][: bucket + 1],
            context_lens=(anchors + width).int(),
            block_tables=tables,
            write_slots=cache_slots(tables, positions).flatten(),
            slots=rows.slots[:bucket],
            fresh=self._fresh[:bucket],
            verify=width > 1,
        )


class EagerRounds:
    """Every operation is launched for itself."""

    def __init__(self, part: RoundPart):
        self._part = part
        self._evaluated: Evaluated | None = None

    def evaluate(self, shape: RoundShape) -> Tensor:
        self._evaluated = self._part.evaluate(shape)
        return self._evaluated.logits

    def settle(self, shape: RoundShape, chosen: Tensor) -> Settled:
        evaluated, self._evaluated = self._evaluated, None
        assert evaluated is not None, "settle comes after evaluate"
        return self._part.settle(shape, evaluated, chosen)


def _no_barrier(step: int) -> None:
    """A decode round produces for nobody: caches leave this engine never."""
