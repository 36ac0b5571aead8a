"""Plays a scripted workload on a running mesh through its schedulers: what was counted, and when what happened."""

import asyncio
import json
import os
import random
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, median_low

from k3mesh.cli import inspect
from k3mesh.client import Client, Finished, SamplingParams
from k3mesh.errors import MeshError, NotFound
from services.launch.state import StateDir
from services.launch.tokenizer_files import SPECIAL_IDS

SETTLE_S, LOOK_S = 30.0, 0.2
CALLS = 30  # that tell how long a message takes


@dataclass(frozen=True, slots=True)
class Script:
    """Requests as (prompt tokens, answer tokens), in the order in which they are sent; the next when one of `at_once` ends. The
    first is alone until it has its first token."""

    name: str
    requests: tuple[tuple[int, int], ...]
    at_once: int = 1

    def lines(self) -> str:
        """As `k3mesh sim --workload` reads it."""
        return "".join(json.dumps({"prompt_tokens": prompt, "max_tokens": output}) + "\n" for prompt, output in self.requests)


@dataclass(slots=True)
class Played:
    """One request: seconds of this process' clock, and its record in the ledger."""

    prompt_tokens: int
    sent: float
    first: float = 0.0
    finished: float = 0.0
    tokens: int = 0
    ledger: inspect.Entry = field(default_factory=dict[str, str])

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        return (self.finished - self.first) / max(1, self.tokens - 1)

    @property
    def chunks(self) -> list[tuple[int, int, int, float, float]]:
        """(stage, start, end, started, ended)."""
        return [tuple(chunk) for chunk in json.loads(self.ledger["chunks"])]


@dataclass(frozen=True)
class Play:
    """A whole script."""

    requests: list[Played]
    prefill: dict[str, int]  # what its scheduler counted meanwhile
    decode: dict[str, int]
    cpu: dict[str, float]  # seconds of processor time by kind of process, such as decode-0.worker

    @property
    def seconds(self) -> float:
        return max(it.finished for it in self.requests) - min(it.sent for it in self.requests)

    @property
    def ttft(self) -> float:
        return median_low(it.ttft for it in self.requests)  # a p50 as the simulator tells it

    @property
    def tpot(self) -> float:
        return median_low(it.tpot for it in self.requests if it.tokens > 1)


async def play(state: StateDir, script: Script, vocabulary: int, seed: int) -> Play:
    """Send the script's requests with random tokens, wait until nothing of them is left anywhere, and read what was noted."""
    addresses, drawn = state.addresses(), random.Random(seed)
    name = f"{script.name}-{secrets.token_hex(4)}"
    waiting, played = deque(enumerate(script.requests)), dict[int, Played]()
    async with Client(addresses["prefill-0"]["scheduler"]) as client:
        before = [await _totals(client, addresses, name) for name in ("prefill", "decode")]

        async def lane(led: asyncio.Event | None = None) -> None:
            while waiting:
                number, (prompt_tokens, output_tokens) = waiting.popleft()
                prompt = [drawn.randrange(vocabulary - SPECIAL_IDS) for _ in range(prompt_tokens)]
                played[number] = await _one(client, f"{name}-{number}", prompt, output_tokens, led)

        cpu = processor_seconds(state)
        async with asyncio.TaskGroup() as group:
            led = asyncio.Event()
            group.create_task(lane(led))
            await led.wait()
            for _ in range(script.at_once - 1):
                group.create_task(lane())
        cpu = {name: seconds - cpu[name] for name, seconds in processor_seconds(state).items()}
        after = await _settled(client, addresses, before, len(script.requests))
    for number, it in played.items():
        it.ledger = await _ended(f"{name}-{number}", addresses["redis"])
    prefill, decode = ({name: count - old[name] for name, count in new.items()} for old, new in zip(before, after, strict=True))
    return Play([played[number] for number in sorted(played)], prefill, decode, cpu)


async def message_seconds(state: StateDir) -> float:
    """How long a message to a scheduler takes, one way."""
    addresses = state.addresses()
    async with Client(addresses["prefill-0"]["scheduler"]) as client:
        times: list[float] = []
        for _ in range(CALLS):
            began = time.perf_counter()
            await client.inspect()
            times.append(time.perf_counter() - began)
    return median(times) / 2


async def _one(client: Client, request_id: str, prompt: Sequence[int], output_tokens: int, led: asyncio.Event | None) -> Played:
    """`led` is set when it has its first token."""
    sampling = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    it = Played(len(prompt), time.perf_counter())
    stream = await client.submit(prompt, sampling, request_id=request_id)
    async for event in stream:
        it.finished = time.perf_counter()
        if isinstance(event, Finished):
            it.tokens = event.completion_tokens
        elif not it.first:
            it.first = it.finished
            if led is not None:
                led.set()
    return it


def processor_seconds(state: StateDir) -> dict[str, float]:
    """What each kind of process, all ranks together, has used of processors since its start."""
    used: dict[str, float] = defaultdict(float)
    for name, pid in state.processes().items():
        engine, _, process = name.partition(".")
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used[f"{engine}.{process.partition('-')[0]}"] += (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return dict(used)


async def _totals(client: Client, addresses: dict[str, dict[str, str]], role: str) -> Counter[str]:
    found = await client.inspect(f"{role}-scheduler", addresses[f"{role}-0"]["scheduler"])
    return Counter(found.totals)


async def _settled(
    client: Client, addresses: dict[str, dict[str, str]], before: Sequence[Counter[str]], requests: int
) -> list[Counter[str]]:
    """Both schedulers' totals once they are rid of all requests and count no further. MeshError if that takes too long."""
    last: list[Counter[str]] = []
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        found = [await _totals(client, addresses, role) for role in ("prefill", "decode")]
        gone = found[0]["requests_handed_over"] - before[0]["requests_handed_over"]
        if found == last and gone == requests:
            return found
        last = found
        await asyncio.sleep(LOOK_S)
    raise MeshError(f"the mesh still counts {SETTLE_S:g} s after the last answer: {[dict(it) for it in last]}")


async def _ended(request_id: str, redis_url: str) -> inspect.Entry:
    """A request's record once its journal, which is written behind, has its end."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        try:
            entry, _ = await asyncio.to_thread(inspect.read, request_id, redis_url)
        except NotFound:
            entry = {}
        if "bytes_sent" in entry and "rounds" in entry:
            return entry
        await asyncio.sleep(LOOK_S)
    raise MeshError(f"the ledger has no end of {request_id} after {SETTLE_S:g} s")
