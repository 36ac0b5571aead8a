"""UCXX behind four calls: an endpoint from a peer's address, send, receive, abort (spec ucx).

A cancelled UCX receive goes on writing into its buffer, so none is ever cancelled: send and receive run as tasks of the
transport, which keep the buffer until UCX is done with it. `abort` is the fence: it ends what is in flight on an endpoint.

Progress is UCXX's thread with Python futures, the one mode that does not spin. Its thread wakes every millisecond by
default, 2 % of a core for nothing; events and submissions wake it anyway, so WAKE_MS only bounds a wake-up that is lost.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from k3mesh.errors import ConfigError
from services.contracts.arguments import CUDA_FRAME_BYTES, CUDA_FRAMES, HOST_FRAME_BYTES, HOST_FRAMES

WAKE_MS = 100


@dataclass(frozen=True, slots=True)
class Profile:
    """How frames of one kind of memory travel. UCX's settings give way to the environment of the process."""

    memory: str
    environment: Mapping[str, str]
    frame_bytes: int
    frames: int


EVERYWHERE = {"UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n"}
HOST_SETTINGS = {
    "UCX_TLS": "tcp,self",
    "UCX_RNDV_SCHEME": "put_zcopy",
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
}
CUDA_SETTINGS = {"UCX_TLS": "cuda_ipc,cuda_copy,tcp,self"}  # tcp carries what is not frames
HOST = Profile("host", EVERYWHERE | HOST_SETTINGS, HOST_FRAME_BYTES, HOST_FRAMES)
CUDA = Profile("cuda", EVERYWHERE | CUDA_SETTINGS, CUDA_FRAME_BYTES, CUDA_FRAMES)

PEER_GONE = ("ConnectionReset", "Canceled", "EndpointTimeout", "NotConnected", "Close")  # UCX's errors of a dead endpoint


class TransportError(Exception):
    """A send or receive that did not happen. `peer_gone`: nor will any other on its endpoint."""

    def __init__(self, message: str, peer_gone: bool = False):
        super().__init__(message)
        self.peer_gone = peer_gone


def start_ucx(profile: Profile = HOST) -> Any:
    """The module ucxx, with this process's one context and worker in it. ConfigError if UCX cannot move such memory.

    The calling thread and those that it starts from now on are scheduled as batch work (sched(7)). Sender, receiver, copies and
    loop wake each other many times for a frame; this way the one that wakes does not push another off its core within a copy.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a sandbox that does not allow it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for key, value in profile.environment.items():
        os.environ.setdefault(key, value)
    import ucxx  # reads the environment when it is imported
    import ucxx.core

    ucxx.init(progress_mode="thread", enable_python_future=True)
    if profile is CUDA and not ucxx.core._get_ctx().context.cuda_support:
        raise ConfigError(
            f"UCX cannot move GPU memory here, with UCX_TLS={os.environ['UCX_TLS']}; UCX_TLS must name cuda_ipc and cuda_copy, "
            "and UCX be built with CUDA (libucx-cu12) and find libcuda and libnvidia-ml"
        )
    worker: Any = ucxx.core._get_ctx().worker
    worker.stop_progress_thread()
    worker.start_progress_thread(polling_mode=False, epoll_timeout=WAKE_MS)
    return ucxx


class Transport:
    """One UCX worker, for the whole life of the process. `address` is what a peer needs to reach it."""

    def __init__(self, profile: Profile = HOST) -> None:
        self._ucxx = ucxx = start_ucx(profile)
        self.address = bytes(ucxx.get_worker_address())
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> int:
        """Sends and receives that UCX has not finished."""
        return len(self._tasks)

    async def connect(self, address: bytes) -> "Endpoint":
        """An endpoint to the peer with this address. TransportError if UCX refuses it."""
        try:
            peer = self._ucxx.get_ucx_address_from_buffer(address)
            return Endpoint(self, await self._ucxx.create_endpoint_from_worker_address(peer))
        except self._ucxx.exceptions.UCXError as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error

    def tag(self, value: int) -> Any:
        return self._ucxx.types.Tag(value)

    async def finish(self, transfer: Coroutine[Any, Any, Any]) -> None:
        """Run a send or receive to its end, whatever becomes of the caller."""
        task = asyncio.ensure_future(self._run(transfer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _run(self, transfer: Coroutine[Any, Any, Any]) -> None:
        try:
            await transfer
        except self._ucxx.exceptions.UCXError as error:
            name = type(error).__name__
            raise TransportError(f"{name}: {error}", any(word in name for word in PEER_GONE)) from error


class Endpoint:
    """The way to one peer, for one life of its link."""

    def __init__(self, transport: Transport, endpoint: Any):
        self._transport, self._endpoint = transport, endpoint
        self._aborted = False

    async def send(self, tag: int, buffer: Any) -> None:
        """Until UCX has read the buffer; that the peer has it is for the peer to say. TransportError if it fails."""
        await self._do(self._endpoint.send, tag, buffer)

    async def receive(self, tag: int, buffer: Any) -> None:
        """The message with this tag, not longer than the buffer; a shorter one leaves the rest of it as it was."""
        await self._do(self._endpoint.recv, tag, buffer)

    async def abort(self) -> None:
        """End all that is in flight here: no buffer is written once its receive has ended."""
        if not self._aborted:
            self._aborted = True
            await asyncio.to_thread(self._endpoint.abort)

    async def _do(self, transfer: Callable[..., Coroutine[Any, Any, Any]], tag: int, buffer: Any) -> None:
        if self._aborted:
            raise TransportError("the endpoint was aborted", peer_gone=True)
        try:
            await self._transport.finish(transfer(buffer, tag=self._transport.tag(tag), force_tag=True))
        except AttributeError as error:  # UCXX takes its handle away in abort(), also from a call that is about to begin
            if not self._aborted:
                raise
            raise TransportError("the endpoint was aborted", peer_gone=True) from error
