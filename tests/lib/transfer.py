"""Transfer agents as real processes, and what stands around one in a test: its worker (the worker's own pools and socket end)
and its scheduler.
"""

import asyncio
import json
import mmap
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import numpy as np

from k3mesh.v1 import common_pb2, request_pb2, transfer_pb2, transfer_pb2_grpc
from services.contracts import barriers
from services.contracts.geometry import PAGED, Geometry, blocks_for
from services.contracts.ids import BLOCK_TOKENS, BlockId, RequestId, Room, SlotId
from services.contracts.model import ModelConfig, parse_model_config
from services.contracts.placement import Manifest, Placement, place
from services.contracts.topology import Topology, even_partition
from services.runtime import wire
from services.runtime.channels import open_channel
from tests.lib.k3 import CONFIG

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
EPOCHS = {"prefill": 11, "decode": 22}
SMALL = dict(frame_bytes=64 << 10, frames=8, window=4, piece_bytes=40 << 10)


# ---- records
@cache
def model() -> ModelConfig:
    """Six layers, MLA at 2 and 5: a block of 36 KiB, recurrent state of 8 KiB."""
    small = dict(num_hidden_layers=6, kv_lora_rank=48, qk_rope_head_dim=24, attn_res_block_size=3)
    linear = dict(num_heads=2, head_dim=32, short_conv_kernel_size=4, gate_lower_bound=-5.0)
    linear |= dict(full_attn_layers=[3, 6], kda_layers=[1, 2, 4, 5])
    return parse_model_config(CONFIG | small | {"linear_attn_config": linear}, "small K3")


def record(
    role: str,
    stage: int = 0,
    *,
    stages: int = 2,
    partition: tuple[int, ...] = (),
    tp: int = 0,
    dp: int = 0,
    dp_size: int = 1,
    **changes: Any,
) -> Placement:
    """The placement record of one rank; attention tensor-parallel size 1."""
    layers = (partition or even_partition(6, stages)) if role == "prefill" else (6,)
    topology = Topology(role, len(layers), dp_size, 1, dp_size, 6, layers)
    given: dict[str, Any] = dict(
        engine_id=f"{role}-0", engine_epoch=EPOCHS[role], model_fingerprint="m", verify_width=1,
        num_blocks=changes.pop("num_blocks", 24), num_slots=changes.pop("num_slots", 6),
    )  # fmt: skip
    geometry = Geometry(model(), topology, "float32", changes.pop("draft_layers", 0))
    made = place(geometry, topology.place_of(topology.rank_of(stage, dp, tp)), **given)
    return replace(made, **changes)


def manifest(room: int = 7, prompt: int = 300, prefix: int = 0, **changes: Any) -> Manifest:
    """For the record of `decode`: blocks from 3 on, slot 2."""
    count = blocks_for(prompt) - prefix // BLOCK_TOKENS
    given: dict[str, Any] = dict(
        request_id=RequestId(f"r{room}"), room=Room(room), attempt=1, decode_epoch=EPOCHS["decode"], replica=0,
        prefix_tokens=prefix, prompt_tokens=prompt, prompt_hash=b"h", blocks=tuple(BlockId(3 + n) for n in range(count)),
        block_gens=(1,) * count, slot=SlotId(2), slot_gen=5, timeout=60.0,
    )  # fmt: skip
    return Manifest(**(given | changes))


# ---- processes
@dataclass
class AgentProcess:
    """One agent with its worker and its scheduler. `reports` are all that it told the scheduler after its hello."""

    placement: Placement
    address: str
    process: asyncio.subprocess.Process
    pools: "Pools"
    worker: Any  # services.worker.cache.export.AgentLink
    stub: transfer_pb2_grpc.TransferControlStub
    drive: Any
    hello: transfer_pb2.AgentHello
    socket: str
    reports: list[transfer_pb2.AgentReport] = field(default_factory=list)
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    heard: Callable[[transfer_pb2.AgentReport | None], None] | None = None  # of each report; of None at the end of the stream

    async def damage(self, kind: str) -> None:
        """What is done to the next frame that this agent sends (tests.lib.agent_process)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{kind}\n".encode())
        while await self.process.stdout.readline() not in (b"armed\n", b""):
            pass

    async def until_damaged(self) -> None:
        """That frame's turn has come."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while await self.process.stdout.readline() not in (b"done\n", b""):
                pass

    async def command(self, **command: Any) -> None:
        async with self.writing:  # a gRPC stream takes one write at a time
            await self.drive.write(transfer_pb2.AgentCommand(fence=1, **command))

    async def cancel(self, room: int, reason: str = "test") -> None:
        await self.command(cancel=request_pb2.CancelRoom(room=room, reason=reason))

    async def until(self, kind: str, room: int | None = None) -> Any:
        """The report of this kind (and room), as soon as it is there."""

        def found() -> Any:
            for report in self.reports:
                inner = getattr(report, kind)
                if report.WhichOneof("report") == kind and (room is None or inner.room == room):
                    return inner
            return None

        async with asyncio.timeout(DEADLINE_S), self.grown:
            await self.grown.wait_for(lambda: found() is not None or self.drive.done())
        assert found() is not None, f"the agent ended without {kind}; it said {self.reports}"
        return found()

    def told(self, kind: str, room: int) -> int:
        """How often it said this of a room."""
        return sum(report.WhichOneof("report") == kind and getattr(report, kind).room == room for report in self.reports)

    async def inspect(self) -> common_pb2.InspectReply:
        return await self.stub.Inspect(common_pb2.InspectRequest(), timeout=10)

    async def until_counters(self, wanted: Callable[[dict[str, int]], bool]) -> None:
        await self.until_inspected(lambda reply: wanted(dict(reply.counters)))

    async def until_inspected(self, wanted: Callable[[common_pb2.InspectReply], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not wanted(await self.inspect()):
                await asyncio.sleep(0.02)

    @property
    def mover(self) -> int:
        """The process that moves this agent's frames."""
        parent = f" {self.process.pid} "
        (found,) = [it for it in Path("/proc").glob("[0-9]*/stat") if it.read_text().rpartition(") ")[2][1:].startswith(parent)]
        return int(found.parent.name)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def listen(self) -> None:
        with suppress(grpc.aio.AioRpcError):  # the agent died; drive.done() says so
            while (report := await self.drive.read()) is not grpc.aio.EOF:
                async with self.grown:
                    self.reports.append(report)
                    self.grown.notify_all()
                if self.heard is not None:
                    self.heard(report)
        async with self.grown:
            self.grown.notify_all()
        if self.heard is not None:
            self.heard(None)


class Pools:
    """A rank's arenas as the worker has made them, and uint8 views [units, payload] of each field."""

    def __init__(self, placement: Placement):
        from services.worker.cache.pools import allocate  # torch, only where agents run

        self.placement = placement
        self.made = allocate(placement)
        maps = [np.frombuffer(mmap.mmap(fd, 0), np.uint8) for fd in self.made.fds]
        self.fields = [
            np.lib.stride_tricks.as_strided(
                maps[it.arena_id][it.offset :], (placement.units(it), it.payload), (it.unit_stride, 1)
            )
            for it in placement.fields
        ]  # fmt: skip

    def of(self, field_id: str) -> np.ndarray:
        return next(view for it, view in zip(self.placement.fields, self.fields, strict=True) if it.field_id == field_id)

    def snapshot(self) -> list[np.ndarray]:
        return [view.copy() for view in self.fields]


@asynccontextmanager
async def agent(
    placement: Placement, directory: Path, *, damage: str = "", as_rank: int | None = None, **limits: Any
) -> AsyncIterator[AgentProcess]:
    """A running agent whose worker has exported and whose scheduler has introduced itself. `as_rank`: what the agent is told
    to be, where it is not its worker's."""
    from services.worker.cache.export import AgentLink
    from tests.lib.ranks import free_address

    directory.mkdir(exist_ok=True)
    name = f"{placement.role}-{placement.global_rank}"
    path, address = directory / f"{name}.sock", free_address()
    rank = placement.global_rank if as_rank is None else as_rank
    options: dict[str, Any] = dict(engine_id=placement.engine_id, role=placement.role, rank=rank, listen=address)
    options |= dict(agent_socket=str(path), damage=damage, limits=SMALL | limits)
    log = (directory / f"{name}.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.lib.agent_process", json.dumps(options), cwd=ROOT, stderr=log,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "K3MESH_PARENT": str(os.getpid())},
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        stack.callback(log.close)
        stack.push_async_callback(_reap, process)
        pools = Pools(placement)
        stack.callback(pools.made.close)
        worker = await AgentLink.open(str(path), pools.made, DEADLINE_S)
        stack.callback(worker.close)
        channel = await stack.enter_async_context(open_channel(address))
        stub = transfer_pb2_grpc.TransferControlStub(channel)
        drive = stub.Drive(wait_for_ready=True)
        stack.callback(drive.cancel)
        await drive.write(transfer_pb2.AgentCommand(fence=1, introduce=transfer_pb2.IntroduceAgent(scheduler="test")))
        hello = (await drive.read()).hello
        made = AgentProcess(placement, hello.peer_address, process, pools, worker, stub, drive, hello, str(path))
        listening = asyncio.ensure_future(made.listen())
        stack.push_async_callback(_cancel, listening)
        yield made


async def until_gone(pid: int) -> None:
    """The process, which need not be a child of this one, has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)


async def _reap(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])


# ---- a prefill engine of some stages, and decode replicas of one rank each
@dataclass
class Mesh:
    stages: Sequence[AgentProcess]
    replicas: Sequence[AgentProcess]
    random: Random = field(default_factory=lambda: Random(7))

    async def pair(self, decode: AgentProcess, epoch: int = EPOCHS["prefill"]) -> None:
        """Tell D to pair, and wait for its answer."""
        pair = transfer_pb2.PairWith(engine_id="prefill-0", engine_epoch=epoch)
        pair.agents.extend(stage.address for stage in self.stages)

        def answers() -> int:
            return sum(report.WhichOneof("report") in ("paired", "pair_refused") for report in decode.reports)

        before = answers()
        await decode.command(pair=pair)
        async with asyncio.timeout(DEADLINE_S), decode.grown:
            await decode.grown.wait_for(lambda: answers() > before or decode.drive.done())

    @property
    def agents(self) -> list[AgentProcess]:
        return [*self.stages, *self.replicas]

    async def at_rest(self) -> None:
        """Every counter that belongs to requests is at its start, on all agents."""
        for it in self.agents:
            await it.until_counters(lambda counters: not any(v for key, v in counters.items() if key != "links"))


@asynccontextmanager
async def mesh(directory: Path, *, stages: int = 2, replicas: int = 1, damage: str = "", **limits: Any) -> AsyncIterator[Mesh]:
    """Agents of a prefill engine and of decode replicas, paired. Damage is done to what stage 0 sends."""
    records = [record("prefill", stage, stages=stages) for stage in range(stages)]
    records += [record("decode", dp=dp, dp_size=replicas) for dp in range(replicas)]
    async with AsyncExitStack() as stack:
        entered = await asyncio.gather(
            *(stack.enter_async_context(agent(it, directory, damage=damage, **limits)) for it in records)
        )
        made = Mesh(entered[:stages], entered[stages:])
        for decode in made.replicas:
            await made.pair(decode)
            await decode.until("paired")
        yield made


@dataclass
class Handoff:
    """One request, played step by step by both schedulers and the prefill workers."""

    mesh: Mesh
    decode: AgentProcess
    manifest: Manifest
    table: list[int]  # P's block ids by logical block
    slot: int  # P's
    chunk_tokens: int = 256
    interval: int = 1  # producer steps to a barrier; 0: one at the end of each chunk
    cached: int = 0  # tokens that P has in its own prefix cache
    position: int = -1
    step: int = 0

    @property
    def room(self) -> int:
        return self.manifest.room

    async def expect(self) -> None:
        await self.decode.command(expect=wire.manifest(self.manifest))

    async def ready(self) -> None:
        for stage in self.mesh.stages:
            await stage.until("ready", self.room)

    def chunks(self) -> list[tuple[int, int]]:
        starts = range(self.cached, self.manifest.prompt_tokens, self.chunk_tokens)
        return [(start, min(start + self.chunk_tokens, self.manifest.prompt_tokens)) for start in starts]

    def prefill(self, chunks: Sequence[tuple[int, int]] | None = None) -> None:
        """Run chunks on all stages: write each step's fields, then pass its barrier."""
        for start, end in self.chunks() if chunks is None else chunks:
            last = end == self.manifest.prompt_tokens
            known = blocks_for(start) if start != self.cached else 0
            new = self.table[known : blocks_for(end)]
            for stage in self.mesh.stages:
                self._run(stage, start, end, last, new)

    def _run(self, stage: AgentProcess, start: int, end: int, last: bool, new: list[int]) -> None:
        step_id = STEPS.setdefault(id(stage), 0) + 1
        STEPS[id(stage)] = step_id
        steps = stage.placement.producer_steps
        stage.worker.post(
            barriers.ChunkStarted(step_id, (barriers.LocalRow(self.room, start, end, last, self.slot, tuple(new)),))
        )
        interval = self.interval or len(steps)
        for lo in range(0, len(steps), interval):
            hi = min(lo + interval, len(steps))
            for index in (index for step in steps[lo:hi] for index in step):
                units = self.table[start // BLOCK_TOKENS : blocks_for(end)]
                self.fill(stage, index, units if stage.placement.fields[index].kind == PAGED else [self.slot])
            stage.worker.post(barriers.FieldsReady(step_id, lo, hi))
        if last and stage is self.mesh.stages[-1]:
            stage.worker.post(barriers.HandoffReady(self.room, barriers.Handoff(self.token, (self.token,), self.cached)))

    @property
    def token(self) -> int:
        return self.room % 1000

    def fill(self, stage: AgentProcess, index: int, units: Sequence[int]) -> None:
        for unit in units:
            content = self.mesh.random.randbytes(stage.placement.fields[index].payload)
            stage.pools.fields[index][unit] = np.frombuffer(content, np.uint8)

    def fill_cached(self) -> None:
        """What P has in its prefix cache is complete before the request comes."""
        for stage in self.mesh.stages:
            for index, it in enumerate(stage.placement.fields):
                if it.kind == PAGED:
                    self.fill(stage, index, self.table[: self.cached // BLOCK_TOKENS])

    def scribble(self) -> None:
        """P reuses the request's memory at once."""
        for stage in self.mesh.stages:
            for view, it in zip(stage.pools.fields, stage.placement.fields, strict=True):
                view[self.table if it.kind == PAGED else [self.slot]] = 0xEE

    def expected(self, before: list[np.ndarray]) -> list[np.ndarray]:
        """D's pools as they must be afterwards: the room's units are P's, everything else is as before."""
        wanted = [view.copy() for view in before]
        for index, it in enumerate(self.decode.placement.fields):
            stage = next(s for s in self.mesh.stages if any(f.field_id == it.field_id for f in s.placement.fields))
            source = stage.pools.of(it.field_id)
            if it.kind == PAGED:
                first = self.manifest.first_block
                wanted[index][list(self.manifest.blocks)] = source[self.table[first : first + len(self.manifest.blocks)]]
            else:
                wanted[index][self.manifest.slot] = source[self.slot]
        return wanted

    async def finish(self) -> transfer_pb2.RankReady:
        ready = await self.decode.until("rank_ready", self.room)
        for stage in self.mesh.stages:
            await stage.until("released", self.room)
        return ready


GENERATIONS = count(1)  # of any unit; an allocator's go up as well
STEPS: dict[int, int] = {}  # the last step id of each prefill agent's worker


def handoff(mesh: Mesh, decode: AgentProcess, room: int, **changes: Any) -> Handoff:
    """A random request: prompt, prefix, chunk size, blocks and slots on both sides, all over again for each room."""
    random = mesh.random
    prompt = changes.pop("prompt", random.randint(1, 12 * BLOCK_TOKENS))
    prefix = changes.pop("prefix", random.randrange(blocks_for(prompt)) * BLOCK_TOKENS)
    blocks = changes.pop("blocks", None) or random.sample(range(1, decode.placement.num_blocks), blocks_for(prompt))
    blocks = blocks[: blocks_for(prompt) - prefix // BLOCK_TOKENS]
    wanted = manifest(
        room, prompt, prefix, blocks=tuple(map(BlockId, blocks)), block_gens=tuple(next(GENERATIONS) for _ in blocks),
        slot=SlotId(changes.pop("slot", random.randrange(1, decode.placement.num_slots))), slot_gen=next(GENERATIONS),
        replica=decode.placement.dp_rank, **changes.pop("manifest", {}),
    )  # fmt: skip
    source = mesh.stages[0].placement
    return Handoff(
        mesh,
        decode,
        wanted,
        changes.pop("table", None) or random.sample(range(1, source.num_blocks), blocks_for(prompt)),
        changes.pop("p_slot", random.randrange(1, source.num_slots)),
        chunk_tokens=random.choice((128, 256, 512)),
        interval=random.choice((0, 1, 2, 3, 9)),
        cached=changes.pop("cached", random.randrange(blocks_for(prompt)) * BLOCK_TOKENS),
        **changes,
    )
