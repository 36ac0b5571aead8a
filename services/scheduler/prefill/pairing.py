"""The stream to the decode scheduler: opened again whenever it breaks."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc.aio

import services.scheduler.prefill.events as ev
from k3mesh.errors import EngineLost, MeshError
from k3mesh.v1 import request_pb2, request_pb2_grpc
from services.contracts.ids import RequestId
from services.runtime.channels import open_channel, translate
from services.runtime.telemetry import log
from services.scheduler.prefill import wire
from services.scheduler.streams import Drive

HELLO_S = 90.0  # the decode scheduler answers when its agents have linked to ours, for which it takes 60 s at most
CANCEL_S = 5.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 2.0  # before another attempt; the channel itself waits for a scheduler that is away


class DecodeLink:
    """`run()` pairs, and pairs again. `reason` says why there is no decode engine now; empty while there is one."""

    def __init__(self, address: str, introduction: wire.PrefillHello, post: Callable[[Any], None]):
        self._peer = f"decode scheduler at {address}"
        self._channel: grpc.aio.Channel = open_channel(address)
        self._stub: Any = request_pb2_grpc.DecodeSchedulerStub(self._channel)
        self._introduction = introduction
        self._post = post
        self._drive: Drive | None = None
        self._dropped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reason = f"not paired with the {self._peer} yet"
        self.client_address = ""  # where clients attach

    async def run(self, changed: Callable[[], Awaitable[None]]) -> NoReturn:
        """`changed` is awaited when `reason` has changed."""
        pause = FIRST_PAUSE_S
        while True:
            drive = Drive(self._peer, self._stub.Pair(wait_for_ready=True))
            try:
                hello = await self._meet(drive)
                pause = FIRST_PAUSE_S
                await self._live(drive, hello, changed)
            except MeshError as error:
                self.reason = error.message
            finally:
                drive.cancel()
                self._drive = None
            log.warning("not paired", reason=self.reason)
            if self.client_address:
                self.client_address = ""
                self._post(ev.DecodeLost(self.reason))
            await changed()
            await asyncio.sleep(pause)
            pause = min(LAST_PAUSE_S, pause * 2)

    async def close(self) -> None:
        await self._channel.close()

    async def cancel(self, request_id: RequestId, reason: str) -> bool:
        """Pass a cancel on for a request that may be the decode engine's -> whether it was known there."""
        if not self.client_address:
            return False
        message = request_pb2.CancelRequest(request_id=request_id, reason=reason)
        try:
            return bool((await self._stub.Cancel(message, timeout=CANCEL_S)).known)
        except grpc.aio.AioRpcError as error:
            raise translate(error, self._peer) from error

    # ---- effects
    def reserve(self, effect: ev.Reserve, prompt_hash: bytes, tail: bytes) -> None:
        self._send(wire.reserve(effect, prompt_hash, tail))

    def cancel_room(self, effect: ev.CancelOnDecode) -> None:
        self._send(wire.cancel_on_decode(effect))

    def drop(self, effect: ev.DropDecode) -> None:
        if not self._dropped.done():
            self._dropped.set_result(effect.reason)

    def _send(self, message: request_pb2.PrefillToDecode) -> None:
        if self._drive is not None:
            self._drive.send(message)

    # ---- one life of the stream
    async def _meet(self, drive: Drive) -> wire.DecodeHello:
        try:
            async with asyncio.timeout(HELLO_S):
                answer = wire.from_decode(await drive.introduce(wire.hello_to_decode(self._introduction)))
        except TimeoutError as error:
            raise EngineLost(f"{self._peer} has not answered for {HELLO_S:g} s; check that it runs") from error
        if isinstance(answer, wire.Refused):
            raise EngineLost(f"{self._peer} refuses to pair: {answer.failure.message}", detail=answer.failure.detail)
        if not isinstance(answer, wire.DecodeHello):
            raise EngineLost(f"{self._peer} answered the hello with {type(answer).__name__}; all must be of one version")
        return answer

    async def _live(self, drive: Drive, hello: wire.DecodeHello, changed: Callable[[], Awaitable[None]]) -> None:
        self._drive, self.client_address, self.reason = drive, hello.client_address, ""
        self._dropped = asyncio.get_running_loop().create_future()
        self._post(ev.DecodeConnected(hello.engine_id, hello.engine_epoch, hello.max_request_tokens))
        log.info("paired", decode=hello.engine_id, epoch=hello.engine_epoch)
        await changed()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(drive.write())
                group.create_task(self._read(drive))
                reason = await self._dropped
                raise EngineLost(f"{self._peer} is given up: {reason}")
        except* MeshError as failures:
            raise failures.exceptions[0] from None

    async def _read(self, drive: Drive) -> None:
        async for message in drive.reports():
            match wire.from_decode(message):
                case wire.Refused(failure):
                    raise EngineLost(f"{self._peer} ends the pairing: {failure.message}", detail=failure.detail)
                case wire.DecodeHello() | None:
                    continue
                case event:
                    self._post(event)
