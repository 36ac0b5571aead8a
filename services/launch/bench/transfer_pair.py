"""A prefill rank and a decode rank of K3 as far as a transfer needs them: pools, agents, and both ends that drive those."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import grpc.aio
import numpy as np
import torch

from k3mesh.errors import MeshError
from k3mesh.v1 import transfer_pb2, transfer_pb2_grpc
from services.contracts.barriers import ChunkStarted, FieldsReady, Handoff, HandoffReady, LocalRow
from services.contracts.geometry import PAGED, Geometry, blocks_for
from services.contracts.model import parse_model_config
from services.contracts.placement import Placement, place
from services.contracts.topology import Topology
from services.launch.bench.samples import Sample, cpu_seconds
from services.launch.child import Child
from services.launch.engine import AGENT, python_spec
from services.launch.make_checkpoint import k3_config
from services.launch.ports import free_ports
from services.launch.state import StateDir
from services.runtime import channels
from services.worker.cache.export import AgentLink
from services.worker.cache.pools import Pools, allocate

TP_SIZE, DRAFT_LAYERS, VERIFY_WIDTH = 8, 5, 8  # the deployment's: DSpark with seven proposals
DEADLINE_S = 120.0  # for any single thing that is waited for
END_S = 2.0  # in which a process whose connections broke is seen to have ended
EMPTY = 0xFF  # of D's bytes before a transfer
EPOCHS = {"prefill": 1, "decode": 2}
CPU = torch.device("cpu")


def k3_placement(role: str, tokens: int, requests: int = 1) -> Placement:
    """The record of a rank that holds all of K3's layers, with room for so many requests of `tokens`."""
    model = parse_model_config(k3_config(), "K3")
    layers = model.num_hidden_layers
    topology = Topology(role, 1, 1, TP_SIZE, TP_SIZE, layers, (layers,))
    return place(
        Geometry(model, topology, "bfloat16", DRAFT_LAYERS), topology.place_of(0), engine_id=f"{role}-0",
        engine_epoch=EPOCHS[role], model_fingerprint="k3", draft_fingerprint="dspark",
        num_blocks=requests * blocks_for(tokens) + 1, num_slots=requests + 1, verify_width=VERIFY_WIDTH,
        speculative_algorithm="DSPARK",
    )  # fmt: skip


async def cause(agent: Child, error: MeshError) -> MeshError:
    """The end of the agent, if that is what is behind the error."""
    try:
        async with asyncio.timeout(END_S):
            await agent.ended.wait()
    except TimeoutError:
        return error
    return agent.failure()


@dataclass(slots=True)
class Rank:
    """One rank: its pools, its agent's process, the worker's line to that agent, and the scheduler's."""

    placement: Placement
    pools: Pools
    agent: Child
    worker: AgentLink
    drive: Any  # of TransferControl
    address: str  # of TransferControl
    peer_address: str = ""  # where decode agents link to

    @classmethod
    @asynccontextmanager
    async def run(
        cls, state: StateDir, placement: Placement, device: torch.device, frame_bytes: int, frames: int
    ) -> AsyncIterator["Rank"]:
        role = placement.role
        listen, path = f"127.0.0.1:{free_ports(1)[0]}", str(state.run / f"{role}.sock")
        flags = [
            *("--model", "k3", "--disaggregation-mode", role, "--attn-tp-size", str(TP_SIZE)),
            *("--rank", "0", "--listen", listen, "--agent-socket", path),
            *("--transfer-frame-bytes", str(frame_bytes), "--transfer-frames", str(frames)),
        ]
        async with AsyncExitStack() as stack:
            pools = allocate(placement, device)
            stack.callback(pools.close)
            agent = Child(python_spec(f"{role}-agent", "services.kvtransfer.main", flags, AGENT), state)
            stack.push_async_callback(agent.stop)
            await agent.start()
            try:
                worker = await AgentLink.open(path, pools, DEADLINE_S)
            except MeshError as error:
                raise await cause(agent, error) from None
            stack.callback(worker.close)
            channel = await stack.enter_async_context(channels.open_channel(listen))
            drive: Any = transfer_pb2_grpc.TransferControlStub(channel).Drive(wait_for_ready=True)
            stack.callback(drive.cancel)
            rank = cls(placement, pools, agent, worker, drive, listen)
            await rank.command(introduce=transfer_pb2.IntroduceAgent(scheduler="bench"))
            rank.peer_address = (await rank.until("hello")).peer_address
            yield rank

    async def command(self, **command: Any) -> None:
        await self.drive.write(transfer_pb2.AgentCommand(fence=1, **command))

    async def until(self, *kinds: str) -> Any:
        """The agent's next report, which is to be of one of these kinds. MeshError if it is not, or if there is none."""
        kind = " or ".join(kinds)
        try:
            async with asyncio.timeout(DEADLINE_S):
                report = await self.drive.read()
        except TimeoutError:
            raise MeshError(f"{self.placement.name}: its agent reported no {kind} within {DEADLINE_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise await cause(self.agent, channels.translate(error, f"the agent of {self.placement.name}")) from error
        if not isinstance(report, transfer_pb2.AgentReport):
            raise MeshError(f"{self.placement.name}: its agent ended before it reported {kind}")
        found = report.WhichOneof("report")
        if found not in kinds:
            raise MeshError(f"{self.placement.name}: its agent reported {str(report).strip()} where {kind} was due")
        return getattr(report, found)

    def cpu_seconds(self) -> float:
        assert self.agent.pid is not None
        return cpu_seconds(self.agent.pid)

    def field(self, index: int) -> torch.Tensor:
        """uint8 [units, payload] of a field of the record."""
        field = self.placement.fields[index]
        views: dict[int, torch.Tensor] = getattr(self.pools.caches, self.placement.arenas[field.arena_id].name)
        return views[field.layer].flatten(1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a round, and where it is on both sides. Its number in the round is its slot on both."""

    manifest: transfer_pb2.Manifest
    table: list[int]  # P's blocks
    blocks: list[int]  # D's
    slot: int


class Pair:
    """Two ranks, linked. `transfer` hands requests over."""

    def __init__(self, prefill: Rank, decode: Rank):
        self.prefill, self.decode = prefill, decode
        self._random = random.Random(1)
        self._rooms = 0

    @classmethod
    @asynccontextmanager
    async def run(
        cls,
        state: StateDir,
        tokens: int,
        frame_bytes: int,
        frames: int,
        requests: int = 1,
        devices: tuple[torch.device, torch.device] = (CPU, CPU),
    ) -> AsyncIterator["Pair"]:
        """`requests`: how many of `tokens` the pools hold."""
        async with AsyncExitStack() as stack:
            prefill, decode = [
                await stack.enter_async_context(
                    Rank.run(state, k3_placement(role, tokens, requests), device, frame_bytes, frames)
                )
                for role, device in zip(("prefill", "decode"), devices, strict=True)
            ]
            wanted = transfer_pb2.PairWith(engine_id="prefill-0", engine_epoch=EPOCHS["prefill"], agents=[prefill.peer_address])
            await decode.command(pair=wanted)
            await decode.until("paired")
            await asyncio.to_thread(_fill, prefill, decode)
            yield cls(prefill, decode)

    async def transfer(self, tokens: int, requests: int = 1, at_once: int = 1) -> Sample:
        """Hand requests over that the pools hold together, `at_once` of them under way at any time, clocked from the first
        one's last barrier to the last one's last byte. MeshError if a byte is not where it belongs afterwards."""
        round_ = self._draw(tokens, requests)
        rooms = {request.manifest.room: request for request in round_}
        waiting = iter(round_)
        for request in islice(waiting, at_once):
            await self.decode.command(expect=request.manifest)
        accepted = [rooms[(await self.prefill.until("ready")).room] for _ in range(min(at_once, requests))]
        cpu, began = self._cpu_seconds(), time.perf_counter()
        for request in accepted:
            self._prefill(request, tokens)

        async def play_prefill() -> None:
            for _ in range(2 * requests - len(accepted)):
                report = await self.prefill.until("ready", "released")
                if isinstance(report, transfer_pb2.RoomReady):
                    self._prefill(rooms[report.room], tokens)

        async def play_decode() -> tuple[float, int]:
            moved = 0
            for _ in range(requests):
                moved += (await self.decode.until("rank_ready")).bytes
                for request in islice(waiting, 1):
                    await self.decode.command(expect=request.manifest)
            return time.perf_counter() - began, moved

        played = await asyncio.gather(play_decode(), play_prefill(), return_exceptions=True)
        for failure in (it for it in played if isinstance(it, BaseException)):
            raise failure
        seconds, moved = cast("tuple[float, int]", played[0])
        sample = Sample(seconds, moved, self._cpu_seconds() - cpu)
        await asyncio.to_thread(_compare, self.prefill, self.decode, round_)
        return sample

    def _draw(self, tokens: int, requests: int) -> list[Request]:
        """Requests whose blocks are in random order, on either side."""
        count = blocks_for(tokens)
        tables, blocks = (
            self._random.sample(range(1, rank.placement.num_blocks), requests * count) for rank in (self.prefill, self.decode)
        )
        drawn: list[Request] = []
        for number in range(requests):
            self._rooms += 1
            room, here = self._rooms, slice(number * count, (number + 1) * count)
            manifest = transfer_pb2.Manifest(
                request_id=f"bench-{room}", room=room, attempt=1, decode_epoch=EPOCHS["decode"], prompt_tokens=tokens,
                blocks=blocks[here], block_gens=[room] * count, slot=number + 1, slot_gen=room,
                timeout_ms=int(DEADLINE_S * 1000),
            )  # fmt: skip
            drawn.append(Request(manifest, tables[here], blocks[here], number + 1))
        return drawn

    def _prefill(self, request: Request, tokens: int) -> None:
        """What P's worker says when it has written the request's cache."""
        room, worker = request.manifest.room, self.prefill.worker
        row = LocalRow(room, 0, tokens, True, request.slot, tuple(request.table))
        worker.post(ChunkStarted(room, (row,)))
        worker.post(FieldsReady(room, 0, len(self.prefill.placement.producer_steps)))
        worker.post(HandoffReady(room, Handoff(1, (1,) * VERIFY_WIDTH, 0)))

    def _cpu_seconds(self) -> float:
        return self.prefill.cpu_seconds() + self.decode.cpu_seconds()


def _fill(prefill: Rank, decode: Rank) -> None:
    """Give every unit of P bytes of its own, and take D's memory, so that no clock runs while pages are first touched."""
    content = torch.from_numpy(np.random.default_rng(1).integers(0, 256, prefill.placement.largest_unit, np.uint8))
    for index, field in enumerate(prefill.placement.fields):
        source = prefill.field(index)
        source[:] = content[: field.payload].to(source.device)
        number = (torch.arange(len(source)) << 16 | index).view(-1, 1).view(torch.uint8)
        source[:, :8] = number.to(source.device)
        decode.field(index).fill_(EMPTY)
    _finish(prefill, decode)


def _compare(prefill: Rank, decode: Rank, requests: Sequence[Request]) -> None:
    """MeshError if a unit of D is not the one of P; empties D's again."""
    for index, field in enumerate(prefill.placement.fields):
        source, target = prefill.field(index), decode.field(index)
        for request in requests:
            units = list(zip(request.table, request.blocks, strict=True)) if field.kind == PAGED else [(request.slot,) * 2]
            here, there = (torch.tensor(ids) for ids in zip(*units, strict=True))
            found = target[there.to(target.device)]
            wrong = (found != source[here.to(source.device)].to(target.device)).any(dim=1).cpu()
            for at in wrong.nonzero().flatten().tolist():
                unit, other = units[at]
                raise MeshError(
                    f"field {field.field_id}: unit {other} on the decode rank is not unit {unit} of the prefill rank"
                )
            target[there.to(target.device)] = EMPTY
    _finish(prefill, decode)


def _finish(*ranks: Rank) -> None:
    """What was asked of their devices has happened, as a barrier means; agents are other processes."""
    for rank in ranks:
        if (device := rank.field(0).device).type == "cuda":
            torch.cuda.synchronize(device)
