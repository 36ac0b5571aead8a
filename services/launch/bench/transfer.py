"""`k3mesh bench transfer`: how fast the transfer agents move a request's cache, against what UCX can do in the same run.

One prefill rank and one decode rank of K3 at tensor-parallel size 8, each with its pools in shared memory and its agent as a
process; the prefill rank holds all 93 layers, so that one agent sends what a decode rank receives in all. A case is requests
of one length, one after the other, each clocked from the worker's last barrier (all fields are written) to the decode
agent's report that every byte is verified and in its blocks. P's and D's blocks are in random order.

The ceiling is raw UCXX: frames of the agents' size between two other processes, as many in flight, with the same UCX
transport, settings and progress, from one buffer to another and nothing else (services.kvtransfer.ceiling). It moves the
bytes of one request in turn with each request, so that what else the machine does meets both. Figures are medians.
"""

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.contracts.arguments import TCP_FRAME_BYTES, AgentArguments
from services.contracts.flags import FlagSet, Integers, refusal
from services.contracts.geometry import blocks_for
from services.launch.bench.ceiling import Ceiling
from services.launch.bench.samples import Sample
from services.launch.bench.transfer_pair import Pair, k3_placement
from services.launch.scratch import scratch
from services.launch.state import StateDir

FRAMES = AgentArguments.model_fields["transfer_frames"].default
SPARE_BYTES = 2 << 30  # left to everything but the pools


class TransferArguments(FlagSet):
    """k3mesh bench transfer."""

    aliases: ClassVar[dict[str, str]] = {"json": "as_json"}

    tokens: Integers = Field(default=(8192, 131072), description="prompt lengths, one case each")
    rounds: int = Field(default=8, ge=1, description="requests of each case, in turn with the ceiling")
    transfer_frame_bytes: int = Field(default=TCP_FRAME_BYTES, ge=4096, description="bytes of one frame, as of the agents")
    transfer_frames: int = Field(default=FRAMES, ge=1, description="staging frames of each agent")
    as_json: bool = Field(default=False, description="print one JSON object")


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the result. GB are 1e9 bytes, of the cache fields' payload."""

    name: str
    tokens: int
    bytes: int  # of one request
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
    require_memory(max(arguments.tokens))
    with scratch("bench") as folder:
        cases = asyncio.run(measure(arguments, StateDir(folder)))
    if arguments.as_json:
        print(json.dumps({"cases": [asdict(case) for case in cases], "load_average": os.getloadavg(), "cores": os.cpu_count()}))
    else:
        print("\n".join(table(cases)))
    return 0


def require_memory(tokens: int) -> None:
    """ConfigError if the pools of the longest case do not fit beside what else runs."""
    needed = 2 * k3_placement("prefill", tokens).expected_bytes(blocks_for(tokens))
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if needed + SPARE_BYTES > available:
        rule = f"the pools of both ranks take {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB of memory are available"
        raise refusal("tokens", tokens, rule, "give shorter prompts, or free memory")


async def measure(arguments: TransferArguments, state: StateDir) -> list[Case]:
    state.create()
    async with Ceiling.run(arguments.transfer_frame_bytes) as ceiling:
        return [await measure_case(state, ceiling, tokens, arguments) for tokens in arguments.tokens]


async def measure_case(state: StateDir, ceiling: Ceiling, tokens: int, arguments: TransferArguments) -> Case:
    """Agents on pools of the case's size and ceiling, in turn. The first round is not counted: until then the agents have not
    touched the pools, and each page costs them a fault."""
    say(f"{tokens} tokens: starting two agents and filling their pools")
    async with Pair.run(state, tokens, arguments.transfer_frame_bytes, arguments.transfer_frames) as pair:
        return await run_rounds(pair, ceiling, tokens, arguments)


async def run_rounds(pair: Pair, ceiling: Ceiling, tokens: int, arguments: TransferArguments) -> Case:
    payloads: list[Sample] = []
    ceilings: list[Sample] = []
    for number in range(arguments.rounds + 1):
        payloads.append(await pair.transfer(tokens))
        ceilings.append(await ceiling.transfer(payloads[-1].bytes))
        say(f"{tokens} tokens, round {number} of {arguments.rounds}: {payloads[-1].rate:.2f} GB/s, raw {ceilings[-1].rate:.2f}")
    payload, raw = (statistics.median(sample.rate for sample in samples[1:]) for samples in (payloads, ceilings))
    return Case(
        name=f"{tokens} tokens",
        tokens=tokens,
        bytes=payloads[0].bytes,
        frame_bytes=arguments.transfer_frame_bytes,
        rounds=arguments.rounds,
        payload_gb_s=round(payload, 3),
        ceiling_gb_s=round(raw, 3),
        ratio=round(payload / raw, 3),
        cpu_s_per_gb=round(cpu_per_gb(payloads[1:]), 3),
        ceiling_cpu_s_per_gb=round(cpu_per_gb(ceilings[1:]), 3),
    )


def cpu_per_gb(samples: Sequence[Sample]) -> float:
    return sum(sample.cpu_seconds for sample in samples) / sum(sample.bytes for sample in samples) * 1e9


def table(cases: Sequence[Case]) -> Iterator[str]:
    columns = ("MB", "payload GB/s", "ceiling GB/s", "ratio", "CPU s/GB", "ceiling CPU s/GB")
    yield f"{'case':<16}" + "".join(f"{column:>{len(column) + 3}}" for column in columns)
    for it in cases:
        figures = (it.bytes / 1e6, it.payload_gb_s, it.ceiling_gb_s, it.ratio, it.cpu_s_per_gb, it.ceiling_cpu_s_per_gb)
        yield f"{it.name:<16}" + "".join(f"{n:>{len(column) + 3}.2f}" for n, column in zip(figures, columns, strict=True))
    mib = cases[0].frame_bytes / 2**20
    yield f"ceiling: raw UCXX, frames of {mib:g} MiB between two processes with the agents' settings, in turn with the agents"
    yield f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
