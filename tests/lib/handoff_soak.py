"""Random handoffs between real agents, under faults, with the schedulers' allocators: what must hold after each of them.

A unit that nobody holds is filled with a canary, on both sides: what is read from P too late, or written to D too late, shows.
"""

import asyncio
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import xxhash

from k3mesh.v1 import transfer_pb2
from services.contracts.geometry import PAGED, blocks_for
from services.contracts.ids import BLOCK_TOKENS, BlockId, SlotId
from services.scheduler.blocks import BlockAllocator
from services.scheduler.slots import SlotAllocator
from tests.lib.transfer import AgentProcess, Handoff, Mesh, agent, manifest, record

BLOCKS, SLOTS = 64, 9
CANARY, LONGEST = 0xA5, 12  # byte of free units; blocks of the longest prompt
TIMEOUT_S, SLACK_S = 30.0, 15.0  # of a request, and what a busy machine may add to it
FRAME_FAULTS = ("flip", "truncate", "extend", "drop", "delay", "reorder", "duplicate", "late", "reset")
AGENT_FAULTS = ("kill P", "kill D", "stop P", "stop D")
STATES = ("expected", "accepted", "first chunk", "all but the token", "done")
ENDS = {"drained", "released", "rank_ready"}


@dataclass
class Pool:
    """One engine's units, as its scheduler gives them out. P's stages share the ids; D has a pool for each replica."""

    agents: Sequence[AgentProcess]
    blocks: BlockAllocator = field(default_factory=lambda: BlockAllocator(BLOCKS))
    slots: SlotAllocator = field(default_factory=lambda: SlotAllocator(SLOTS))

    def __post_init__(self) -> None:
        self._fill(range(1, BLOCKS), range(1, SLOTS))

    def take(self, count: int, random: Random) -> tuple[list[BlockId], SlotId] | None:
        """Free units, which nobody has touched since they were given back."""
        if self.blocks.free_count < count or not self.slots.free_count:
            return None
        blocks, slot = self.blocks.allocate(count), self.slots.allocate()
        assert blocks is not None and slot is not None
        random.shuffle(blocks)
        self.check_untouched(blocks, [slot])
        return blocks, slot

    def give_back(self, blocks: list[BlockId], slot: SlotId) -> None:
        self._fill(blocks, [slot])
        self.blocks.free(blocks)
        self.slots.free(slot)

    def check_untouched(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for it in self.agents:
            for view, place in zip(it.pools.fields, it.placement.fields, strict=True):
                units = view[list(blocks if place.kind == PAGED else slots)]
                assert (units == CANARY).all(), f"{it.placement.name}: {place.field_id} was written while it was free"

    def check_empty(self) -> None:
        assert not self.blocks.used and not self.slots.used, "units leak"
        self.check_untouched(range(1, BLOCKS), range(1, SLOTS))

    def _fill(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for it in self.agents:
            for view, place in zip(it.pools.fields, it.placement.fields, strict=True):
                view[list(blocks if place.kind == PAGED else slots)] = CANARY


class Soak:
    """A mesh whose agents may be killed and started again, and the rooms that go through it."""

    def __init__(self, directory: Path, partition: tuple[int, ...], seed: int, replicas: int = 2, **limits: Any):
        self.seed, self.random = seed, Random(seed)
        self.name = f"seed {seed}, stages of {partition} layers"
        self.outcomes: Counter[tuple[str, str]] = Counter()  # fault, outcome
        self.bytes = 0
        self._directory, self._partition, self._replicas, self._limits = directory, partition, replicas, limits
        self._stacks: dict[int, AsyncExitStack] = {}
        self._lives, self._rooms = 0, 0
        self._told: defaultdict[int, set[tuple[int, str]]] = defaultdict(set)  # room -> (agent, kind of report)
        self._bells: dict[int, asyncio.Event] = {}
        self._dead: set[int] = set()  # agents that are gone
        self._freed = asyncio.Event()

    # ---- engines
    async def start(self) -> None:
        await self._start_prefill()
        self._d: list[AgentProcess] = []
        self._d_pools: list[Pool] = []
        for replica in range(self._replicas):
            await self._start_decode(replica)

    async def _start_prefill(self) -> None:
        self._lives += 1
        self._p_epoch = 1000 + self._lives
        records = [
            record("prefill", stage, partition=self._partition, draft_layers=1, engine_epoch=self._p_epoch,
                   num_blocks=BLOCKS, num_slots=SLOTS)
            for stage in range(len(self._partition))
        ]  # fmt: skip
        self._p = await asyncio.gather(*map(self._start, records))
        self._p_pool = Pool(self._p)

    async def _start_decode(self, replica: int) -> None:
        self._lives += 1
        made = record("decode", dp=replica, dp_size=self._replicas, draft_layers=1, engine_epoch=1000 + self._lives,
                      num_blocks=BLOCKS, num_slots=SLOTS)  # fmt: skip
        it = await self._start(made)
        self._d[replica : replica + 1] = [it]
        self._d_pools[replica : replica + 1] = [Pool([it])]
        await self._pair(it)

    async def _start(self, placement: Any) -> AgentProcess:
        stack = AsyncExitStack()
        directory = self._directory / f"life-{self._lives}"
        it = await stack.enter_async_context(agent(placement, directory, **self._limits))
        self._stacks[id(it)] = stack
        it.heard = lambda report: self._heard(it, report)
        return it

    async def _pair(self, decode: AgentProcess) -> None:
        await Mesh(self._p, [decode]).pair(decode, epoch=self._p_epoch)
        assert decode.reports[-1].WhichOneof("report") == "paired", decode.reports[-1]

    async def close(self) -> None:
        for stack in self._stacks.values():
            await stack.aclose()

    def _heard(self, it: AgentProcess, report: transfer_pb2.AgentReport | None) -> None:
        if report is None:
            self._dead.add(id(it))
            bells = list(self._bells.values())
        else:
            kind = report.WhichOneof("report") or ""
            room = getattr(getattr(report, kind), "room", None)
            if room is None:
                return
            self._told[room].add((id(it), kind))
            bells = [self._bells[room]] if room in self._bells else []
        for bell in bells:
            bell.set()

    # ---- one request
    async def request(self, fault: str, stop: str = "") -> None:
        """From its reservation to the last unit given back. `stop`: the state in which somebody cancels it."""
        random = self.random
        self._rooms += 1
        room = self._rooms
        replica = random.randrange(self._replicas)
        prompt = random.randint(1, LONGEST * BLOCK_TOKENS)
        prefix, cached = (random.randrange(blocks_for(prompt)) * BLOCK_TOKENS for _ in range(2))
        p_pool, stages, decode, d_pool = self._p_pool, list(self._p), self._d[replica], self._d_pools[replica]
        table, p_slot = await self._take(p_pool, blocks_for(prompt))
        blocks, slot = await self._take(d_pool, blocks_for(prompt) - prefix // BLOCK_TOKENS)
        wanted = manifest(
            room, prompt, prefix, blocks=tuple(blocks), block_gens=tuple(map(d_pool.blocks.generation, blocks)), slot=slot,
            slot_gen=d_pool.slots.generation(slot), decode_epoch=decode.placement.engine_epoch, replica=replica,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        it = Handoff(
            Mesh(stages, [decode], random), decode, wanted, [int(block) for block in table], p_slot, cached=cached,
            chunk_tokens=random.choice((128, 256, 384, 1024)), interval=random.choice((0, 1, 2, 3, 9)),
        )  # fmt: skip
        self._bells[room] = asyncio.Event()
        try:
            async with asyncio.timeout(TIMEOUT_S + SLACK_S):
                outcome = await self._play(it, stop)
        except TimeoutError:
            raise AssertionError(f"room {room} ({fault}) hangs; {self._who_says_what(it)}") from None
        finally:
            del self._bells[room]
        self.outcomes[fault, outcome] += 1
        if not any(map(self._gone, stages)):  # memory of an engine that is lost goes with it
            p_pool.give_back(table, p_slot)
        if not self._gone(decode):
            d_pool.give_back(blocks, slot)
        self._freed.set()

    async def _take(self, pool: Pool, count: int) -> tuple[list[BlockId], SlotId]:
        while (held := pool.take(count, self.random)) is None:
            self._freed.clear()
            await self._freed.wait()
        return held

    async def _play(self, it: Handoff, stop: str) -> str:
        room, everyone = it.room, [it.decode, *it.mesh.stages]
        it.fill_cached()
        await it.expect()
        await self._cancel_if(it, stop == "expected")
        await self._until(room, lambda: self._broken(it) or all(self._said(s, room, "ready") for s in it.mesh.stages))
        await self._cancel_if(it, stop == "accepted")
        for number, chunk in enumerate(it.chunks()):
            if self._broken(it):
                break
            if chunk[1] == it.manifest.prompt_tokens:
                await self._cancel_if(it, stop == "all but the token")
            it.prefill([chunk])
            await self._cancel_if(it, stop == "first chunk" and number == 0)
            await asyncio.sleep(0)
        await self._until(room, lambda: self._broken(it) or self._said(it.decode, room, "rank_ready"))
        await self._cancel_if(it, stop == "done" or self._broken(it))
        await self._until(room, lambda: all(self._gone(a) or self._ended(a, room) for a in everyone))
        if not self._gone(it.decode) and self._said(it.decode, room, "rank_ready"):
            self.bytes += self._check_equal(it)
            return "ready"
        return "failed" if any(self._said(a, room, "failed") for a in everyone) else "cancelled"

    async def _cancel_if(self, it: Handoff, wanted: bool) -> None:
        """As schedulers do: whoever begins, both engines tell all of their agents."""
        if wanted:
            everyone = [it.decode, *it.mesh.stages]
            self.random.shuffle(everyone)
            for a in everyone:
                if not self._gone(a):
                    await a.cancel(it.room)

    async def _until(self, room: int, condition: Callable[[], bool]) -> None:
        while not condition():
            self._bells[room].clear()
            await self._bells[room].wait()

    def _said(self, it: AgentProcess, room: int, *kinds: str) -> bool:
        return any((id(it), kind) in self._told[room] for kind in kinds)

    def _ended(self, it: AgentProcess, room: int) -> bool:
        return self._said(it, room, *ENDS)

    def _gone(self, it: AgentProcess) -> bool:
        return id(it) in self._dead

    def _broken(self, it: Handoff) -> bool:
        everyone = [it.decode, *it.mesh.stages]
        return any(self._gone(a) or self._said(a, it.room, "failed", "drained") for a in everyone)

    def _check_equal(self, it: Handoff) -> int:
        """A hash of every field on P and on D -> bytes that were compared."""
        compared = 0
        first, count = it.manifest.first_block, len(it.manifest.blocks)
        for stage in it.mesh.stages:
            for place, source in zip(stage.placement.fields, stage.pools.fields, strict=True):
                paged = place.kind == PAGED
                theirs = source[it.table[first : first + count] if paged else [it.slot]]
                ours = it.decode.pools.of(place.field_id)[list(it.manifest.blocks) if paged else [it.manifest.slot]]
                assert _hash(ours) == _hash(theirs), f"room {it.room:x}: {place.field_id} differs"
                compared += ours.nbytes
        return compared

    def _who_says_what(self, it: Handoff) -> str:
        everyone = [it.decode, *it.mesh.stages]
        told = {a.placement.name: [kind for who, kind in self._told[it.room] if who == id(a)] for a in everyone}
        return f"{told}, gone: {[a.placement.name for a in everyone if self._gone(a)]}"

    # ---- faults
    async def batch(self, fault: str, size: int = 3) -> None:
        """Requests at once, one fault among them."""
        stage = self.random.choice(self._p)
        side = self.random.randrange(self._replicas)
        if fault in FRAME_FAULTS:
            await stage.damage(fault)
        elif fault in AGENT_FAULTS:
            await stage.damage("hold")
        elif fault == "cancel: while delayed":
            await stage.damage("delay")
        stop = fault.removeprefix("cancel: ").replace("while delayed", "first chunk") if fault.startswith("cancel: ") else ""
        async with asyncio.TaskGroup() as group:
            for number in range(size):
                group.create_task(self.request(fault, stop if number == 0 else ""))
            if fault in AGENT_FAULTS:
                await self._strike(fault, stage, side)
        await self._revive()

    async def _revive(self) -> None:
        """Start lost engines again, as the supervisor does; also one whose scheduler has lost a stopped agent's stream."""
        if any(map(self._gone, self._p)):
            for it in self._p:
                await self._end(it)
            await self._start_prefill()
            await asyncio.gather(*(self._pair(it) for it in self._d if not self._gone(it)))
        for replica, it in enumerate(self._d):
            if self._gone(it):
                await self._end(it)
                await self._start_decode(replica)
        for it in self._d:
            await it.until_counters(lambda counters: counters["links"] == len(self._p))

    async def _strike(self, fault: str, stage: AgentProcess, replica: int) -> None:
        """In the middle of a frame: it was granted and is held back."""
        await stage.until_damaged()
        victim = stage if fault.endswith("P") else self._d[replica]
        if fault.startswith("kill"):
            await victim.kill()
        else:
            victim.process.send_signal(signal.SIGSTOP)
            try:
                await self._until_missed(victim)
            finally:
                victim.process.send_signal(signal.SIGCONT)

    async def _until_missed(self, victim: AgentProcess) -> None:
        """Its peers have given it up."""
        peers = self._d if victim in self._p else self._p
        links = 0 if victim in self._p else self._replicas - 1
        for it in peers:
            if not self._gone(it):
                await it.until_counters(lambda counters: counters["links"] <= links)

    async def _end(self, it: AgentProcess) -> None:
        if it.process.returncode is None:
            await it.kill()
        await self._stacks.pop(id(it)).aclose()
        self._dead.add(id(it))

    # ---- the end
    async def at_rest(self) -> None:
        """Nothing of any request is left, and what has not arrived is nowhere."""
        for it in (*self._p, *self._d):
            await it.until_counters(lambda counters: not any(v for key, v in counters.items() if key != "links"))
        for pool in (self._p_pool, *self._d_pools):
            pool.check_empty()
        for room, told in self._told.items():
            for who in {who for who, _ in told}:
                said = {kind for it, kind in told if it == who}
                assert not {"failed", "rank_ready"} <= said, f"room {room}: an agent says both {said}"


def _hash(units: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(units).data)
