"""A replayed round against an eager one of the same inputs (--graph-debug, K3MESH_GRAPH_DEBUG=1), to check correctness."""

from typing import Any

import torch
from torch import Tensor

from k3mesh.errors import Internal
from services.worker.cache.slots import SlotStates
from services.worker.round_graphs import GraphRounds
from services.worker.round_part import EagerRounds, RoundPart, RoundShape, Settled

TOLERANCE = 2e-2  # of the reference's root mean square: bfloat16 rounds to 4e-3, and kernels may add in another order


class CheckedRounds:
    """services.worker.round_part.Rounds: replays, then runs the round again from the same KDA states. What the eager one leaves
    stays. Internal where they differ, or where memory that the graphs read has moved."""

    def __init__(self, graphs: GraphRounds, part: RoundPart, states: SlotStates):
        self._graphs, self._part, self._eager, self._states = graphs, part, EagerRounds(part), states
        self._addresses = graphs.addresses()
        self._before: Any = None
        self._logits: Tensor | None = None
        self.rounds, self.worst = 0, 0.0  # compared so far, and their largest difference

    def totals(self) -> dict[str, int]:
        return {"graph_rounds_checked": self.rounds, "graph_worst_difference_ppm": round(self.worst * 1e6)}

    def covers(self, shape: RoundShape) -> bool:
        return self._graphs.covers(shape)

    def evaluate(self, shape: RoundShape) -> Tensor:
        if self._graphs.addresses() != self._addresses:
            raise Internal(f"memory that graphs read has moved: {self._addresses} are now {self._graphs.addresses()}")
        self._before = self._states.read(self._part.slots(shape))
        logits = self._graphs.evaluate(shape)
        self._logits = logits.clone()
        return logits

    def settle(self, shape: RoundShape, chosen: Tensor) -> Settled:
        settled = self._graphs.settle(shape, chosen)
        results, slots = settled.results.clone(), self._part.slots(shape)
        after = self._states.read(slots)
        self._states.write(slots, self._before)
        live = slots > 0
        rows = live.repeat_interleave(shape.width)
        assert self._logits is not None
        self._compare(shape, "logits", self._logits[rows], self._eager.evaluate(shape)[rows])
        again = self._eager.settle(shape, chosen)
        counted = shape.width + 1  # the proposals behind it may differ where the drafter is undecided
        if not torch.equal(results[live, :counted], again.results[live, :counted]):
            raise Internal(f"a replayed round of {shape} counts {results[live].tolist()}, eager {again.results[live].tolist()}")
        self.rounds += 1
        for index, (replayed, eager) in enumerate(zip(after, self._states.read(slots), strict=True)):
            self._compare(shape, f"KDA state {index}", replayed[live], eager[live])
        return again

    def _compare(self, shape: RoundShape, what: str, replayed: Tensor, eager: Tensor) -> None:
        if not eager.numel():
            return
        scale = eager.float().square().mean().sqrt() + 1e-30
        error = float((replayed.float() - eager.float()).square().mean().sqrt() / scale)
        self.worst = max(self.worst, error)
        if not error <= TOLERANCE:
            raise Internal(f"a replayed round of {shape} differs from an eager one in its {what} by {error:.2g} of their size")
