"""Streamed completions as a client times them: when the first tokens came, when the last, and how many there were."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from k3mesh.errors import EngineLost, MeshError

ANSWER_S = 600.0
DATA = b"data: "


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer. Times in seconds from the request's first byte."""

    first: float  # tokens came
    last: float
    tokens: list[int]

    @property
    def time_per_token(self) -> float:
        """Of each after the first."""
        return (self.last - self.first) / max(1, len(self.tokens) - 1)


async def ask(url: str, body: dict[str, Any]) -> Timed:
    """POST /v1/completions with a stream. MeshError if it is refused, cut off or late."""
    content = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    started = time.monotonic()
    times: list[float] = []
    tokens: list[int] = []
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await _post(url, content)
            try:
                async for event in _events(reader):
                    if found := event["choices"][0].get("token_ids") if event.get("choices") else None:
                        times.append(time.monotonic() - started)
                        tokens += found
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise EngineLost(f"{url} does not answer ({error!r}); see the gateway's log") from None
    if not times:
        raise EngineLost(f"{url}: an answer ended without a token; see the gateway's log")
    return Timed(times[0], times[-1], tokens)


async def _post(url: str, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    status = await reader.readline()
    if b" 200 " not in status:
        answer = (await reader.read()).partition(b"\r\n\r\n")[2]
        writer.close()
        raise MeshError(f"POST /v1/completions: {status.decode().strip()}: {answer.decode(errors='replace')[:300]}")
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Each event's object, up to [DONE]. MeshError if the stream says that it failed."""
    while line := await reader.readline():
        if not line.startswith(DATA):
            continue
        if line.strip() == DATA + b"[DONE]":
            return
        event = json.loads(line[len(DATA) :])
        if "error" in event:
            raise MeshError(f"an answer failed: {event['error']['message']}")
        yield event
    raise EngineLost("an answer was cut off; see the gateway's log")
