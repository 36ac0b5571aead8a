"""The mesh as the gateway sees it: what it serves, whether it is ready, what its schedulers count."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from k3mesh.client import Client, Inspection, Model
from k3mesh.errors import BadRequest, EngineLost, MeshError
from services.runtime.ledger import Ledger

DESCRIBE_TIMEOUT_S = 2.0
INSPECT_TIMEOUT_S = 1.0
ID_IN_USE = "request_id_in_use"  # the detail by which the mesh, too, says so


class Mesh:
    """The way to the schedulers, through the SDK, and the journal that every request is written to."""

    def __init__(self, client: Client, ledger: Ledger):
        self.client = client
        self.ledger = ledger
        self.known_model: Model | None = None
        self._in_use: set[str] = set()

    @contextmanager
    def claim(self, request_id: str) -> Iterator[None]:
        """Keep an id for one request: a second one under it would write into the first one's journal."""
        if request_id in self._in_use:
            message = f"request id {request_id!r} is in use; give each request its own"
            raise BadRequest(message, param="x-request-id", detail=ID_IN_USE)
        self._in_use.add(request_id)
        try:
            yield
        finally:
            self._in_use.discard(request_id)

    async def model(self) -> Model:
        """What is served. EngineLost while the mesh is not ready or new requests cannot be journalled."""
        if not self.ledger.available:
            raise EngineLost("Redis is away, so no new requests are taken; try again when it is back", retry_after=5)
        if self.known_model is None:
            model = await self._describe()
            if not model.ready:
                raise EngineLost(f"the mesh is not ready: {model.not_ready_reason}")
            self.known_model = model
        return self.known_model

    def forget(self) -> None:
        """An engine was lost: ask again what is served, when it is back."""
        self.known_model = None

    async def not_ready(self) -> str | None:
        """Why new requests would be refused now; None if they would be taken."""
        if not self.ledger.available:
            return "Redis is away"
        try:
            model = await self._describe()
        except MeshError as error:
            return error.message
        return None if model.ready else model.not_ready_reason or "the mesh does not say why"

    async def inspect(self) -> list[Inspection]:
        """The counters of both schedulers, as far as they answer in time."""
        try:
            async with asyncio.timeout(INSPECT_TIMEOUT_S):
                model = await self._describe()
        except (TimeoutError, MeshError):
            return []
        calls = [self._inspect("prefill-scheduler", self.client.address)]
        if model.decode_address:
            calls.append(self._inspect("decode-scheduler", model.decode_address))
        return [inspection for inspection in await asyncio.gather(*calls) if inspection is not None]

    async def _describe(self) -> Model:
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                return await self.client.describe()
        except TimeoutError:
            message = f"the prefill scheduler at {self.client.address} does not answer within {DESCRIBE_TIMEOUT_S:g} s"
            raise EngineLost(f"{message}; check that it runs") from None

    async def _inspect(self, service: str, address: str) -> Inspection | None:
        try:
            async with asyncio.timeout(INSPECT_TIMEOUT_S):
                return await self.client.inspect(service, address)
        except (TimeoutError, MeshError):
            return None
