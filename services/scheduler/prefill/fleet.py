"""This engine's workers and agents, as the scheduler drives them: one stream to each stage's leader, one to each agent."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc.aio

import services.scheduler.prefill.events as ev
from k3mesh.errors import ConfigError, EngineLost, MeshError
from k3mesh.v1 import transfer_pb2_grpc, worker_pb2_grpc
from services.contracts.arguments import SchedulerArguments
from services.contracts.ids import GlobalRank, RequestId
from services.runtime.channels import open_channel
from services.scheduler.prefill import wire
from services.scheduler.prefill.admission import Limits
from services.scheduler.streams import Drive

Hello = TypeVar("Hello", wire.WorkerHello, wire.AgentHello)


class Fleet:
    """`await start()` once; then `run()` until something breaks, and everything else meanwhile."""

    def __init__(self, arguments: SchedulerArguments, fence: int):
        self._arguments, self._fence = arguments, fence
        self._channels: list[grpc.aio.Channel] = []
        self._leaders = range(0, arguments.world_size, arguments.attn_tp_size)
        self._workers = [
            Drive(f"prefill worker {rank} at {address}", self._open(worker_pb2_grpc.WorkerControlStub, address))
            for rank, address in zip(self._leaders, arguments.workers, strict=True)
        ]
        self._agents = [
            Drive(f"prefill agent {rank} at {address}", self._open(transfer_pb2_grpc.TransferControlStub, address))
            for rank, address in enumerate(arguments.agents)
        ]
        self._hello: wire.WorkerHello | None = None
        self.peer_addresses: tuple[str, ...] = ()  # of the agents, by global rank, where D's agents link to

    @property
    def hello(self) -> wire.WorkerHello:
        """What all leaders agree on, with the smallest pools. After start()."""
        assert self._hello is not None
        return self._hello

    async def start(self) -> None:
        """Introduce ourselves to all of them. EngineLost if one does not answer in time, ConfigError if they disagree."""
        scheduler = f"{self._arguments.engine_id} prefill-scheduler"
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
        workers = [_hello(drive, wire.worker_report(met[drive.peer]), wire.WorkerHello) for drive in self._workers]
        agents = [
            _hello(drive, wire.agent_report(GlobalRank(rank), met[drive.peer]), wire.AgentHello)
            for rank, drive in enumerate(self._agents)
        ]
        self._hello = self._agree(workers, agents)
        self.peer_addresses = tuple(hello.peer_address for hello in agents)

    def limits(self) -> Limits:
        """After start()."""
        arguments = self._arguments
        return Limits(
            engine_id=arguments.engine_id,
            stages=arguments.pipeline_parallel_size,
            tp_size=arguments.attn_tp_size,
            num_blocks=self.hello.num_blocks,
            num_slots=self.hello.num_slots,
            max_num_seqs=arguments.max_num_seqs,
            chunk_tokens=arguments.chunked_prefill_size,
            max_model_len=arguments.max_model_len,
            vocab_size=self.hello.vocab_size,
            end_tokens=frozenset(self.hello.end_token_ids),
            verify_width=arguments.verify_width,
        )

    def introduction(self) -> wire.PrefillHello:
        """How this engine introduces itself to the decode scheduler. After start()."""
        arguments = self._arguments
        return wire.PrefillHello(
            engine_id=arguments.engine_id,
            engine_epoch=self.hello.engine_epoch,
            stages=arguments.pipeline_parallel_size,
            tp_size=arguments.attn_tp_size,
            agents=self.peer_addresses,
            model_fingerprint=self.hello.model_fingerprint,
            verify_width=arguments.verify_width,
            max_model_len=arguments.max_model_len,
        )

    async def run(self, post: Callable[[Any], None]) -> NoReturn:
        """Carry commands and reports; events of the planner go to `post`. Ends by EngineLost when one of them is lost."""
        try:
            async with asyncio.TaskGroup() as group:
                for drive in (*self._workers, *self._agents):
                    group.create_task(drive.write())
                for drive in self._workers:
                    group.create_task(_read(drive, wire.worker_report, post))
                for rank, drive in enumerate(self._agents):
                    group.create_task(_read(drive, partial(wire.agent_report, GlobalRank(rank)), post))
        except* MeshError as failures:
            raise failures.exceptions[0] from None
        raise AssertionError("streams end by EngineLost only")

    async def close(self) -> None:
        for drive in (*self._workers, *self._agents):
            drive.cancel()
        for channel in self._channels:
            await channel.close()

    # ---- effects
    def launch(self, step: ev.PrefillStep, prompt: Callable[[RequestId], bytes]) -> None:
        command = wire.step_command(step, prompt, self._fence)
        for drive in self._workers:
            drive.send(command)

    def forget(self, effect: ev.ForgetRooms) -> None:
        command = wire.forget_command(effect, self._fence)
        for drive in self._workers:
            drive.send(command)

    def cancel(self, effect: ev.CancelOnAgents) -> None:
        command = wire.cancel_command(effect, self._fence)
        for rank in effect.ranks:
            self._agents[rank].send(command)

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
        for name in ("model_fingerprint", "model_name", "vocab_size", "end_token_ids"):
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
            vocab_size=first.vocab_size,
            end_token_ids=first.end_token_ids,
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
    if isinstance(report, ev.Failure):
        raise EngineLost(f"{drive.peer} cannot start: {report.message}")
    raise EngineLost(f"{drive.peer} answered the introduction with {type(report).__name__}; all must be of one version")


async def _read(drive: Drive, convert: Callable[[Any], Any], post: Callable[[Any], None]) -> None:
    async for message in drive.reports():
        match convert(message):
            case ev.Failure() as failure:
                raise EngineLost(f"{drive.peer} cannot go on: {failure.message}", detail=failure.detail or failure.code)
            case None:
                continue
            case event:
                post(event)
