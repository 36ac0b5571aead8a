"""Decode rounds as CUDA graphs: every shape of the ladder is captured at start, and a round replays its shape's two halves.

What a graph reads lies where it lay at capture: the rows that the host fills, the chosen tokens, caches, weights. Between its
halves tokens are chosen by operations of their own, which are queued while the first half runs and so cost no time. All graphs
share one pool of memory: what one half leaves for the other is there until another round runs, and no longer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from services.contracts.arguments import EngineArguments
from services.contracts.buffers import MIB
from services.contracts.geometry import verify_widths
from services.runtime.telemetry import log
from services.worker.device import synchronize
from services.worker.round_part import RoundPart, RoundShape, Settled
from services.worker.speculative.drafter import Drafter, Steps

T = TypeVar("T")
Replay = Callable[[], None]


class Recorder(Protocol):
    """Captures work."""

    def record(self, body: Callable[[], T]) -> tuple[Replay, T]:
        """-> what repeats the work of `body`, and what it returned, which each repetition fills anew."""
        ...

    def lend(self, tensor: Tensor) -> Tensor:
        """The same memory without a claim on it: later captures may use it too."""
        ...


class CudaRecorder:
    """CUDA graphs in one pool of memory."""

    def __init__(self, device: torch.device):
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, body: Callable[[], T]) -> tuple[Replay, T]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = body()
        return graph.replay, out

    def lend(self, tensor: Tensor) -> Tensor:
        return torch.as_tensor(_Memory(cast("dict[str, Any]", tensor.__cuda_array_interface__)), device=tensor.device)


class _Memory:
    def __init__(self, interface: dict[str, Any]):
        self.__cuda_array_interface__ = interface


def ladder(a: EngineArguments, drafter: Drafter | None) -> list[RoundShape]:
    """Every shape that a graph round of this engine may have, the largest first: memory that it takes serves the others."""
    widths = sorted(verify_widths(a.verify_width), reverse=True)
    steps = [Steps(0, 0)]
    if drafter is not None:
        proposals = [width - 1 for width in widths]
        steps = [Steps(most, most) for most in proposals]
        if drafter.collective and a.data_parallel_size > 1:  # others may draft more than this replica
            steps = [Steps(own, most) for most in proposals for own in proposals if own <= most]
    return [
        RoundShape(bucket, width, it, drafter is not None and width == 1 and not it.most)
        for bucket in sorted(a.buckets(), reverse=True)
        for width in widths
        for it in steps
    ]


class GraphRounds:
    """services.worker.round_part.Rounds by replay. Device thread only."""

    def __init__(self, part: RoundPart, shapes: Sequence[RoundShape], places: int, width: int, device: torch.device):
        self._part = part
        self._chosen = torch.zeros(places * width, dtype=torch.int64, device=device)
        self._device = device
        self._first: dict[RoundShape, tuple[Replay, Tensor]] = {}
        self._second: dict[RoundShape, tuple[Replay, Settled]] = {}
        self._shapes = shapes

    def capture(self, recorder: Recorder) -> None:
        """All shapes. Caches, weights and rows stay where they are from now on; rows are nobody's meanwhile. Collective."""
        started, free = time.monotonic(), _free(self._device)
        for first in dict.fromkeys(map(_first_half, self._shapes)):
            seconds = [shape for shape in self._shapes if _first_half(shape) == first]
            self._warm_up(first, seconds)
            replay, evaluated = recorder.record(lambda first=first: self._part.evaluate(first))
            self._first[first] = replay, recorder.lend(evaluated.logits)
            for shape in seconds:
                self._second[shape] = recorder.record(
                    lambda shape=shape, evaluated=evaluated: self._part.settle(shape, evaluated, self._place_of(shape))
                )
        synchronize(self._device)
        log.info(
            "decode rounds captured",
            graphs=len(self._first) + len(self._second),
            mib=(free - _free(self._device)) // MIB,
            seconds=round(time.monotonic() - started, 1),
        )

    def totals(self) -> dict[str, int]:
        return {"graphs": len(self._first) + len(self._second)}

    def covers(self, shape: RoundShape) -> bool:
        return shape in self._second

    def evaluate(self, shape: RoundShape) -> Tensor:
        replay, logits = self._first[_first_half(shape)]
        replay()
        return logits

    def settle(self, shape: RoundShape, chosen: Tensor) -> Settled:
        replay, settled = self._second[shape]
        self._place_of(shape).copy_(chosen)
        replay()
        return settled

    def addresses(self) -> tuple[int, ...]:
        """Of the memory that the host fills."""
        return (*self._part.addresses(), self._chosen.data_ptr())

    def _place_of(self, shape: RoundShape) -> Tensor:
        return self._chosen[: shape.bucket * shape.width].view(shape.bucket, shape.width)

    def _warm_up(self, first: RoundShape, seconds: Sequence[RoundShape]) -> None:
        """Kernels are compiled and libraries choose their ways before anything is captured."""
        evaluated = self._part.evaluate(first)
        for shape in seconds:
            self._part.settle(shape, evaluated, self._place_of(shape))
        synchronize(self._device)


def _first_half(shape: RoundShape) -> RoundShape:
    """What of a shape the first half depends on."""
    return replace(shape, steps=Steps(0, 0))


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
