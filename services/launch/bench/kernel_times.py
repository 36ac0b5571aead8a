"""Times on a GPU: of a list of calls by graph replay, or one after the other; and the two ceilings that floors are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

WARM_UPS, REPLAYS = 3, 15
CALLS_OF_A_GRAPH = 20  # so many that the launch of the graph does not count
LONG_US = 5000.0  # of a call, beside which the gaps between launches do not count
CEILING_BYTES, CEILING_SIZE = 2 << 30, 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches in this run."""

    copy_gb_per_s: float  # bytes read and bytes written
    matrix_tflop_per_s: float  # bfloat16 on random data

    def floor_us(self, size: int, flops: int) -> float:
        return max(size / self.copy_gb_per_s / 1e3, flops / self.matrix_tflop_per_s / 1e6)


def measure_ceilings(device: torch.device) -> Ceilings:
    source = torch.empty(CEILING_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_us = microseconds([lambda: target.copy_(source)])
    a, b = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=device).bfloat16() for _ in range(2))
    matrix_us = microseconds([lambda: a @ b])
    return Ceilings(2 * CEILING_BYTES / copy_us / 1e3, 2 * CEILING_SIZE**3 / matrix_us / 1e6)


def graph_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, in a captured graph of all of them again and again, with what lies between two kernels: a median. Long ones
    are launched one by one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    if _median_us(calls[0], 1) > LONG_US:
        return microseconds(calls)
    rounds = -(-CALLS_OF_A_GRAPH // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return _median_us(graph.replay, REPLAYS) / (rounds * len(calls))


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, launched one by one: for long ones, and for those that cannot be captured. A median."""

    def all_of_them() -> None:
        for call in calls:
            call()

    all_of_them()
    return _median_us(all_of_them, REPLAYS // 3) / len(calls)


def _median_us(run: Callable[[], object], times: int) -> float:
    run()
    spans: list[float] = []
    for _ in range(times):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        spans.append(began.elapsed_time(ended) * 1e3)
    return median(spans)
