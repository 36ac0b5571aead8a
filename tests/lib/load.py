"""Requests to a running mesh and what must hold after them."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import redis.asyncio

from tests.lib.mesh import Mesh

# What is in use because of a request. All of it returns to nothing when no request is left.
LEFT_BY_REQUESTS = (
    "queued", "reserving", "reserved", "receiving", "running", "transferring", "releasing", "resident", "finishing",
    "quarantined", "blocks_used", "slots_used", "places_used", "pins", "rooms", "places", "windows", "blocks_in_tables",
    "retracted", "image_blocks_used", "pending_steps", "staging_frames_used", "frames_offered", "batches_in_flight",
    "client_streams",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    cached_tokens: int = 0


def prompts(count: int, lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    """Random token ids (no special ones) of the given lengths, in turn."""
    chosen = random.Random(seed)
    return [[chosen.randrange(300, vocab) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


async def complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int, **more: Any) -> Answer:
    """POST /v1/completions with token ids, not streamed."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **more}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice, usage = response.json()["choices"][0], response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(choice["token_ids"]))
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(prompt, choice["token_ids"], choice["finish_reason"], cached)


async def complete_all(mesh: Mesh, requests: list[list[int]], max_tokens: int, at_once: int, **more: Any) -> list[Answer]:
    """All of them, `at_once` at a time, in order of request."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:

        async def one(prompt: list[int]) -> Answer:
            async with gate:
                return await complete(client, prompt, max_tokens, **more)

        return await asyncio.gather(*(one(prompt) for prompt in requests))


async def attempt(mesh: Mesh, prompt: list[int], max_tokens: int = 60, **more: Any) -> Answer | int:
    """The answer, or the status of the error: a well-formed one in any case; 0 if the gateway dies under it."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    try:
        async with httpx.AsyncClient(base_url=mesh.url, timeout=300) as client:
            response = await client.post("/v1/completions", json=body | more)
    except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):
        return 0
    if response.status_code == 200:
        choice = response.json()["choices"][0]
        return Answer(prompt, choice["token_ids"], choice["finish_reason"])
    error = response.json()["error"]
    assert error["message"] and error["type"] and error["code"], error
    return response.status_code


async def health(mesh: Mesh) -> int:
    """The status of GET /health; 0 where nobody answers."""
    async with httpx.AsyncClient(base_url=mesh.url, timeout=5) as client:
        try:
            return (await client.get("/health")).status_code
        except httpx.TransportError:
            return 0


async def until_health(mesh: Mesh, status: int = 200, within: float = 60.0) -> None:
    async with asyncio.timeout(within):
        while await health(mesh) != status:
            await asyncio.sleep(0.1)


async def in_use(mesh: Mesh) -> dict[str, dict[str, int]]:
    """Counters of requests that are not zero, by process, and how many the journal holds as live, by owner."""
    left = {
        name: {key: inspection.counters[key] for key in LEFT_BY_REQUESTS if inspection.counters.get(key)}
        for name, inspection in (await mesh.inspect()).items()
    }
    async with redis.asyncio.from_url(mesh.redis_url, decode_responses=True) as journal:
        left["journal"] = {key: await journal.scard(key) async for key in journal.scan_iter("k3:live:*")}
    return {name: counters for name, counters in left.items() if counters}


async def assert_nothing_left(mesh: Mesh, within: float = 5.0) -> None:
    """Every counter of every process returns to its start within `within` seconds."""
    left: dict[str, dict[str, int]] = {}
    try:
        async with asyncio.timeout(within):
            while left := await in_use(mesh):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"still in use after {within} s: {left}") from None
