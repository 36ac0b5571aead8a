"""Streamed completions as a client reads them that does nothing with them but count."""

import asyncio
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from k3mesh.errors import MeshError

ANSWER_S = 300.0


@dataclass(frozen=True, slots=True)
class Answers:
    """What came, from the first event to the last."""

    requests: int
    tokens: int
    events: int
    seconds: float
    tokens_per_s: float


@dataclass(slots=True)
class _Answer:
    first: float
    last: float
    tokens: int
    events: int


async def read_answers(url: str, count: int, prompt: str, tokens: int) -> Answers:
    """`count` streamed answers of so many tokens at once. MeshError if one is refused, cut off or too short."""
    body = {
        "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    try:
        async with asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(_read(url, json.dumps(body).encode(), tokens)) for _ in range(count)]
    except* MeshError as failed:
        raise failed.exceptions[0] from None
    except* (TimeoutError, OSError) as failed:
        raise MeshError(f"{url} does not answer ({failed.exceptions[0]!r}); see the gateway's log") from None
    answers = [task.result() for task in tasks]
    seconds = max(it.last for it in answers) - min(it.first for it in answers)
    total = sum(it.tokens for it in answers)
    return Answers(count, total, sum(it.events for it in answers), round(seconds, 4), round(total / seconds, 1))


async def _read(url: str, body: bytes, tokens: int) -> _Answer:
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise MeshError(f"POST /v1/completions: {status.decode().strip()}: {(await reader.read()).decode()}")
        await reader.readuntil(b"\r\n\r\n")
        first, end, events = time.monotonic(), b"", 0
        while part := await reader.read(1 << 16):
            events += part.count(b"data: ")
            end = (end + part)[-2048:]
        counted = _completion_tokens(end)
    finally:
        writer.close()
    if counted != tokens:
        raise MeshError(f"an answer of {tokens} tokens ended after {counted}: {end[-400:]!r}")
    return _Answer(first, time.monotonic(), tokens, events)


def _completion_tokens(end: bytes) -> int | None:
    """Of the usage in the answer's last chunk."""
    _, found, usage = end.rpartition(b'"completion_tokens":')
    digits = usage[: len(usage) - len(usage.lstrip(b"0123456789"))]
    return int(digits) if found and digits else None
