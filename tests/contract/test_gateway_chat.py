"""`k3mesh chat` before the real gateway."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k3mesh.cli import chat
from k3mesh.errors import CapacityAborted, ConfigError, EngineLost, MeshError
from tests.lib.byte_tokenizer import END, byte_tokenizer, write_tokenizer
from tests.lib.gateway import RunningGateway, running_gateway
from tests.lib.redis_server import RedisServer

TOKENIZER = byte_tokenizer()
ANSWER = "naïve 東京 👩‍💻"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    write_tokenizer(tmp_path)
    redis_server = RedisServer(tmp_path)
    redis_server.start()
    try:
        async with running_gateway(tmp_path, redis_server.url, api_key="secret") as running:
            running.mesh.script.answer = lambda prompt: [*TOKENIZER.encode(ANSWER).ids, TOKENIZER.token_to_id(END)]
            yield running
    finally:
        redis_server.stop()


async def test_it_prints_the_answers_and_keeps_the_conversation(gateway):
    command = [sys.executable, "-m", "k3mesh.cli.main", "chat", "--url", gateway.url, "--max-tokens", "40"]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, **pipes, env={**os.environ, "K3MESH_API_KEY": "secret"})
    async with asyncio.timeout(30):
        printed, _ = await process.communicate(b"first\n\nsecond\n")
    assert (process.returncode, printed.decode()) == (0, f"{ANSWER}\n{ANSWER}\n")
    talk = f"<|user|>first<|end|><|assistant|>{ANSWER}<|end|><|user|>second<|end|><|assistant|>"
    prompts = [request.prompt for request in gateway.mesh.requests.values()]
    assert prompts[1] == b"".join(token.to_bytes(4, "little") for token in TOKENIZER.encode(talk).ids)


async def test_the_stream_carries_the_request_id(gateway):
    text = await asyncio.to_thread(lambda: list(chat.stream(gateway.url, HELLO, {}, "my-id", "secret")))
    assert "".join(text) == ANSWER
    assert set(gateway.mesh.requests) == {"my-id"}


async def test_errors_are_the_servers_own_words(gateway):
    def refused(url: str, **options: object) -> str:
        with pytest.raises(MeshError) as caught:
            list(chat.stream(url, HELLO, options, api_key="secret"))
        return caught.value.message

    assert "HTTP 400: max_tokens = -1" in await asyncio.to_thread(lambda: refused(gateway.url, max_tokens=-1))
    gateway.mesh.script.fail_after = (3, CapacityAborted("the cache is full"))
    assert "the cache is full" in await asyncio.to_thread(refused, gateway.url)
    with pytest.raises(EngineLost, match="does not answer"):
        list(chat.stream("http://127.0.0.1:1", HELLO, {}))
    with pytest.raises(ConfigError, match="must be http"):
        list(chat.stream("127.0.0.1:1", HELLO, {}))
