"""Every request ends, and whatever way it ends leaves nothing behind."""

import asyncio
import random
from collections.abc import AsyncGenerator

import httpx
import pytest
import redis.asyncio

from k3mesh.client import Client, SamplingParams
from k3mesh.errors import BadRequest, DeadlineExceeded
from tests.lib.load import assert_nothing_left, complete, complete_all, in_use, prompts
from tests.lib.mesh import Mesh

LONG = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}


async def first_token(response: httpx.Response) -> AsyncGenerator[str]:
    """Returns when the first token is there: the lines that follow. Closing them leaves the response."""
    lines = response.aiter_lines()
    while not (await anext(lines)).startswith("data: "):
        pass
    return lines


async def test_a_client_that_leaves_while_tokens_flow_frees_everything_within_a_second(mesh: Mesh):
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as client:
        body = {"prompt": prompts(1, [200], 1024, 1)[0], "stream": True, **LONG}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = await first_token(response)
            assert await in_use(mesh), "the request holds something while it runs"
            await lines.aclose()
    await assert_nothing_left(mesh, within=1.0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_byte_frees_everything_within_a_second(mesh: Mesh, stream: bool):
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as client:
        body = {"prompt": prompts(1, [1000], 1024, 2 + stream)[0], "stream": stream, **LONG, "max_tokens": 100}
        sent = asyncio.ensure_future(client.post("/v1/completions", json=body))
        async with asyncio.timeout(10):
            while not (await in_use(mesh)).get("prefill-0.scheduler", {}).get("running"):
                await asyncio.sleep(0.005)
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
    await assert_nothing_left(mesh, within=1.0)


async def test_clients_that_leave_at_any_moment_leave_nothing_and_disturb_nobody(mesh: Mesh):
    chance = random.Random(3)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as client:
        undisturbed = await complete(client, [500, 600, 700], max_tokens=16, ignore_eos=True)

        async def leave(prompt: list[int]) -> None:
            try:
                async with asyncio.timeout(chance.uniform(0.001, 0.8)):
                    await client.post("/v1/completions", json={"prompt": prompt, **LONG})
            except TimeoutError:
                pass

        leaving = [leave(prompt) for prompt in prompts(40, [1, 130, 300, 700], 1024, 4)]
        staying = [complete(client, [500, 600, 700], max_tokens=16, ignore_eos=True) for _ in range(4)]
        results = await asyncio.gather(*leaving, *staying)
    assert [answer.tokens for answer in results[-4:]] == [undisturbed.tokens] * 4
    await assert_nothing_left(mesh)


async def test_a_hundred_requests_at_once_all_end(mesh: Mesh):
    async with httpx.AsyncClient(base_url=mesh.url, timeout=100, limits=httpx.Limits(max_connections=None)) as client:

        async def send(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            return (await client.post("/v1/completions", json=body)).status_code

        statuses = await asyncio.gather(*(send(prompt) for prompt in prompts(100, [1, 20, 150], 1024, 5)))
    assert set(statuses) <= {200, 429, 503} and statuses.count(200) >= 32
    await assert_nothing_left(mesh)


async def test_an_ended_deadline_is_a_typed_error_and_frees_everything(mesh: Mesh):
    async with Client(mesh.prefill_address) as client:
        stream = await client.submit([5, 6, 7], SamplingParams(max_tokens=1900, ignore_eos=True), timeout=0.7)
        with pytest.raises(DeadlineExceeded):
            async for _ in stream:
                pass
    await assert_nothing_left(mesh)


async def test_a_request_that_can_never_fit_is_refused_naming_the_values(mesh: Mesh):
    async with Client(mesh.prefill_address) as client:
        with pytest.raises(BadRequest, match=r"2000.*2048|2048.*2000"):
            async for _ in await client.submit([5] * 2000, SamplingParams(max_tokens=100)):
                pass
        with pytest.raises(BadRequest, match="empty"):
            async for _ in await client.submit([], SamplingParams(max_tokens=1)):
                pass
        with pytest.raises(BadRequest, match="1024"):
            async for _ in await client.submit([5, 1024], SamplingParams(max_tokens=1)):
                pass
    await assert_nothing_left(mesh)


async def test_a_request_of_one_token_ends_on_prefill(mesh: Mesh):
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as client:
        one = await complete(client, [500, 600, 700], max_tokens=1)
        more = await complete(client, [500, 600, 700], max_tokens=3, ignore_eos=True)
        assert more.tokens[:1] == one.tokens and one.finish_reason == "length"
        stopped = await complete(client, [500, 600, 700], max_tokens=9, stop_token_ids=one.tokens)
        assert stopped.finish_reason == "stop"
    await assert_nothing_left(mesh)


async def test_a_person_cancels_by_redis_and_sees_the_states(mesh: Mesh):
    db = redis.asyncio.from_url(mesh.redis_url, decode_responses=True)
    try:
        async with httpx.AsyncClient(base_url=mesh.url, timeout=30) as client:
            body = {"prompt": [9, 8, 7], "stream": True, **LONG}
            headers = {"x-request-id": "by-hand"}
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                lines = await first_token(response)
                async with asyncio.timeout(5):
                    while await db.hget("k3:req:by-hand", "state") != "DECODING":
                        await asyncio.sleep(0.01)
                await db.xadd("k3:cancel", {"request_id": "by-hand"})
                rest = [line async for line in lines]
            assert any('"error"' in line for line in rest)
        await assert_nothing_left(mesh)
        async with asyncio.timeout(5):
            while await db.hget("k3:req:by-hand", "state") != "CANCELLED":
                await asyncio.sleep(0.02)
        assert 3500 < await db.ttl("k3:req:by-hand") <= 3600
        states = [fields["state"] for _, fields in await db.xrange("k3:req:by-hand:log")]
        for state in ("RECEIVED", "QUEUED", "RESERVED", "BOOTSTRAPPING", "PREFILLING", "TRANSFERRING", "INSTALLED", "DECODING"):
            assert state in states, states
        assert states[-1] == "CANCELLED"
        for owner in ("prefill-0", "decode-0"):
            assert await db.scard(f"k3:live:{owner}") == 0
    finally:
        await db.aclose()


@pytest.mark.timeout(240)
async def test_two_hundred_clients_that_drop_after_fifty_milliseconds_leave_nothing(mesh: Mesh):
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def drop(prompt: list[int]) -> None:
            try:
                async with asyncio.timeout(0.05):
                    await client.post("/v1/completions", json={"prompt": prompt, **LONG, "max_tokens": 100})
            except TimeoutError:
                pass

        await asyncio.gather(*(drop(prompt) for prompt in prompts(200, [1, 130, 300, 700], 1024, 13)))
    await assert_nothing_left(mesh)


@pytest.mark.timeout(240)
async def test_after_a_storm_of_aborts_ten_requests_end_as_they_would_have_before(mesh: Mesh):
    chance, requests = random.Random(14), prompts(10, [3, 300, 900], 1024, 15)
    before = await complete_all(mesh, requests, max_tokens=6, at_once=10, ignore_eos=True)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:

        async def abort(prompt: list[int]) -> None:
            try:
                async with asyncio.timeout(chance.uniform(0.05, 2)):
                    await client.post("/v1/completions", json={"prompt": prompt, **LONG, "max_tokens": 400})
            except TimeoutError:
                pass

        await asyncio.gather(*(abort(prompt) for prompt in prompts(60, [5, 400, 1400], 1024, 16)))
    after = await complete_all(mesh, requests, max_tokens=6, at_once=10, ignore_eos=True)
    assert [answer.tokens for answer in after] == [answer.tokens for answer in before]
    await assert_nothing_left(mesh)


@pytest.mark.timeout(240)
async def test_sixty_four_at_once_get_the_answers_that_each_gets_alone(mesh: Mesh):
    requests = prompts(16, [1, 7, 33, 127, 128, 129, 200, 257], 1024, 17)
    alone = await complete_all(mesh, requests, max_tokens=8, at_once=1, ignore_eos=True)
    together = await complete_all(mesh, requests * 4, max_tokens=8, at_once=64, ignore_eos=True)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone] * 4
    await assert_nothing_left(mesh)
