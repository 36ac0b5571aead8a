"""`k3mesh bench transfer`: how fast the transfer agents move a request's cache, against what UCX can do in the same run.

One prefill rank and one decode rank of K3 at tensor-parallel size 8, each with its pools in shared memory and its agent as a
process; the prefill rank holds all 93 layers, so that one agent sends what a decode rank receives in all. A case is requests
of one length, one after the other, each clocked from the worker's last barrier (all fields are written) to the decode
agent's report that every byte is verified and in its blocks. P's and D's blocks are in random order.

The ceiling is raw UCXX: frames of the agents' size between two other processes, as many in flight and with the same UCX
settings, from one buffer to another and nothing else. It moves the bytes of one request in turn with each request, so that
what else the machine does meets both. Figures are medians over the rounds.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import Field

from k3mesh.errors import ConfigError
from services.contracts.arguments import AgentArguments
from services.contracts.flags import FlagSet, Integers
from services.contracts.geometry import blocks_for
from services.launch.bench.ceiling import Ceiling
from services.launch.bench.samples import Sample
from services.launch.bench.transfer_pair import Pair, k3_placement
from services.launch.state import StateDir

FRAME_BYTES = AgentArguments.model_fields["transfer_frame_bytes"].default
FRAMES = AgentArguments.model_fields["transfer_frames"].default
WINDOW = 8  # frames in flight on one link, as the agents have it
SPARE_BYTES = 2 << 30  # left to everything but the pools


class TransferArguments(FlagSet):
    """k3mesh bench transfer."""

    tokens: Integers = Field(default=(8192, 131072), description="prompt lengths, one case each")
    rounds: int = Field(default=8, ge=1, description="requests of each case, in turn with the ceiling")
    transfer_frame_bytes: int = Field(default=FRAME_BYTES, ge=4096, description="bytes of one frame, as of the agents")
    transfer_frames: int = Field(default=FRAMES, ge=1, description="staging frames of each agent")
    json: bool = Field(default=False, description="print one JSON object")


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
    """Return 0 when all cases are measured. ConfigError if they cannot be, MeshError if a process or a transfer failed."""
    arguments = TransferArguments.parse(argv, "k3mesh bench transfer")
    if bad := [tokens for tokens in arguments.tokens if tokens < 1]:
        raise ConfigError(f"--tokens {bad[0]}: must be at least 1; give prompt lengths", param="tokens")
    if not arguments.tokens:
        raise ConfigError("--tokens: is empty; give prompt lengths, separated by commas", param="tokens")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # leave through every finally
    require_memory(max(arguments.tokens))
    cases = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps({"cases": [asdict(case) for case in cases], "load_average": os.getloadavg(), "cores": os.cpu_count()}))
    else:
        print(table(cases))
    return 0


def require_memory(tokens: int) -> None:
    """ConfigError if the pools of the longest case do not fit beside what else runs."""
    needed = 2 * k3_placement("prefill", tokens).expected_bytes(blocks_for(tokens))
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    if needed + SPARE_BYTES > available:
        raise ConfigError(
            f"--tokens {tokens}: the pools of both ranks take {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB of memory are "
            f"available; give shorter prompts, or free memory",
            param="tokens",
        )


async def measure(arguments: TransferArguments) -> list[Case]:
    cases: list[Case] = []
    frames = arguments.transfer_frame_bytes, arguments.transfer_frames
    with tempfile.TemporaryDirectory(prefix="k3mesh-bench-") as folder:
        state = StateDir(folder)
        state.create()
        async with AsyncExitStack() as stack:
            say("starting two agents with their pools, and the two processes of the ceiling")
            ceiling = await stack.enter_async_context(Ceiling.run(arguments.transfer_frame_bytes, WINDOW))
            pair = await stack.enter_async_context(Pair.run(state, max(arguments.tokens), *frames))
            for tokens in arguments.tokens:
                cases.append(await measure_case(pair, ceiling, tokens, arguments))
    return cases


async def measure_case(pair: Pair, ceiling: Ceiling, tokens: int, arguments: TransferArguments) -> Case:
    """Agents and ceiling in turn; the first round of each is for warming up."""
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


def table(cases: Sequence[Case]) -> str:
    lines = [f"{'case':<16}{'MB':>8}{'payload GB/s':>14}{'ceiling GB/s':>14}{'ratio':>8}{'CPU s/GB':>10}{'ceiling CPU s/GB':>18}"]
    for it in cases:
        lines.append(
            f"{it.name:<16}{it.bytes / 1e6:>8.1f}{it.payload_gb_s:>14.2f}{it.ceiling_gb_s:>14.2f}{it.ratio:>8.2f}"
            f"{it.cpu_s_per_gb:>10.2f}{it.ceiling_cpu_s_per_gb:>18.2f}"
        )
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
