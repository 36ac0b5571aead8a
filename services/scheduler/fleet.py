"""An engine's workers and agents, as its scheduler drives them: one stream to each worker leader, one to each agent.

Whichever of them is lost, the engine is lost. What the streams carry is each scheduler's own.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc.aio

from k3mesh.errors import ConfigError, EngineLost, MeshError
from k3mesh.v1 import transfer_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.contracts.ids import GlobalRank, Room
from services.contracts.messages import Failure
from services.runtime.channels import open_channel
from services.scheduler import wire
from services.scheduler.block_keys import BlockKeys
from services.scheduler.streams import Drive

Hello = TypeVar("Hello", wire.WorkerHello, wire.AgentHello)


class EngineFleet:
    """`await start()` once; then `drive()` until something breaks, and everything else meanwhile.

    `worker_report` and `agent_report` read a report: a hello, a Failure of the peer, what the scheduler makes of it, or None.
    """

    def __init__(
        self,
        arguments: SchedulerArguments,
        fence: int,
        worker_report: Callable[[worker_pb2.WorkerReport], Any],
        agent_report: Callable[[GlobalRank, transfer_pb2.AgentReport], Any],
    ):
        self._arguments, self._fence = arguments, fence
        self._worker_report, self._agent_report = worker_report, agent_report
        self._channels: list[grpc.aio.Channel] = []
        role = arguments.disaggregation_mode
        self._leaders = range(0, arguments.world_size, arguments.attn_tp_size)
        self._workers = [
            Drive(f"{role} worker {rank} at {address}", self._open(worker_pb2_grpc.WorkerControlStub, address))
            for rank, address in zip(self._leaders, arguments.workers, strict=True)
        ]
        self._agents = [
            Drive(f"{role} agent {rank} at {address}", self._open(transfer_pb2_grpc.TransferControlStub, address))
            for rank, address in enumerate(arguments.agents)
        ]
        self._hello: wire.WorkerHello | None = None
        self.peer_addresses: tuple[str, ...] = ()  # of the agents, by global rank, where the other engine's agents link to

    @property
    def hello(self) -> wire.WorkerHello:
        """What all leaders agree on, with the smallest pools. After start()."""
        assert self._hello is not None
        return self._hello

    def block_keys(self) -> BlockKeys | None:
        """How cached blocks are named, by everything that their rows depend on beside the tokens. After start()."""
        arguments, hello = self._arguments, self.hello
        if not arguments.enable_prefix_caching:
            return None
        salt = (hello.model_fingerprint, hello.draft_fingerprint, arguments.compute_dtype, arguments.cache_dtype)
        return BlockKeys(*salt, tokens_ahead=1 if arguments.speculative_algorithm == "MTP" else 0)

    async def start(self) -> None:
        """Introduce ourselves to all of them. EngineLost if one does not answer in time, ConfigError if they disagree."""
        scheduler = f"{self._arguments.engine_id} {self._arguments.disaggregation_mode}-scheduler"
        firsts = [(drive, wire.introduce_worker(scheduler, self._fence)) for drive in self._workers]
        firsts += [(drive, wire.introduce_agent(scheduler, self._fence)) for drive in self._agents]
        met: dict[str, Any] = {}
        timeout = self._arguments.startup_timeout
        try:
            async with asyncio.timeout(timeout):
                await _introduce(firsts, met)
        except TimeoutError as error:
            silent = ", ".join(drive.peer for drive, _ in firsts if drive.peer not in met)
            raise EngineLost(f"no hello within --startup-timeout {timeout:g} s from {silent}; see their logs") from error
        workers = [_hello(drive, self._worker_report(met[drive.peer]), wire.WorkerHello) for drive in self._workers]
        agents = [
            _hello(drive, self._agent_report(GlobalRank(rank), met[drive.peer]), wire.AgentHello)
            for rank, drive in enumerate(self._agents)
        ]
        self._hello = self._agree(workers, agents)
        self.peer_addresses = tuple(hello.peer_address for hello in agents)

    async def drive(self, hear_worker: Callable[[Any], None], hear_agent: Callable[[GlobalRank, Any], None]) -> NoReturn:
        """Carry commands and reports. Ends by EngineLost when a worker or an agent is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                for drive in (*self._workers, *self._agents):
                    group.create_task(drive.write())
                for drive in self._workers:
                    group.create_task(self._hear_worker(drive, hear_worker))
                for rank, drive in enumerate(self._agents):
                    group.create_task(self._hear_agent(GlobalRank(rank), drive, hear_agent))
        except* MeshError as failures:
            raise failures.exceptions[0] from None
        raise AssertionError("streams end by EngineLost only")

    async def close(self) -> None:
        for drive in (*self._workers, *self._agents):
            drive.cancel()
        for channel in self._channels:
            await channel.close()

    def cancel_room(self, ranks: Iterable[GlobalRank], room: Room, reason: str) -> None:
        """Have the agents of these ranks end the room."""
        command = wire.cancel_command(room, reason, self._fence)
        for rank in ranks:
            self._agents[rank].send(command)

    async def _hear_worker(self, drive: Drive, hear: Callable[[Any], None]) -> None:
        async for message in drive.reports():
            report = _alive(drive, self._worker_report(message))
            if report is not None:
                hear(report)

    async def _hear_agent(self, rank: GlobalRank, drive: Drive, hear: Callable[[GlobalRank, Any], None]) -> None:
        async for message in drive.reports():
            report = _alive(drive, self._agent_report(rank, message))
            if report is not None:
                hear(rank, report)

    # ---- hellos
    def _open(self, stub: Any, address: str) -> Any:
        channel = open_channel(address)
        self._channels.append(channel)
        return stub(channel).Drive(wait_for_ready=True)

    def _agree(self, workers: list[wire.WorkerHello], agents: list[wire.AgentHello]) -> wire.WorkerHello:
        first = workers[0]
        for flag, ranks, hellos in (("workers", self._leaders, workers), ("agents", range(len(agents)), agents)):
            for rank, hello in zip(ranks, hellos, strict=True):
                if hello.engine_id != self._arguments.engine_id or hello.rank != rank:
                    raise ConfigError(
                        f"--{flag}: expected rank {rank} of {self._arguments.engine_id} and found rank {hello.rank} of "
                        f"{hello.engine_id}; name the addresses in rank order",
                        param=flag,
                    )
                if hello.engine_epoch != first.engine_epoch:
                    raise EngineLost(
                        f"rank {rank} lives in epoch {hello.engine_epoch} and rank {first.rank} in {first.engine_epoch}; "
                        "restart the engine as a whole"
                    )
        for name in ("model_fingerprint", "draft_fingerprint", "model_name", "vocab_size", "end_token_ids"):
            values = {getattr(hello, name) for hello in workers}
            if len(values) > 1:
                raise ConfigError(f"the workers of {first.engine_id} disagree on {name}: {values}; give them one checkpoint")
        self._agree_on_places(agents)
        return replace(
            first,
            num_blocks=min(hello.num_blocks for hello in workers),
            num_slots=min(hello.num_slots for hello in workers),
            image_blocks=min(hello.image_blocks for hello in workers),
        )

    def _agree_on_places(self, agents: list[wire.AgentHello]) -> None:
        """Ranks of one stage hold the same fields at the same places (spec cache-and-handoff §4)."""
        width = len(agents) // self._arguments.pipeline_parallel_size
        for hello in agents:
            first = agents[hello.rank - hello.rank % width]
            if hello.placement_fingerprint != first.placement_fingerprint:
                raise ConfigError(
                    f"ranks {first.rank} and {hello.rank} of {hello.engine_id} are of one stage, and their records have "
                    f"placement fingerprints {first.placement_fingerprint} and {hello.placement_fingerprint}; "
                    "give both the same flags",
                    detail="PD_CONTRACT",
                )


async def _introduce(firsts: list[tuple[Drive, Any]], met: dict[str, Any]) -> None:
    """Send each peer its first command; `met` gets the answers as they come."""

    async def introduce(drive: Drive, first: Any) -> None:
        met[drive.peer] = await drive.introduce(first)

    try:
        async with asyncio.TaskGroup() as group:
            for drive, first in firsts:
                group.create_task(introduce(drive, first))
    except* MeshError as failures:
        raise failures.exceptions[0] from None


def _hello(drive: Drive, report: object, kind: type[Hello]) -> Hello:
    if isinstance(report, kind):
        return report
    if isinstance(report, Failure):
        raise EngineLost(f"{drive.peer} cannot start: {report.message}")
    raise EngineLost(f"{drive.peer} answered the introduction with {type(report).__name__}; all must be of one version")


def _alive(drive: Drive, report: Any) -> Any:
    if isinstance(report, Failure):
        raise EngineLost(f"{drive.peer} cannot go on: {report.message}", detail=report.detail or report.code)
    return report
