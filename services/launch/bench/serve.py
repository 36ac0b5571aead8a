"""`k3mesh bench serve`: a mesh under load at several levels of concurrency, by one client over HTTP.

Prompts are random token ids of one length, all different, so that nothing comes from the prefix cache; answers go on to their
full length. As many requests as the level says are under way at any time.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, quantiles
from typing import ClassVar

from pydantic import Field

from k3mesh.client import Client
from services.contracts.flags import FlagSet, Integers
from services.contracts.topologies import LocalTopology
from services.launch import up
from services.launch.bench.timed import Timed, ask
from services.launch.child import ROOT
from services.launch.fits import check_engines
from services.launch.mesh import UpArguments
from services.launch.ports import free_ports
from services.launch.scratch import scratch
from services.launch.state import StateDir
from services.launch.tokenizer_files import SPECIAL_IDS

SEED = 1
WARM_UP = 2  # requests that do not count


class ServeArguments(FlagSet):
    """k3mesh bench serve."""

    aliases: ClassVar[dict[str, str]] = {"json": "as_json"}

    model: str = Field(default=str(ROOT / "models" / "demo"), description="checkpoint; the demo model if unset")
    topology: LocalTopology = Field(default="laptop", description="as of `k3mesh up`")
    prefill: str = Field(default="", description="more flags of the prefill engine, as of `k3mesh up`")
    decode: str = Field(default="", description="more flags of the decode engine, likewise")
    concurrency: Integers = Field(default=(1, 4, 16), description="levels: requests under way at a time")
    requests: int = Field(default=0, ge=0, description="requests of a level; 0: three times its concurrency, at least 8")
    input_tokens: int = Field(default=256, ge=1, description="length of a prompt")
    output_tokens: int = Field(default=64, ge=2, description="length of an answer")
    temperature: float = Field(default=0.0, ge=0, description="of the answers")
    as_json: bool = Field(default=False, description="print one JSON object instead of a table")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one quantity over a level's requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
        return cls(*(round(it, 6) for it in (mean(values), cuts[49], cuts[89], cuts[98])))


@dataclass(frozen=True, slots=True)
class Level:
    """What one level of concurrency gave."""

    concurrency: int
    requests: int
    seconds: float
    prompts_per_s: float
    input_tokens_per_s: float  # computed by prefill
    output_tokens_per_s: float
    time_to_first_token: Spread
    time_per_token: Spread  # of each after an answer's first
    acceptance_length: float  # tokens of a request and round with proposals; 1 without speculation
    rounds: int


@dataclass(frozen=True, slots=True)
class Served:
    """All levels of one mesh."""

    model: str
    topology: str
    prefill: str
    decode: str
    input_tokens: int
    output_tokens: int
    levels: list[Level]
    memory_peak_bytes: dict[str, int]  # by worker, since its start


def main(argv: list[str]) -> int:
    """Return 0 when every request of every level was answered in full."""
    arguments = ServeArguments.parse(argv, "k3mesh bench serve")
    with scratch("bench") as folder:
        words = ["--model", arguments.model, "--topology", arguments.topology, "--state-dir", str(folder)]
        words += [f"--prefill={arguments.prefill}", f"--decode={arguments.decode}", "--port", str(free_ports(1)[0])]
        flags = UpArguments.parse(words)
        vocabulary = check_engines(flags.engines())[0].model.vocab_size - SPECIAL_IDS
        print("starting a mesh", file=sys.stderr, flush=True)
        with up.attached(flags):
            served = asyncio.run(measure(arguments, StateDir(folder), vocabulary))
    print(json.dumps(asdict(served)) if arguments.as_json else "\n".join(table(served)))
    return 0


async def measure(arguments: ServeArguments, state: StateDir, vocabulary: int) -> Served:
    """Each level in turn, against a mesh that runs. Token ids are drawn below `vocabulary`."""
    drawn = random.Random(SEED)

    def prompts(count: int) -> list[list[int]]:
        return [[drawn.randrange(vocabulary) for _ in range(arguments.input_tokens)] for _ in range(count)]

    await _drive(arguments, state, prompts(WARM_UP), WARM_UP)
    levels: list[Level] = []
    for at_once in arguments.concurrency:
        count = arguments.requests or max(8, 3 * at_once)
        before = await totals(state)
        started = time.monotonic()
        answers = await _drive(arguments, state, prompts(count), at_once)
        seconds = time.monotonic() - started
        levels.append(_level(at_once, answers, seconds, before, await totals(state)))
        print(f"{at_once} at a time: {count} requests in {seconds:.1f} s", file=sys.stderr, flush=True)
    peaks = {name: it["memory_peak_bytes"] for name, it in (await totals(state)).items() if ".worker-" in name}
    a = arguments
    return Served(a.model, a.topology, a.prefill, a.decode, a.input_tokens, a.output_tokens, levels, peaks)


async def _drive(arguments: ServeArguments, state: StateDir, prompts: Sequence[list[int]], at_once: int) -> list[Timed]:
    """MeshError of the first request that fails."""
    places, url = asyncio.Semaphore(at_once), state.addresses()["url"]
    options = {"max_tokens": arguments.output_tokens, "temperature": arguments.temperature, "ignore_eos": True}

    async def one(prompt: list[int]) -> Timed:
        async with places:
            return await ask(url, {"prompt": prompt, **options})

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(prompt)) for prompt in prompts]
    return [task.result() for task in tasks]


async def totals(state: StateDir) -> dict[str, dict[str, int]]:
    """What every worker and the decode scheduler have counted since their start, by process name."""
    addresses = state.addresses()
    found: dict[str, dict[str, int]] = {}
    async with Client(addresses["prefill-0"]["scheduler"]) as client:
        for engine in ("prefill-0", "decode-0"):
            for rank, address in enumerate(addresses[engine]["workers"]):
                found[f"{engine}.worker-{rank}"] = (await client.inspect("worker", address)).totals
        scheduler = await client.inspect("decode-scheduler", addresses["decode-0"]["scheduler"])
        found["decode-0.scheduler"] = scheduler.totals
    return found


def _level(
    at_once: int,
    answers: Sequence[Timed],
    seconds: float,
    before: dict[str, dict[str, int]],
    after: dict[str, dict[str, int]],
) -> Level:
    def counted(name: str, process: str) -> int:
        return after[process].get(name, 0) - before[process].get(name, 0)

    scheduler = "decode-0.scheduler"
    windows = counted("windows", scheduler)
    return Level(
        concurrency=at_once,
        requests=len(answers),
        seconds=round(seconds, 4),
        prompts_per_s=round(len(answers) / seconds, 3),
        input_tokens_per_s=round(counted("tokens", "prefill-0.worker-0") / seconds, 1),
        output_tokens_per_s=round(sum(len(it.tokens) for it in answers) / seconds, 1),
        time_to_first_token=Spread.of([it.first for it in answers]),
        time_per_token=Spread.of([it.time_per_token for it in answers]),
        acceptance_length=round(1 + counted("tokens_accepted", scheduler) / max(1, windows), 3),
        rounds=counted("rounds", scheduler),
    )


def table(it: Served) -> list[str]:
    """One row for each level."""
    lines = [
        f"{it.model}, {it.topology}: prompts of {it.input_tokens} tokens, answers of {it.output_tokens}",
        "",
        f"{'':>8}{'prompts':>9}{'input':>10}{'output':>10}{'TTFT, ms':>20}{'TPOT, ms':>20}{'tokens':>8}",
        f"{'at once':>8}{'/ s':>9}{'tokens/s':>10}{'tokens/s':>10}{'p50':>10}{'p99':>10}{'p50':>10}{'p99':>10}{'a round':>8}",
    ]
    for level in it.levels:
        first, each = level.time_to_first_token, level.time_per_token
        times = "".join(f"{1e3 * value:>10.2f}" for value in (first.p50, first.p99, each.p50, each.p99))
        lines.append(
            f"{level.concurrency:>8}{level.prompts_per_s:>9.2f}{level.input_tokens_per_s:>10.1f}"
            f"{level.output_tokens_per_s:>10.1f}{times}{level.acceptance_length:>8.2f}"
        )
    peaks = "  ".join(f"{name} {size / 2**20:.0f}" for name, size in it.memory_peak_bytes.items())
    return [*lines, "", f"memory peaks, MiB: {peaks}"]
