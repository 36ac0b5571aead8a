"""`k3mesh bench transfer`: how fast the transfer agents move a request's cache, against what UCX can do in the same run.

One prefill rank and one decode rank of K3 at tensor-parallel size 8, each with its pools (in shared memory, or each on a GPU
of its own) and its agent as a process; the prefill rank holds all 93 layers, so that one agent sends what a decode rank
receives in all. A case is rounds of requests of one length, one after the other or so many at once, each round clocked from
the worker's first last barrier (all fields are written) to the decode agent's last report that every byte is verified and in
its blocks. P's and D's blocks are in random order, and after each round all of them are compared.

On CPUs the ceiling is raw UCXX, by its own interface and with its progress thread: a request's bytes between two other
processes in messages of the agents' length, as many in flight, with the same UCX settings, from one buffer to another and
nothing else (services.kvtransfer.ceiling). Between GPUs it is the driver's copy of buffers of a request's size. It moves a
round's bytes in turn with each round, so that what else the machine does meets both. Figures are medians.
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
import uvloop
from pydantic import Field

from services.contracts.arguments import CUDA_FRAME_BYTES, HOST_FRAME_BYTES
from services.contracts.flags import FlagSet, Integers, refusal
from services.contracts.geometry import blocks_for
from services.launch.bench.ceiling import Ceiling
from services.launch.bench.peer_copy import PeerCopy, two_gpus
from services.launch.bench.samples import Sample
from services.launch.bench.transfer_pair import CPU, Pair, k3_placement
from services.launch.scratch import scratch
from services.launch.state import StateDir

AT_ONCE = {"cpu": (1,), "cuda": (1, 8)}
ROUND_BYTES = 16 << 30  # most that the requests of a round have together
PER_PLACE = 4  # requests of a round for each that is under way at once, so that its beginning and end weigh little
SPARE_BYTES = 2 << 30  # left to everything but the pools


class TransferArguments(FlagSet):
    """k3mesh bench transfer."""

    aliases: ClassVar[dict[str, str]] = {"json": "as_json"}

    tokens: Integers = Field(default=(8192, 131072), description="prompt lengths, one case each")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where the pools are; cuda takes two GPUs")
    at_once: Integers = Field(default=(), description="requests under way, one case each; 1, on cuda 1,8")
    rounds: int = Field(default=8, ge=1, description="times that each case is measured, in turn with the ceiling")
    transfer_frame_bytes: int = Field(default=0, ge=0, description="bytes of one frame; 0: as the agents take")
    transfer_frames: int = Field(default=0, ge=0, description="staging frames of each agent; 0: as they take")
    as_json: bool = Field(default=False, description="print one JSON object")


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the result. GB are 1e9 bytes, of the cache fields' payload."""

    name: str
    tokens: int
    bytes: int  # of one request
    requests: int  # of a round
    at_once: int
    frame_bytes: int
    rounds: int
    payload_gb_s: float
    ceiling_gb_s: float
    ratio: float
    cpu_s_per_gb: float  # of both agents together
    ceiling_cpu_s_per_gb: float  # of both processes together


def main(argv: list[str]) -> int:
    """Return 0 when all cases are measured. ConfigError if they cannot be; MeshError if a process or a transfer failed, and
    only then logs stay behind."""
    arguments = TransferArguments.parse(argv, "k3mesh bench transfer")
    if not arguments.tokens or min(arguments.tokens) < 1:
        raise refusal("tokens", arguments.tokens, "must be prompt lengths of at least 1", "give some, separated by commas")
    if min(arguments.at_once, default=1) < 1:
        raise refusal("at_once", arguments.at_once, "must be at least 1", "give some, separated by commas")
    devices = two_gpus() if arguments.device == "cuda" else (CPU, CPU)
    plans = [plan(arguments, tokens) for tokens in arguments.tokens]
    if arguments.device == "cpu":
        for it in plans:
            require_memory(it)
    with scratch("bench") as folder:
        cases = uvloop.run(measure(arguments, plans, devices, StateDir(folder)))
    if arguments.as_json:
        print(json.dumps({"cases": [asdict(case) for case in cases], "load_average": os.getloadavg(), "cores": os.cpu_count()}))
    else:
        print("\n".join(table(cases, arguments.device)))
    return 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of one prompt length, on one pair of agents."""

    tokens: int
    bytes: int  # of one request
    rounds: tuple[tuple[int, int], ...]  # of each case: requests of a round, those under way at once

    @property
    def requests(self) -> int:
        """That the pools hold."""
        return max(requests for requests, _ in self.rounds)


def plan(arguments: TransferArguments, tokens: int) -> Plan:
    size = k3_placement("prefill", tokens).expected_bytes(blocks_for(tokens))
    most = max(1, ROUND_BYTES // size)
    wanted = arguments.at_once or AT_ONCE[arguments.device]
    rounds = {(1, 1) if it == 1 else (min(PER_PLACE * it, most), min(it, most)) for it in wanted}
    return Plan(tokens, size, tuple(sorted(rounds)))


def require_memory(it: Plan) -> None:
    """ConfigError if the pools of the case do not fit beside what else runs."""
    needed = 2 * it.bytes * it.requests
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if needed + SPARE_BYTES > available:
        rule = f"the pools of both ranks take {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB of memory are available"
        raise refusal("tokens", it.tokens, rule, "give shorter prompts, or free memory")


async def measure(
    arguments: TransferArguments, plans: Sequence[Plan], devices: tuple[torch.device, torch.device], state: StateDir
) -> list[Case]:
    state.create()
    async with AsyncExitStack() as stack:
        if arguments.device == "cuda":
            ceiling = PeerCopy(max(it.bytes for it in plans))
        else:
            ceiling = await stack.enter_async_context(Ceiling.run())
        return [case for it in plans for case in await measure_pair(state, ceiling, it, devices, arguments)]


async def measure_pair(
    state: StateDir,
    ceiling: Ceiling | PeerCopy,
    it: Plan,
    devices: tuple[torch.device, torch.device],
    arguments: TransferArguments,
) -> list[Case]:
    """The cases of one length. The first round is not counted: until then the agents have not touched the pools, and each
    page costs them a fault."""
    say(f"{it.tokens} tokens: starting two agents and filling their pools")
    sizes = arguments.transfer_frame_bytes, arguments.transfer_frames
    async with Pair.run(state, it.tokens, *sizes, it.requests, devices) as pair:
        return [await run_rounds(pair, ceiling, it, requests, at_once, arguments) for requests, at_once in it.rounds]


async def run_rounds(
    pair: Pair, ceiling: Ceiling | PeerCopy, it: Plan, requests: int, at_once: int, arguments: TransferArguments
) -> Case:
    name = f"{it.tokens} tokens" + (f", {at_once} at once" if at_once > 1 else "")
    payloads: list[Sample] = []
    ceilings: list[Sample] = []
    for number in range(arguments.rounds + 1):
        payloads.append(await pair.transfer(it.tokens, requests, at_once))
        ceilings.append(await ceiling.transfer(it.bytes, requests))
        say(f"{name}, round {number} of {arguments.rounds}: {payloads[-1].rate:.2f} GB/s, raw {ceilings[-1].rate:.2f}")
    payload, raw = (statistics.median(sample.rate for sample in samples[1:]) for samples in (payloads, ceilings))
    return Case(
        name=name,
        tokens=it.tokens,
        bytes=it.bytes,
        requests=requests,
        at_once=at_once,
        frame_bytes=frame_bytes(arguments),
        rounds=arguments.rounds,
        payload_gb_s=round(payload, 3),
        ceiling_gb_s=round(raw, 3),
        ratio=round(payload / raw, 3),
        cpu_s_per_gb=round(cpu_per_gb(payloads[1:]), 3),
        ceiling_cpu_s_per_gb=round(cpu_per_gb(ceilings[1:]), 3),
    )


def frame_bytes(arguments: TransferArguments) -> int:
    return arguments.transfer_frame_bytes or (CUDA_FRAME_BYTES if arguments.device == "cuda" else HOST_FRAME_BYTES)


def cpu_per_gb(samples: Sequence[Sample]) -> float:
    return sum(sample.cpu_seconds for sample in samples) / sum(sample.bytes for sample in samples) * 1e9


def table(cases: Sequence[Case], device: str) -> Iterator[str]:
    columns = ("MB", "payload GB/s", "ceiling GB/s", "ratio", "CPU s/GB", "ceiling CPU s/GB")
    yield f"{'case':<24}" + "".join(f"{column:>{len(column) + 3}}" for column in columns)
    for it in cases:
        figures = (it.bytes / 1e6, it.payload_gb_s, it.ceiling_gb_s, it.ratio, it.cpu_s_per_gb, it.ceiling_cpu_s_per_gb)
        yield f"{it.name:<24}" + "".join(f"{n:>{len(column) + 3}.2f}" for n, column in zip(figures, columns, strict=True))
    mib = cases[0].frame_bytes / 2**20
    if device == "cuda":
        ceiling = "the driver's copy of the same requests from GPU to GPU"
    else:
        ceiling = "raw UCXX, the same bytes between two processes in messages of a piece, with the agents' settings"
    yield f"frames of {mib:g} MiB; ceiling: {ceiling}, in turn with the agents"
    yield f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
