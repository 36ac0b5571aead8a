"""The steps that are on their way through the stages (spec scheduling §2.2, §2.3)."""

from dataclasses import dataclass, field

from services.contracts.ids import Room, Token
from services.scheduler.prefill.events import ChunkRow, StepDone


@dataclass(slots=True)
class Step:
    """A launched batch. A stage that has run it leaves its (started, ended)."""

    step_id: int
    rows: tuple[ChunkRow, ...]
    spans: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    first_tokens: dict[Room, Token] = field(default_factory=dict[Room, Token])


class Pipeline:
    """Steps between their launch and the last stage's answer. Every stage runs them in step order."""

    def __init__(self, stages: int):
        self.stages = stages
        self.steps: dict[int, Step] = {}
        self.progressed_at = 0.0  # of the last launch into an empty pipeline, or of the last answer
        self._launched = 0
        self._answered = [0] * stages  # the last step of each stage

    @property
    def full(self) -> bool:
        """One step for each stage, and one that waits before the first, so that no stage waits for the scheduler."""
        return len(self.steps) > self.stages

    def launch(self, rows: tuple[ChunkRow, ...], now: float) -> int:
        """-> the step's id, the last one + 1."""
        if not self.steps:
            self.progressed_at = now
        self._launched += 1
        self.steps[self._launched] = Step(self._launched, rows)
        return self._launched

    def answer(self, event: StepDone, now: float) -> Step | None:
        """Note one stage's answer -> the step, once all stages have run it."""
        if event.stage >= self.stages or event.step_id != self._answered[event.stage] + 1 or event.step_id not in self.steps:
            raise RuntimeError(
                f"{event}: stage answers must come in step order; launched up to {self._launched}, answered {self._answered}"
            )
        self._answered[event.stage] = event.step_id
        self.progressed_at = now
        step = self.steps[event.step_id]
        step.spans[event.stage] = (event.started, event.ended)
        step.first_tokens |= {first.room: first.token for first in event.first_tokens}
        return self.steps.pop(event.step_id) if len(step.spans) == self.stages else None
