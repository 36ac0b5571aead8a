"""Prompts sent through a mesh's HTTP door, some at a time: what came back and how long it took."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from k3mesh.errors import EngineLost, MeshError

ANSWER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids or a text to go on with, or a question for the chat template."""

    text: str | list[int] = ""
    chat: str = ""

    def request(self) -> tuple[str, dict[str, Any]]:
        """The path that takes it, and its part of the body."""
        if self.chat:
            return "/v1/chat/completions", {"messages": [{"role": "user", "content": self.chat}]}
        return "/v1/completions", {"prompt": self.text}


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts once."""

    answers: list[list[int]]  # token ids, by prompt
    tokens: int  # generated, those that end an answer included
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


async def drive(url: str, prompts: Sequence[Prompt], at_once: int, **options: Any) -> Pass:
    """Send all prompts, `at_once` at a time, with more fields of the body. MeshError of the first one that fails."""
    places = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> dict[str, Any]:
        async with places:
            path, body = prompt.request()
            return await post(url, path, {**body, **options, "return_token_ids": True})

    started = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
    except* MeshError as failed:
        raise failed.exceptions[0] from None
    seconds = time.monotonic() - started
    answers = [task.result() for task in tasks]
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return Pass([answer["choices"][0]["token_ids"] for answer in answers], tokens, seconds)


async def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A JSON object for a JSON object. MeshError with the server's own words if it refuses."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                answered = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise EngineLost(f"{url} does not answer ({error!r}); see the gateway's log") from None
    status, _, rest = answered.partition(b"\r\n")
    try:
        answer = json.loads(rest.partition(b"\r\n\r\n")[2])
        if status.split()[1] == b"200":
            return answer
        message = answer["error"]["message"]
    except (ValueError, KeyError, TypeError, IndexError):
        raise EngineLost(f"POST {path}: the answer was cut off or is no JSON ({answered[:80]!r}); see the logs") from None
    raise MeshError(f"POST {path}: {status.decode()}: {message}")
