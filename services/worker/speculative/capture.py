"""How a drafter says what it reads of the target: once, after loading, on every stage, and nowhere else."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from services.contracts.draft import Tap
from services.worker.model.batch import Hop


class CaptureTarget(Protocol):
    """What of a target's stage a drafter is bound to; model.decoder.DecoderStage is one."""

    def select_taps(self, taps: Iterable[Tap]) -> None:
        """Capture these from now on; all of them lie in the stage's window."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> [T, h], on the first stage."""
        ...

    def local_logits(self, hidden: Tensor) -> Tensor:
        """[R, h] -> [R, vocab / TP] float32, on the last stage."""
        ...


class TargetCaptureConfigurator(Protocol):
    """A drafter's model as a stage's set-up sees it."""

    def configure_target(self, target: CaptureTarget) -> None:
        """Select this drafter's taps on one stage of the target, and borrow what the two share there."""
        ...


class Capture(Protocol):
    """The taps of one batch, taken while the target's stage runs it."""

    def take(self, index: int, rows: Tensor) -> None:
        """Tap `index`, [T, h]. Its storage may change after the call."""
        ...

    def onto(self, hop: Hop) -> Hop:
        """The hop to the next stage with what the drafter sends along."""
        ...
