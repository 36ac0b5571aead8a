"""The prefill schedulers' streams: the pair check, and what goes over them afterwards."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from k3mesh.errors import BadRequest, ConfigError, MeshError
from k3mesh.v1 import request_pb2
from services.contracts.ids import GlobalRank
from services.runtime.telemetry import log
from services.scheduler.decode import events as ev
from services.scheduler.decode import wire
from services.scheduler.decode.fleet import Fleet
from services.scheduler.decode.shape import EngineShape
from services.scheduler.streams import Outbox

HELLO_S = 10.0  # from the opening of a stream to its hello


@dataclass(slots=True)
class _Stream:
    pair: ev.Pair
    epoch: int
    outbox: Outbox[request_pb2.DecodeToPrefill] = field(default_factory=Outbox[request_pb2.DecodeToPrefill])
    ended: bool = False


class Prefills:
    """The stream of the prefill engine that this one is paired with. A new stream of the same engine takes the place of the
    old one, which broke; another engine is refused meanwhile, since agents link to one at a time."""

    def __init__(self, post: Callable[[Any], None], fleet: Fleet, shape: EngineShape, client_address: str):
        self._post, self._fleet, self._shape, self._client_address = post, fleet, shape, client_address
        self._numbers = count(1)
        self._streams: dict[str, _Stream] = {}  # by engine id
        self._by_pair: dict[ev.Pair, _Stream] = {}
        fleet.on_unlinked = self._unlinked

    def __len__(self) -> int:
        return len(self._by_pair)

    async def serve(
        self, requests: AsyncIterator[request_pb2.PrefillToDecode], context: Any
    ) -> AsyncIterator[request_pb2.DecodeToPrefill]:
        hello = await self._meet(requests)
        refusal = refusal_of(hello, self._shape, self._fleet.hello.model_fingerprint)
        refusal = refusal or self._taken(hello) or self._outdated(hello)
        if refusal is not None:
            log.warning("refuses to pair", prefill=hello.engine_id, reason=refusal.message)
            yield wire.to_prefill(refusal)
            return
        stream = _Stream(ev.Pair(next(self._numbers)), hello.engine_epoch)
        context.add_done_callback(lambda _: self._end(hello.engine_id, stream, "its stream ended"))
        self._replace(hello.engine_id, stream)
        try:
            await self._fleet.pair(hello)
        except MeshError as error:
            log.warning("pairing failed", prefill=hello.engine_id, reason=error.message)
            yield wire.to_prefill(ev.Failure.of(error))
            return
        if stream.ended:
            return
        self._by_pair[stream.pair] = stream
        self._post(ev.PrefillPaired(stream.pair, hello.engine_id))
        log.info("paired", prefill=hello.engine_id, epoch=hello.engine_epoch)
        stream.outbox.put(wire.to_prefill(self._hello()))
        reader = asyncio.ensure_future(self._read(hello.engine_id, stream, requests))
        try:
            async for message in stream.outbox.sending():
                yield message
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    def send(self, effect: ev.AnswerReserve | ev.CapacityFreed | ev.RoomInstalled | ev.RoomEnded) -> None:
        """Effect: to the prefill scheduler that it concerns, if that is still there."""
        stream = self._by_pair.get(effect.pair)
        if stream is not None:
            stream.outbox.put(wire.to_prefill(effect))

    def close(self) -> None:
        """End all streams when what was sent is out."""
        for stream in self._streams.values():
            stream.outbox.close()

    async def _meet(self, requests: AsyncIterator[request_pb2.PrefillToDecode]) -> wire.PrefillHello:
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            first = None
        hello = wire.prefill_hello(first) if first is not None else None
        if hello is None:
            raise BadRequest(f"the first message of a Pair stream is PrefillHello, within {HELLO_S:g} s")
        return hello

    async def _read(self, engine: str, stream: _Stream, requests: AsyncIterator[request_pb2.PrefillToDecode]) -> None:
        reason = "it closed its stream"
        try:
            async for message in requests:
                event = wire.prefill_event(stream.pair, message)
                if event is not None and not stream.ended:
                    self._post(event)
        except Exception as error:
            reason = f"its stream broke: {error!r}"
        self._end(engine, stream, reason)

    def _replace(self, engine: str, stream: _Stream) -> None:
        before = self._streams.get(engine)
        if before is not None:
            self._end(engine, before, "a newer stream took its place")
        self._streams[engine] = stream

    def _end(self, engine: str, stream: _Stream, reason: str) -> None:
        if stream.ended:
            return
        stream.ended = True
        stream.outbox.close()
        if self._streams.get(engine) is stream:
            del self._streams[engine]
        if self._by_pair.pop(stream.pair, None) is not None:
            log.warning("prefill engine lost", prefill=engine, reason=reason)
            self._post(ev.PrefillLost(stream.pair, reason))

    def _unlinked(self, rank: GlobalRank, failure: ev.Failure) -> None:
        """A pairing stands with all of its agents or not at all: its prefill scheduler starts it again."""
        for engine, stream in list(self._streams.items()):
            if stream.pair in self._by_pair:
                self._end(engine, stream, f"decode agent {rank} has lost its links: {failure.message}")

    def _taken(self, hello: wire.PrefillHello) -> ev.Failure | None:
        other = next((engine for engine in self._streams if engine != hello.engine_id), None)
        if other is None:
            return None
        message = f"decode engine {self._shape.engine_id} is paired with {other}; give {hello.engine_id} one of its own"
        return ev.Failure(ConfigError.code, message, "PD_CONTRACT")

    def _outdated(self, hello: wire.PrefillHello) -> ev.Failure | None:
        live = self._streams.get(hello.engine_id)
        if live is None or hello.engine_epoch >= live.epoch:
            return None
        message = f"prefill engine {hello.engine_id} of epoch {hello.engine_epoch}: epoch {live.epoch} is paired already"
        return ev.Failure(ConfigError.code, message, "PD_STALE")

    def _hello(self) -> wire.DecodeHello:
        shape = self._shape
        return wire.DecodeHello(
            engine_id=shape.engine_id,
            engine_epoch=shape.epoch,
            client_address=self._client_address,
            replicas=shape.replicas,
            tp_size=shape.tp_size,
            verify_width=shape.verify_width,
            max_model_len=shape.max_model_len,
            max_request_tokens=shape.max_request_tokens,
        )


def refusal_of(hello: wire.PrefillHello, shape: EngineShape, model_fingerprint: str) -> ev.Failure | None:
    """Why the two engines cannot serve one request together, with both values; None if they can."""
    rules = (
        ("attention tensor-parallel size", hello.tp_size, shape.tp_size, "--attn-tp-size"),
        ("verify width", hello.verify_width, shape.verify_width, "--speculative-num-draft-tokens"),
        ("context length", hello.max_model_len, shape.max_model_len, "--max-model-len"),
        ("model fingerprint", hello.model_fingerprint, model_fingerprint, "--model"),
        ("count of agents", len(hello.agents), hello.stages * hello.tp_size, "--agents"),
    )
    for what, prefill, decode, flag in rules:
        if prefill != decode:
            message = f"{what}: {prefill} on {hello.engine_id} and {decode} on {shape.engine_id}; {flag} must agree on both"
            return ev.Failure(ConfigError.code, message, "PD_CONTRACT")
    return None
