"""UCX for one thread: endpoints, sends and receives that it looks after itself, and a rest until something happens (spec ucx).

UCXX's worker in its blocking mode: nothing of UCX runs but what this thread calls, and while nothing is under way the thread
sleeps in poll(2), on UCX's descriptor and on those that it is to watch. No thread of UCXX's, no futures, no turns of an event
loop lie between a message and the copy that waits for it.

A cancelled UCX receive goes on writing into its buffer, so none is ever cancelled. `Endpoint.abort` is the fence: it ends what
is in flight on an endpoint.
"""

import os
import select
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from k3mesh.errors import ConfigError
from services.contracts.arguments import CUDA_FRAME_BYTES, CUDA_FRAMES, HOST_FRAME_BYTES, HOST_FRAMES


@dataclass(frozen=True, slots=True)
class Profile:
    """How frames of one kind of memory travel. UCX's settings give way to the environment of the process."""

    memory: str
    environment: Mapping[str, str]
    frame_bytes: int
    frames: int
    window: int  # frames of one link
    piece_bytes: int
    patience: (
        float  # seconds without progress, while something is under way, until the thread sleeps: to wake it costs both ends
    )


EVERYWHERE = {"UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n"}
HOST_SETTINGS = {
    "UCX_TLS": "tcp,self",
    "UCX_RNDV_SCHEME": "put_zcopy",
    "UCX_TCP_TX_SEG_SIZE": "1m",
    "UCX_TCP_RX_SEG_SIZE": "1m",
}
CUDA_SETTINGS = {"UCX_TLS": "cuda_ipc,cuda_copy,tcp,self"}  # tcp carries what is not frames
HOST = Profile(
    "host", EVERYWHERE | HOST_SETTINGS, HOST_FRAME_BYTES, HOST_FRAMES, window=2, piece_bytes=1 << 20, patience=400e-6
)
CUDA = Profile("cuda", EVERYWHERE | CUDA_SETTINGS, CUDA_FRAME_BYTES, CUDA_FRAMES, window=6, piece_bytes=112 << 20, patience=0.1)

ABORT_NS = 2 * 10**9  # that UCX may take to bring an endpoint down
PEER_GONE = ("ConnectionReset", "Canceled", "EndpointTimeout", "NotConnected", "Close")  # UCX's errors of a dead endpoint


class TransportError(Exception):
    """A send or receive that did not happen. `peer_gone`: nor will any other on its endpoint."""

    def __init__(self, message: str, peer_gone: bool = False):
        super().__init__(message)
        self.peer_gone = peer_gone


class Transfer(Protocol):
    """A send or receive under way."""

    @property
    def completed(self) -> bool:
        """UCX is done with the buffer."""
        ...

    def check_error(self) -> None:
        """Raises, by UCXX's own exceptions, if it did not happen. Once it is completed."""
        ...


class Transport:
    """One UCX context and worker, of one thread. `address` is what a peer needs to reach it."""

    def __init__(self, profile: Profile = HOST):
        """ConfigError if UCX cannot move such memory."""
        for key, value in profile.environment.items():
            os.environ.setdefault(key, value)
        import ucxx  # reads the environment when it is imported
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array

        self.patience = profile.patience
        self._lib, self.array, self.tag = libucxx, Array, ucxx.types.Tag
        self.any_bit, self.error = ucxx.types.TagMaskFull, ucxx.exceptions.UCXError
        context = libucxx.UCXContext()
        if profile.memory == "cuda" and not context.cuda_support:
            raise ConfigError(
                f"UCX cannot move GPU memory here, with UCX_TLS={os.environ['UCX_TLS']}; UCX_TLS must name cuda_ipc and "
                "cuda_copy, and UCX be built with CUDA (libucx-cu12) and find libcuda and libnvidia-ml"
            )
        self._worker: Any = libucxx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        self.address: bytes = libucxx.UCXAddress.create_from_worker(self._worker).tobytes()
        self._poll = select.poll()
        self.watch(self._worker.epoll_file_descriptor)

    def watch(self, descriptor: int) -> None:
        """It ends every rest while it can be read."""
        self._poll.register(descriptor, select.POLLIN)

    def connect(self, address: bytes) -> "Endpoint":
        """An endpoint to the peer with this address. TransportError if UCX refuses it."""
        try:
            peer = self._lib.UCXAddress.create_from_buffer(address)
            return Endpoint(self, self._lib.UCXEndpoint.create_from_worker_address(self._worker, peer, True))
        except self.error as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error

    def progress(self) -> bool:
        """Let UCX do something -> whether there is more to do. Transfers may have completed either way."""
        if self._worker.progress_once():
            return True
        self._worker.progress()  # this one also ends what endpoints that have failed were to receive
        return False

    def rest(self) -> None:
        """Until UCX or what is watched has something. When `progress` has no more to do, and all transfers were looked at."""
        if self._worker.arm():
            self._poll.poll()

    def check(self, transfer: Transfer) -> None:
        """TransportError if a completed transfer did not happen."""
        try:
            transfer.check_error()
        except self.error as error:
            name = type(error).__name__
            raise TransportError(f"{name}: {error}", any(word in name for word in PEER_GONE)) from error


class Endpoint:
    """The way to one peer, for one life of its link."""

    def __init__(self, transport: Transport, endpoint: Any):
        self._transport, self._endpoint = transport, endpoint
        self._any = transport.any_bit

    def send(self, tag: int, buffer: Any) -> Transfer:
        """Completed when UCX has read the buffer; that the peer has it is for the peer to say."""
        return self._post(self._endpoint.tag_send, tag, buffer)

    def receive(self, tag: int, buffer: Any) -> Transfer:
        """The message with this tag, not longer than the buffer; a shorter one leaves the rest of it as it was."""
        return self._post(self._endpoint.tag_recv, tag, buffer, self._any)

    def abort(self) -> None:
        """End all that is in flight here: no buffer is written once its receive has completed."""
        self._endpoint.close_blocking(period=ABORT_NS, max_attempts=1)

    def _post(self, transfer: Any, tag: int, buffer: Any, *mask: Any) -> Transfer:
        try:
            return transfer(self._transport.array(buffer), self._transport.tag(tag), *mask)
        except self._transport.error as error:  # UCXX has closed it, since the peer is gone
            raise TransportError(f"{type(error).__name__}: {error}", peer_gone=True) from error
