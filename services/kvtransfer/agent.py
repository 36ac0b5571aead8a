"""The agent as a whole: it waits for its worker, then drives one session from the scheduler, the worker and its peers."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

from k3mesh.errors import ConfigError, Internal, MeshError
from k3mesh.v1 import transfer_pb2_grpc
from services.contracts.placement import Placement
from services.kvtransfer import wire
from services.kvtransfer.control import Control
from services.kvtransfer.frames import CacheMemory, check_frame_bytes
from services.kvtransfer.local import WorkerSocket
from services.kvtransfer.memory import open_memory, profile_of
from services.kvtransfer.messages import (
    CloseLink,
    Gather,
    Gathered,
    Install,
    Installed,
    Receive,
    RoomFailed,
    Send,
    ToPeer,
    ToScheduler,
)
from services.kvtransfer.pairing import Pairer
from services.kvtransfer.peers import Peers, PeerService
from services.kvtransfer.session import Limits
from services.kvtransfer.sink import SinkSession
from services.kvtransfer.source import SourceSession
from services.kvtransfer.transport import Profile, Transport
from services.runtime.process import Process
from services.runtime.rpc_server import RpcServer
from services.runtime.shell import Shell
from services.runtime.telemetry import log

ALERTS = ("PD_BYTES", "PD_ROUTE")  # what no order of events explains
GRACE_S = 0.5  # for calls that are open when the agent ends


@dataclass(frozen=True, slots=True)
class Place:
    """Where this agent stands, from its arguments."""

    engine_id: str
    role: str
    rank: int
    listen: str
    agent_socket: str
    startup_timeout: float


class Copier:
    """Memory work of the session, on one thread beside the loop, in order. What comes of it is posted as an event."""

    def __init__(self, memory: CacheMemory, post: Callable[[Any], None], failed: Callable[[Any, Exception], None]):
        self._memory, self._post, self._failed = memory, post, failed
        self._loop = asyncio.get_running_loop()
        self._effects: SimpleQueue[Gather | Install | None] = SimpleQueue()
        Thread(target=self._run, name="copier", daemon=True).start()

    def do(self, effect: Gather | Install) -> None:
        self._effects.put(effect)

    def close(self) -> None:
        self._effects.put(None)

    def _run(self) -> None:
        while (effect := self._effects.get()) is not None:
            try:
                event = self._perform(effect)
            except Exception as error:
                self._tell(self._failed, effect, error)
            else:
                self._tell(self._post, event)

    def _tell(self, method: Callable[..., None], *what: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: the agent has ended
            self._loop.call_soon_threadsafe(method, *what)

    def _perform(self, effect: Gather | Install) -> Gathered | Installed:
        match effect:
            case Gather(frame, units):
                return Gathered(frame, self._memory.gather(frame, units))
            case Install(frame, length, checksum, units):
                intact = self._memory.verify(frame, length, checksum)
                if intact:
                    self._memory.scatter(frame, units)
                return Installed(frame, intact)


class Agent:
    """One agent. What it takes depends on where its worker's pools are. `transport` makes the way for frames; tests put one
    that damages them in its place."""

    def __init__(
        self, place: Place, limits: Callable[[Profile], Limits], transport: Callable[[Profile], Transport] = Transport
    ):
        self._place, self._limits, self._transport = place, limits, transport

    async def run(self, process: Process) -> None:
        """Until `process.stopping`. EngineLost when the worker or the scheduler is gone, ConfigError if they do not fit."""
        async with AsyncExitStack() as stack:
            worker = WorkerSocket(self._place.agent_socket)
            stack.callback(worker.close)
            meeting = asyncio.ensure_future(worker.meet(self._place.startup_timeout))
            stopping = asyncio.ensure_future(process.stopping.wait())
            await asyncio.wait([meeting, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not meeting.done():
                meeting.cancel()
                await asyncio.wait([meeting])
                return
            placement, arenas = meeting.result()
            profile = profile_of(arenas)
            limits = self._limits(profile)
            self._check(placement, limits)
            memory = open_memory(placement, arenas, limits)
            size = dict(frames=limits.frames, frame_bytes=limits.frame_bytes, bytes=limits.staging_bytes)
            log.info("staging", memory=profile.memory, **size, pinned=memory.pinned)
            await self._serve(process, stack, worker, self._transport(profile), placement, memory, limits)

    async def _serve(
        self,
        process: Process,
        stack: AsyncExitStack,
        worker: WorkerSocket,
        transport: Transport,
        placement: Placement,
        memory: CacheMemory,
        limits: Limits,
    ) -> None:
        session = (SourceSession if placement.role == "prefill" else SinkSession)(placement, limits)
        shell = Shell(session)
        peers = Peers(placement, limits, transport, memory, shell.post)

        def counts() -> tuple[dict[str, int], dict[str, int]]:
            return {**session.counters(), "tasks": shell.tasks, "transfers": transport.tasks}, session.totals

        control = Control(placement, limits.staging_bytes, shell.post, counts)
        copier = self._wire(shell, memory, peers, control)
        stack.callback(copier.close)
        server = RpcServer(
            self._place.listen,
            [
                (transfer_pb2_grpc.add_TransferControlServicer_to_server, control, "k3mesh.v1.TransferControl"),
                (transfer_pb2_grpc.add_TransferPeerServicer_to_server, PeerService(peers), "k3mesh.v1.TransferPeer"),
            ],
        )
        await server.start()
        stack.push_async_callback(server.stop, GRACE_S)
        stack.push_async_callback(peers.close)
        control.address = server.address
        worker.accept()
        await self._run(process, server, shell, worker, control, peers)

    async def _run(
        self, process: Process, server: RpcServer, shell: Shell, worker: WorkerSocket, control: Control, peers: Peers
    ) -> None:
        try:
            async with asyncio.TaskGroup() as lines:
                tasks = [
                    lines.create_task(shell.run()),
                    lines.create_task(worker.read(shell.post)),
                    lines.create_task(control.watch()),
                ]
                if self._place.role == "decode":
                    control.pairer = Pairer(peers, control.report_pairing)
                    tasks.append(lines.create_task(control.pairer.run()))
                await server.set_serving(True)
                process.ready()
                await process.stopping.wait()
                for task in tasks:
                    task.cancel()
        except* MeshError as group:
            error = _first(group)
            log.error("the agent ends", error=error.message)
            await control.end(error)
            raise error from None

    def _wire(self, shell: Shell, memory: CacheMemory, peers: Peers, control: Control) -> Copier:
        def deliver(effect: ToScheduler) -> None:
            if isinstance(effect.report, RoomFailed):
                failure = effect.report.failure
                (log.error if failure.detail in ALERTS else log.info)(
                    "room failed", code=failure.detail, reason=failure.message
                )
            control.report(wire.report(effect.report, time.time() - shell.clock.now()))

        def defect(effect: Any, error: Exception) -> None:
            control.fail(Internal(f"{type(effect).__name__} failed: {error!r}; the log has the traceback"))
            log.error("an effect failed", effect=repr(effect), exc_info=error)

        shell.on_failure = defect
        shell.on(ToScheduler, deliver)
        shell.on(ToPeer, peers.tell)
        shell.on(CloseLink, peers.cut)
        shell.on(Send, peers.send)
        shell.on(Receive, peers.receive)
        copier = Copier(memory, shell.post, defect)
        for kind in (Gather, Install):
            shell.on(kind, copier.do)
        return copier

    def _check(self, placement: Placement, limits: Limits) -> None:
        wanted = (self._place.engine_id, self._place.role, self._place.rank)
        found = (placement.engine_id, placement.role, placement.global_rank)
        if found != wanted:
            raise ConfigError(
                f"--agent-socket {self._place.agent_socket}: engine, role and rank of the worker are {found}, of this agent "
                f"{wanted}; give each worker its own agent's socket",
                param="agent_socket",
            )
        check_frame_bytes(placement, limits.frame_bytes)


def _first(group: BaseException) -> Any:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
