"""`k3mesh bench rounds`: decode rounds of one rank on a GPU, by themselves: how long they take beside what their kernels take.

The rank is a worker's, with everything but its agent and its scheduler: plans go straight to its device thread's code, for
requests that stand at one position over caches of zeros. A round's time is from the plan to its results on the host.
"""

import json
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]

from k3mesh.errors import ConfigError
from services.contracts.arguments import EngineArguments, WorkerArguments
from services.contracts.flags import FlagSet, Integers
from services.contracts.geometry import blocks_for, rows_ahead, verify_widths
from services.contracts.topologies import TOPOLOGIES
from services.worker.decode_round import DecodeReplica
from services.worker.rank_build import Plan, build, replica
from services.worker.speculative.sampling import Sampling
from services.worker.wire import Mode, PlaceInstall, RoundPlan

WARM_UPS, TIMED, PROFILED = 3, 20, 5
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)


class RoundsArguments(FlagSet):
    """k3mesh bench rounds."""

    aliases: ClassVar[dict[str, str]] = {"json": "as_json"}

    model: str = Field(description="checkpoint, for example of `k3mesh make-checkpoint --preset slim`")
    topology: Literal["one-gpu"] = Field(default="one-gpu", description="whose decode engine it is")
    decode: str = Field(default="", description="more flags of the decode engine, as of `k3mesh up`")
    requests: Integers = Field(default=(1, 8, 32), description="live requests of a round")
    context: int = Field(default=1024, ge=1, description="position of each of them")
    as_json: bool = Field(default=False, description="print one JSON object instead of a table")


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Rounds of one shape; medians."""

    requests: int
    width: int
    mode: str
    round_ms: float
    kernels_ms: float  # the sum of what ran on the GPU, copies too
    kernels: int

    @property
    def ratio(self) -> float:
        return self.round_ms / self.kernels_ms


def main(argv: list[str]) -> int:
    """Return 0."""
    arguments = RoundsArguments.parse(argv, "k3mesh bench rounds")
    if not torch.cuda.is_available():
        raise ConfigError("bench rounds: needs an NVIDIA GPU, and torch sees none", param="device")
    found = measure(arguments)
    if arguments.as_json:
        print(json.dumps([asdict(it) | {"ratio": round(it.ratio, 3)} for it in found]))
    else:
        print("\n".join(table(found)))
    return 0


def measure(arguments: RoundsArguments) -> list[RoundTime]:
    """Replayed where the kernels let, and eager."""
    _, own_flags = TOPOLOGIES[arguments.topology].engines(arguments.model)
    decode = EngineArguments.parse([*own_flags, *shlex.split(arguments.decode)])
    with tempfile.TemporaryDirectory() as folder:
        own = ["--rank", "0", "--listen", "127.0.0.1:0", "--agent-socket", f"{folder}/agent", "--run-dir", folder]
        plan = Plan.of(WorkerArguments.parse([*decode.argv(), *own]))
    rank = replica(plan, build(plan))
    modes = [Mode.LOW_LATENCY_EAGER] + [Mode.LOW_LATENCY_GRAPH] * ("graphs" in rank.totals())
    drive = _Drive(plan, rank, arguments.context)
    return [
        drive.time(requests, width, mode)
        for mode in reversed(modes)
        for requests in arguments.requests
        for width in verify_widths(plan.arguments.verify_width)
    ]


class _Drive:
    """Plans for one replica."""

    def __init__(self, plan: Plan, rank: DecodeReplica, context: int):
        self._arguments, self._rank, self._context = plan.arguments, rank, context
        self._round = 0

    def time(self, requests: int, width: int, mode: Mode) -> RoundTime:
        """Rounds of `width` that draft as many proposals as the next one verifies."""
        bucket = next(size for size in self._arguments.buckets() if size >= requests)
        self._seat(requests, bucket, width)

        def run() -> None:
            self._execute(bucket, range(requests), mode, width)

        for _ in range(WARM_UPS):
            run()
        spent = [_seconds(run) for _ in range(TIMED)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(PROFILED):
                run()
        events = [event for event in profile.events() or () if event.device_type == DeviceType.CUDA]
        kernels_ms = sum(event.device_time for event in events) / PROFILED / 1e3
        self._execute(0, (), mode, 1, clears=range(requests))
        return RoundTime(
            requests, width, mode.name.rpartition("_")[2].lower(), round(1e3 * median(spent), 3), round(kernels_ms, 3),
            len(events) // PROFILED,
        )  # fmt: skip

    def _seat(self, requests: int, bucket: int, width: int) -> None:
        """Room for all rounds of a measurement, whatever counts."""
        rows = self._context + (WARM_UPS + TIMED + PROFILED + 2) * self._arguments.verify_width
        each = blocks_for(rows + rows_ahead(self._arguments.verify_width))
        window = (1,) * self._arguments.verify_width
        blocks = [tuple(range(1 + place * each, 1 + (place + 1) * each)) for place in range(requests)]
        installs = tuple(
            PlaceInstall(place, 1 + place, blocks[place], 1 + place, self._context, window, GREEDY) for place in range(requests)
        )
        self._execute(bucket, range(requests), Mode.LOW_LATENCY_EAGER, width, installs)

    def _execute(
        self, bucket: int, live: range | tuple[int, ...], mode: Mode, width: int, installs: tuple[PlaceInstall, ...] = (),
        clears: range | tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self._round += 1
        proposals = width - 1
        self._rank.execute(
            RoundPlan(self._round, bucket, mode, installs, tuple(clears), (), tuple(live), width, proposals, proposals)
        )


def _seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def table(found: list[RoundTime]) -> list[str]:
    head = f"{'requests':>8}{'width':>7}{'mode':>8}{'round, ms':>11}{'kernels, ms':>13}{'ratio':>7}{'kernels':>9}"
    rows = [
        f"{it.requests:>8}{it.width:>7}{it.mode:>8}{it.round_ms:>11.3f}{it.kernels_ms:>13.3f}{it.ratio:>7.2f}{it.kernels:>9}"
        for it in found
    ]
    return [head, *rows]
