"""The agent as a whole: it waits for its worker, then drives one session from the scheduler, the worker and its peers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from typing import Any

from k3mesh.errors import ConfigError, Internal, MeshError
from k3mesh.v1 import transfer_pb2_grpc
from services.contracts.placement import Placement
from services.kvtransfer import wire
from services.kvtransfer.control import Control
from services.kvtransfer.frames import check_frame_bytes
from services.kvtransfer.local import Export, WorkerSocket
from services.kvtransfer.memory import profile_of
from services.kvtransfer.messages import CloseLink, Receive, RoomFailed, Send, ToPeer, ToScheduler
from services.kvtransfer.mover import PROGRAM, Mover
from services.kvtransfer.pairing import Pairer
from services.kvtransfer.peers import Peers, PeerServer
from services.kvtransfer.session import Limits
from services.kvtransfer.sink import SinkSession
from services.kvtransfer.source import SourceSession
from services.kvtransfer.transport import Profile
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
    peer_listen: str  # where decode agents link to, of a prefill agent
    agent_socket: str
    startup_timeout: float


class Agent:
    """One agent. What it takes depends on where its worker's pools are. `mover` is the program that moves frames; tests put one
    that damages them in its place."""

    def __init__(self, place: Place, limits: Callable[[Profile], Limits], mover: Sequence[str] = PROGRAM):
        self._place, self._limits, self._mover = place, limits, mover

    async def run(self, process: Process) -> None:
        """Until `process.stopping`. EngineLost when the worker or the scheduler is gone, ConfigError if they do not fit."""
        async with AsyncExitStack() as stack:
            worker = WorkerSocket(self._place.agent_socket)
            stack.callback(worker.close)
            mover = await Mover.start(self._mover)
            stack.push_async_callback(mover.close)
            meeting = asyncio.ensure_future(worker.meet(self._place.startup_timeout))
            stopping = asyncio.ensure_future(process.stopping.wait())
            await asyncio.wait([meeting, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not meeting.done():
                meeting.cancel()
                await asyncio.wait([meeting])
                return
            await self._serve(process, stack, worker, mover, meeting.result())

    async def _serve(self, process: Process, stack: AsyncExitStack, worker: WorkerSocket, mover: Mover, export: Export) -> None:
        placement, profile = export.placement, profile_of(export.cuda)
        limits = self._limits(profile)
        session = (SourceSession if placement.role == "prefill" else SinkSession)(placement, limits)
        shell = Shell(session)

        def defect(effect: Any, error: Exception) -> None:
            control.fail(Internal(f"{effect!r} failed: {error!r}; the log has the traceback"))
            log.error("an effect failed", effect=repr(effect), exc_info=error)

        def counts() -> tuple[dict[str, int], dict[str, int]]:
            return {**session.counters(), "tasks": shell.tasks, "transfers": mover.transfers}, session.totals

        control = Control(placement, limits.staging_bytes, shell.post, counts)
        with closing(export):
            self._check(placement, limits)
            opened = await mover.open(export, limits, shell.post, self._place.startup_timeout)
        size = dict(frames=limits.frames, frame_bytes=limits.frame_bytes, bytes=limits.staging_bytes)
        log.info("staging", memory=profile.memory, **size, pinned=opened.pinned)
        peers = Peers(placement, limits, opened.address, opened.checksum, mover, shell.post)
        shell.on_failure = defect
        self._wire(shell, mover, peers, control)
        server = RpcServer(
            self._place.listen,
            [(transfer_pb2_grpc.add_TransferControlServicer_to_server, control, "k3mesh.v1.TransferControl")],
        )
        await server.start()
        stack.push_async_callback(server.stop, GRACE_S)
        stack.push_async_callback(peers.close)
        if placement.role == "prefill":
            links = PeerServer(peers)
            await links.start(self._place.peer_listen)
            stack.push_async_callback(links.stop)
            control.address = links.address
        worker.accept()
        await self._run(process, server, shell, worker, mover, control, peers)

    async def _run(
        self,
        process: Process,
        server: RpcServer,
        shell: Shell,
        worker: WorkerSocket,
        mover: Mover,
        control: Control,
        peers: Peers,
    ) -> None:
        try:
            async with asyncio.TaskGroup() as lines:
                tasks = [
                    lines.create_task(shell.run()),
                    lines.create_task(worker.read(shell.post)),
                    lines.create_task(mover.watch()),
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

    def _wire(self, shell: Shell, mover: Mover, peers: Peers, control: Control) -> None:
        def deliver(effect: ToScheduler) -> None:
            if isinstance(effect.report, RoomFailed):
                failure = effect.report.failure
                (log.error if failure.detail in ALERTS else log.info)(
                    "room failed", code=failure.detail, reason=failure.message
                )
            control.report(wire.report(effect.report, time.time() - shell.clock.now()))

        shell.on(ToScheduler, deliver)
        shell.on(ToPeer, peers.tell)
        shell.on(CloseLink, peers.cut)
        for kind in (Send, Receive):
            shell.on(kind, mover.do)

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
