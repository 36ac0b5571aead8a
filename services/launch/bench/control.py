"""`k3mesh bench control`: what it costs to keep a decode engine's rounds going, measured with workers that compute nothing.

The decode scheduler, the workers' control streams and their fan-out to tensor-parallel peers, Redis and the gateway are the
product's own processes; a round takes the time that it is told to, transfer agents and prefill answer at once. With rounds
that take no time the period of a round is all that the scheduler and its gRPC streams need; with rounds that take some, what
is left of it is what they add, since the next round is planned while one runs.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import uvloop
from pydantic import Field

from k3mesh.client import Client
from k3mesh.errors import MeshError
from k3mesh.v1 import common_pb2
from services.contracts.flags import FlagSet
from services.launch.bench.control_ends import Listener
from services.launch.bench.control_mesh import Counts, Shape, running
from services.launch.bench.sse import Answers, read_answers
from services.launch.child import ROOT
from services.launch.scratch import scratch

PROMPT = [7] * 100
STARTED_S = 60.0  # until every request has its first token
WARM_UP_S = 0.5


class ControlArguments(FlagSet):
    """k3mesh bench control."""

    aliases: ClassVar[dict[str, str]] = {"json": "as_json"}

    replicas: int = Field(default=4, ge=1, description="decode replicas")
    requests: int = Field(default=32, ge=1, description="requests of each replica")
    tp: int = Field(default=8, ge=1, description="tensor-parallel size that is compared with 1")
    round_ms: float = Field(default=5.0, gt=0, description="what a round takes where planning is to be hidden behind it")
    width: int = Field(default=8, ge=2, description="tokens of a request and round on their way through the gateway")
    gateway_round_ms: float = Field(default=20.0, ge=0, description="what a round takes there")
    tokens: int = Field(default=2048, ge=16, description="length of an answer there")
    seconds: float = Field(default=5.0, gt=0, description="time over which rounds are counted, in each case")
    planning_replicas: int = Field(default=64, ge=1, description="replicas whose planning is compared with that of --replicas")
    planning_rounds: int = Field(default=400, ge=1, description="rounds planned for that, without any process")
    as_json: bool = Field(default=False, description="print one JSON object")


@dataclass(frozen=True, slots=True)
class Rounds:
    """One engine's rounds. Milliseconds of one round, mean over them."""

    replicas: int
    requests: int  # live, over all replicas
    tp: int
    round_ms: float  # what a round was to take
    rounds: int  # counted
    period_ms: float  # from one to the next
    added_ms: float  # of it, what no round was run in
    planning_ms: float  # the planner's plan
    events_ms: float  # the planner's results, their effects performed
    scheduler_cpu_ms: float  # of the scheduler's process, gRPC and tokens to clients included
    leader_cpu_ms: float  # of a leader's process


@dataclass(frozen=True, slots=True)
class Planning:
    """The planner alone. Milliseconds of one round, medians."""

    replicas: int
    requests: int
    planning_ms: float
    results_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that was measured, and the figures that count."""

    control_ms: float  # scheduler and gRPC of one round
    planning_ms: float  # planning in it
    added_ms: float  # to a round of round_ms
    tp_growth: float  # of the scheduler's and leaders' time, from tensor-parallel size 1 to tp
    gateway_tokens_per_s: float  # from round results to server-sent events
    planning_growth: float  # from --replicas to --planning-replicas, with as many requests over all of them
    planning_growth_full: float  # likewise, with as many requests in each of them: so many more run full of a block
    rounds: list[Rounds]
    gateway: Answers
    planning: list[Planning]
    cores: int
    load_average: tuple[float, float, float]


def main(argv: list[str]) -> int:
    """Return 0 when everything is measured; MeshError if a process failed, and only then logs stay behind."""
    arguments = ControlArguments.parse(argv, "k3mesh bench control")
    with scratch("bench") as folder:
        result = uvloop.run(measure(arguments, folder))
    print(json.dumps(asdict(result)) if arguments.as_json else "\n".join(table(result)))
    return 0


async def measure(a: ControlArguments, folder: Path) -> Result:
    few, many = [await plan_alone(replicas, a.requests, a.planning_rounds) for replicas in (a.replicas, a.planning_replicas)]
    spread = await plan_alone(a.planning_replicas, max(1, a.replicas * a.requests // a.planning_replicas), a.planning_rounds)
    shapes = [Shape(a.replicas, a.requests, tp, round_ms=ms) for tp, ms in ((1, 0.0), (1, a.round_ms), (a.tp, a.round_ms))]
    rounds = [await count_rounds(folder / f"rounds-{n}", shape, a.seconds) for n, shape in enumerate(shapes)]
    gateway = await through_gateway(folder / "gateway", a)
    empty, timed, wide = rounds
    return Result(
        control_ms=empty.period_ms,
        planning_ms=empty.planning_ms,
        added_ms=timed.added_ms,
        tp_growth=round((wide.scheduler_cpu_ms + wide.leader_cpu_ms) / (timed.scheduler_cpu_ms + timed.leader_cpu_ms), 3),
        gateway_tokens_per_s=gateway.tokens_per_s,
        planning_growth=round(spread.planning_ms / few.planning_ms, 3),
        planning_growth_full=round(many.planning_ms / few.planning_ms, 3),
        rounds=rounds,
        gateway=gateway,
        planning=[few, spread, many],
        cores=os.cpu_count() or 0,
        load_average=os.getloadavg(),
    )


async def count_rounds(folder: Path, shape: Shape, seconds: float) -> Rounds:
    """All places taken by requests that do not end meanwhile, listened to by this process."""
    requests = shape.replicas * shape.places
    say(f"{requests} requests, tensor-parallel size {shape.tp}, rounds of {shape.round_ms:g} ms: starting")
    try:
        async with running(folder, shape) as mesh, Client(mesh.prefill) as client, aclosing(Listener(mesh.prefill)) as listener:
            sampling = common_pb2.Sampling(max_tokens=shape.max_model_len - len(PROMPT), ignore_eos=True)
            async with asyncio.timeout(STARTED_S):
                await asyncio.gather(*[listener.submit(f"r{n}", PROMPT, sampling) for n in range(requests)])
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(listener.listen())
                await asyncio.sleep(WARM_UP_S)
                before = await mesh.count(client)
                await asyncio.sleep(seconds)
                after = await mesh.count(client)
                listening.cancel()
    except* MeshError as failed:
        raise failed.exceptions[0] from None
    return _rounds(shape, before, after)


def _rounds(shape: Shape, before: Counts, after: Counts) -> Rounds:
    count = after.rounds - before.rounds
    if not count:
        raise MeshError("no round was run in the time that rounds were counted; give more --seconds")

    def each(seconds: float) -> float:
        return round(seconds * 1000 / count, 4)

    period, busy = each(after.at - before.at), each(after.busy_s - before.busy_s)
    return Rounds(
        replicas=shape.replicas,
        requests=shape.replicas * shape.places,
        tp=shape.tp,
        round_ms=shape.round_ms,
        rounds=count,
        period_ms=period,
        added_ms=round(period - busy, 4),
        planning_ms=each((after.planning_us - before.planning_us) / 1e6),
        events_ms=each((after.events_us - before.events_us) / 1e6),
        scheduler_cpu_ms=each(after.scheduler_cpu_s - before.scheduler_cpu_s),
        leader_cpu_ms=each(after.leader_cpu_s - before.leader_cpu_s),
    )


async def through_gateway(folder: Path, a: ControlArguments) -> Answers:
    """Answers of a given length, all at once, as a client of the HTTP door gets them."""
    shape = Shape(a.replicas, a.requests, width=a.width, round_ms=a.gateway_round_ms)
    say(f"{a.replicas * a.requests} answers of {a.tokens} tokens through the gateway, {a.width} a round: starting")
    async with running(folder, shape, gateway=True) as mesh:
        return await read_answers(mesh.url, a.replicas * a.requests, "x" * len(PROMPT), a.tokens)


async def plan_alone(replicas: int, requests: int, rounds: int) -> Planning:
    """The planner in a process of its own, without a shell."""
    words = ["--replicas", str(replicas), "--requests", str(requests), "--rounds", str(rounds)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.scheduler.decode.planning_time", *words,
        stdout=asyncio.subprocess.PIPE, cwd=ROOT, env={**os.environ, "K3MESH_PARENT": str(os.getpid())},
    )  # fmt: skip
    printed, _ = await process.communicate()
    if process.returncode:
        raise MeshError("the planner's time could not be measured; the lines above say why")
    return Planning(replicas, replicas * requests, **json.loads(printed))


def table(result: Result) -> Iterator[str]:
    yield f"{'rounds':<34}{'period':>9}{'added':>9}{'planning':>10}{'events':>9}{'scheduler CPU':>15}{'leader CPU':>12}   (ms)"
    for it in result.rounds:
        name = f"{it.replicas} x {it.requests // it.replicas}, TP{it.tp}, rounds of {it.round_ms:g} ms"
        figures = (it.period_ms, it.added_ms, it.planning_ms, it.events_ms, it.scheduler_cpu_ms, it.leader_cpu_ms)
        yield f"{name:<34}" + "".join(f"{n:>{w}.3f}" for n, w in zip(figures, (9, 9, 10, 9, 15, 12), strict=True))
    for it in result.planning:
        name = f"planner alone, {it.replicas} x {it.requests // it.replicas}"
        yield f"{name:<34}{it.planning_ms:.3f} ms, results {it.results_ms:.3f}"
    gateway = result.gateway
    yield f"gateway: {gateway.tokens_per_s:.0f} tokens/s in {gateway.events} events, {gateway.requests} answers"
    yield f"scheduler and gRPC of a round {result.control_ms:.3f} ms, planning in it {result.planning_ms:.3f} ms"
    yield f"added to a round {result.added_ms:.3f} ms; TP growth x{result.tp_growth}; planning growth x{result.planning_growth}"
    yield f"planning growth with every place taken x{result.planning_growth_full}"
    yield f"{result.cores} cores, load average {result.load_average[0]:.1f}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
