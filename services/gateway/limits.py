"""What one request may be, and how many there may be at once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from k3mesh.client import Model
from k3mesh.errors import BadRequest, Cancelled, EngineLost, Overloaded
from services.gateway.openai.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType

BODY_TIMEOUT_S = 60.0


class Admission:
    """Counts the choices that are in flight and refuses more than `limit`; refuses all when the gateway shuts down."""

    def __init__(self, limit: int):
        self.limit = limit
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def places(self, count: int) -> Iterator[None]:
        """Hold `count` places. Overloaded if they are not free: nothing waits here, the mesh has the queue."""
        if self.draining:
            raise EngineLost("this gateway is shutting down; send the request again")
        if self.in_flight + count > self.limit:
            raise Overloaded(f"{self.in_flight} of {self.limit} requests are in flight; try again later")
        self.in_flight += count
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= count
            if self.in_flight == 0:
                self._idle.set()

    async def idle(self) -> None:
        await self._idle.wait()


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object of at most `max_bytes`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType(f"content-type {media_type or '(none)'!r}: must be application/json")
    try:
        body = orjson.loads(await _read_body(request, max_bytes))
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}", detail="invalid_json") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object", detail="invalid_json")
    return body


async def _read_body(request: Request, max_bytes: int) -> bytearray:
    """At most `max_bytes`, also when the client declares less than it sends."""
    too_large = BodyTooLarge(f"the body is larger than {max_bytes} bytes, the most that this gateway takes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client went away while it sent the request") from None
    return body


def check_prompt(prompt: list[int], model: Model, param: str) -> None:
    """BadRequest unless the mesh can hold the prompt and at least one new token."""
    if not prompt:
        raise BadRequest(f"{param}: the prompt is empty; send at least one token", param=param)
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
        raise BadRequest(f"{param}: token id {wrong} is outside the vocabulary 0..{model.vocab_size - 1}", param=param)
    most = min(model.max_prompt_tokens or model.max_model_len, model.max_model_len - 1)
    if len(prompt) > most:
        raise BadRequest(
            f"{param}: the prompt has {len(prompt)} tokens, but at most {most} fit (context length {model.max_model_len}); "
            "send a shorter one",
            param=param,
            detail="context_length_exceeded",
        )


def check_new_tokens(wanted: int, prompt_tokens: int, model: Model) -> None:
    """BadRequest if prompt and answer together exceed the context."""
    room = model.max_model_len - prompt_tokens
    if wanted > room:
        raise BadRequest(
            f"max_tokens = {wanted}: the context length is {model.max_model_len} and the prompt has {prompt_tokens} tokens, "
            f"which leaves {room}; ask for at most that",
            param="max_tokens",
            detail="context_length_exceeded",
        )
