"""This engine's workers and agents, as the scheduler drives them: one stream to each replica's leader, one to each agent."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import grpc.aio

from k3mesh.errors import ConfigError, EngineLost, MeshError, TransferFailed
from k3mesh.v1 import transfer_pb2_grpc, worker_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.contracts.ids import GlobalRank, Replica
from services.runtime.channels import open_channel
from services.scheduler.decode import events as ev
from services.scheduler.decode import wire
from services.scheduler.decode.shape import EngineShape
from services.scheduler.streams import Drive

PAIR_S = 60.0  # agents link to a prefill engine within this

Hello = TypeVar("Hello", wire.WorkerHello, wire.AgentHello)


class Fleet:
    """`await start()` once; then `run()` until something breaks, and everything else meanwhile."""

    def __init__(self, arguments: SchedulerArguments, fence: int):
        self._arguments, self._fence = arguments, fence
        self._channels: list[grpc.aio.Channel] = []
        self._workers = [
            Drive(f"decode worker {rank} at {address}", self._open(worker_pb2_grpc.WorkerControlStub, address))
            for rank, address in zip(self._leaders, arguments.workers, strict=True)
        ]
        self._agents = [
            Drive(f"decode agent {rank} at {address}", self._open(transfer_pb2_grpc.TransferControlStub, address))
            for rank, address in enumerate(arguments.agents)
        ]
        self._results: dict[Replica, wire.RoundResult] = {}
        self._pairing = asyncio.Lock()  # a refusal does not say whom it refuses, so one engine pairs at a time
        self._pairing_with: wire.PrefillHello | None = None
        self._unpaired: dict[GlobalRank, asyncio.Future[None]] = {}
        self.hello: wire.WorkerHello | None = None  # what all leaders agree on, with the smallest pools

    async def start(self) -> None:
        """Introduce ourselves to all of them. EngineLost if one does not answer in time, ConfigError if they disagree."""
        scheduler, fence = f"{self._arguments.engine_id} decode-scheduler", self._fence
        drives = [(drive, wire.introduce_worker(scheduler, fence)) for drive in self._workers]
        drives += [(drive, wire.introduce_agent(scheduler, fence)) for drive in self._agents]
        met: dict[str, Any] = {}
        try:
            async with asyncio.timeout(self._arguments.startup_timeout):
                await self._meet(drives, met)
        except TimeoutError as error:
            silent = ", ".join(drive.peer for drive, _ in drives if drive.peer not in met)
            raise EngineLost(
                f"no hello within --startup-timeout {self._arguments.startup_timeout:g} s from {silent}; see their logs"
            ) from error
        workers = [_hello(drive, wire.worker_report(met[drive.peer]), wire.WorkerHello) for drive in self._workers]
        agents = [
            _hello(drive, wire.agent_report(GlobalRank(rank), met[drive.peer]), wire.AgentHello)
            for rank, drive in enumerate(self._agents)
        ]
        self.hello = self._agree(workers, agents)

    def shape(self) -> EngineShape:
        """After start()."""
        assert self.hello is not None
        arguments = self._arguments
        return EngineShape(
            engine_id=arguments.engine_id,
            epoch=self.hello.engine_epoch,
            replicas=arguments.data_parallel_size,
            tp_size=arguments.attn_tp_size,
            places=arguments.replica_seqs,
            num_blocks=self.hello.num_blocks,
            num_slots=self.hello.num_slots,
            verify_width=arguments.verify_width,
            max_model_len=arguments.max_model_len,
            end_tokens=frozenset(self.hello.end_token_ids),
            buckets=arguments.buckets(),
            graphs=not arguments.enforce_eager,
            request_timeout=arguments.request_timeout,
        )

    async def run(self, post: Callable[[Any], None]) -> NoReturn:
        """Carry commands and reports; events of the planner go to `post`. Ends by EngineLost when one of them is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                for drive in (*self._workers, *self._agents):
                    group.create_task(drive.write())
                for drive in self._workers:
                    group.create_task(self._read_worker(drive, post))
                for rank, drive in enumerate(self._agents):
                    group.create_task(self._read_agent(GlobalRank(rank), drive, post))
        except* MeshError as failures:
            raise failures.exceptions[0] from None
        raise AssertionError("streams end by EngineLost only")

    async def close(self) -> None:
        for drive in (*self._workers, *self._agents):
            drive.cancel()
        for channel in self._channels:
            await channel.close()

    # ---- effects
    def launch(self, plan: ev.RoundPlan) -> None:
        for drive, command in zip(self._workers, wire.round_commands(plan, self._fence), strict=True):
            drive.send(command)

    def expect(self, effect: ev.ExpectManifest) -> None:
        command = wire.expect_command(effect.manifest, self._fence)
        for rank in effect.ranks:
            self._agents[rank].send(command)

    def cancel(self, effect: ev.CancelOnAgents) -> None:
        command = wire.cancel_command(effect.room, effect.reason, self._fence)
        for rank in effect.ranks:
            self._agents[rank].send(command)

    async def pair(self, hello: wire.PrefillHello) -> None:
        """Link every agent to the prefill agents of its tensor-parallel rank. The agents' refusal, or TransferFailed when
        they take too long."""
        async with self._pairing:
            loop = asyncio.get_running_loop()
            self._pairing_with = hello
            self._unpaired = {GlobalRank(rank): loop.create_future() for rank in range(len(self._agents))}
            waiting = dict(self._unpaired)
            for rank, drive in enumerate(self._agents):
                tp = rank % hello.tp_size
                sources = tuple(hello.agents[stage * hello.tp_size + tp] for stage in range(hello.stages))
                drive.send(wire.pair_command(hello, sources, self._fence))
            try:
                async with asyncio.timeout(PAIR_S):
                    await asyncio.gather(*waiting.values())
            except TimeoutError as error:
                late = sorted(rank for rank, future in waiting.items() if future.cancelled() or not future.done())
                raise TransferFailed(
                    f"decode agents {late} have no link to prefill engine {hello.engine_id} after {PAIR_S:g} s; see their logs",
                    detail="PD_TIMEOUT_BOOT",
                ) from error
            finally:
                self._pairing_with, self._unpaired = None, {}

    # ---- reports
    async def _read_worker(self, drive: Drive, post: Callable[[Any], None]) -> None:
        async for message in drive.reports():
            match wire.worker_report(message):
                case wire.RoundResult() as result:
                    self._gather(result, post)
                case ev.Failure() as failure:
                    raise EngineLost(f"{drive.peer} cannot go on: {failure.message}", detail=failure.detail or failure.code)
                case _:
                    continue

    async def _read_agent(self, rank: GlobalRank, drive: Drive, post: Callable[[Any], None]) -> None:
        async for message in drive.reports():
            match wire.agent_report(rank, message):
                case ev.AgentRankReady() | ev.AgentRoomFailed() | ev.AgentDrained() as event:
                    post(event)
                case wire.Paired() as paired:
                    self._paired(rank, paired)
                case wire.PairRefused(failure):
                    self._refused(rank, failure)
                case ev.Failure() as failure:
                    raise EngineLost(f"{drive.peer} cannot go on: {failure.message}", detail=failure.detail or failure.code)
                case _:
                    continue

    def _gather(self, result: wire.RoundResult, post: Callable[[Any], None]) -> None:
        """A round is done when all replicas have answered it; one that does not answer is the planner's deadline."""
        self._results[result.replica] = result
        if len(self._results) < len(self._workers):
            return
        ids = {part.round_id for part in self._results.values()}
        if len(ids) > 1 or sorted(self._results) != list(range(len(self._workers))):
            told = {replica: part.round_id for replica, part in sorted(self._results.items())}
            raise EngineLost(f"the replicas are out of step: {told} (replica: round); the engine must restart")
        post(ev.RoundDone(result.round_id, tuple(part.rows for _, part in sorted(self._results.items()))))
        self._results.clear()

    def _paired(self, rank: GlobalRank, paired: wire.Paired) -> None:
        hello = self._pairing_with
        if hello is not None and (paired.engine_id, paired.engine_epoch) == (hello.engine_id, hello.engine_epoch):
            future = self._unpaired.get(rank)
            if future is not None and not future.done():
                future.set_result(None)

    def _refused(self, rank: GlobalRank, failure: ev.Failure) -> None:
        future = self._unpaired.get(rank)
        if future is not None and not future.done():
            future.set_exception(wire.error_of(failure))

    # ---- hellos
    async def _meet(self, drives: list[tuple[Drive, Any]], met: dict[str, Any]) -> None:
        async def introduce(drive: Drive, first: Any) -> None:
            met[drive.peer] = await drive.introduce(first)

        try:
            async with asyncio.TaskGroup() as group:
                for drive, first in drives:
                    group.create_task(introduce(drive, first))
        except* MeshError as failures:
            raise failures.exceptions[0] from None

    @property
    def _leaders(self) -> range:
        return range(0, self._arguments.world_size, self._arguments.attn_tp_size)

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
        for name in ("model_fingerprint", "model_name", "end_token_ids"):
            values = {getattr(hello, name) for hello in workers}
            if len(values) > 1:
                raise ConfigError(f"the workers of {first.engine_id} disagree on {name}: {values}; give them one checkpoint")
        return wire.WorkerHello(
            engine_id=first.engine_id,
            engine_epoch=first.engine_epoch,
            rank=first.rank,
            num_blocks=min(hello.num_blocks for hello in workers),
            num_slots=min(hello.num_slots for hello in workers),
            model_fingerprint=first.model_fingerprint,
            model_name=first.model_name,
            end_token_ids=first.end_token_ids,
        )


def _hello(drive: Drive, report: object, kind: type[Hello]) -> Hello:
    if isinstance(report, kind):
        return report
    if isinstance(report, ev.Failure):
        raise EngineLost(f"{drive.peer} cannot start: {report.message}")
    raise EngineLost(f"{drive.peer} answered the introduction with {type(report).__name__}; all must be of one version")
