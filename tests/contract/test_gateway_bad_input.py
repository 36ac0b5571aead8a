"""What a client may get wrong: each mistake has one clear answer in OpenAI's shape with the right status, and no hang."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lib.byte_tokenizer import write_tokenizer
from tests.lib.gateway import RunningGateway, running_gateway
from tests.lib.redis_server import RedisServer

COMPLETION = {"model": "tiny", "prompt": "hello"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
MAX_BODY, CONTEXT = 200_000, 4096


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def gateway(tmp_path: Path, redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    write_tokenizer(tmp_path)
    async with running_gateway(tmp_path, redis_server.url, max_body_bytes=MAX_BODY) as running:
        yield running
        assert running.mesh.requests == {}, "the mesh was asked for a request that is wrong"


def refused(response: httpx.Response, status: int, names: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert "x-request-id" in response.headers
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert names in error["message"] and error["type"] and error["code"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"model": "tiny", "prompt": NaN}', "not valid JSON"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
async def test_a_body_that_is_no_json_object(gateway, body, names):
    headers = {"content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused(await gateway.http.post(path, content=body, headers=headers), 400, names)


@pytest.mark.parametrize(
    ("change", "names", "param"),
    [
        ({"model": 7}, "model = 7", "model"),
        ({"prompt": None}, "prompt: required", "prompt"),
        ({"prompt": ""}, "the prompt is empty", "prompt"),
        ({"prompt": []}, "the prompt is empty", "prompt"),
        ({"prompt": {}}, "must be a string or a list of token ids", "prompt"),
        ({"prompt": 5}, "must be a string or a list of token ids", "prompt"),
        ({"prompt": [1, 2.5]}, "must be a string or a list of token ids", "prompt"),
        ({"prompt": [1, True]}, "must be a string or a list of token ids", "prompt"),
        ({"prompt": ["a", "b"]}, "holds 2 prompts", "prompt"),
        ({"prompt": [[1], [2]]}, "holds 2 prompts", "prompt"),
        ({"prompt": [-1]}, "token id -1 is outside the vocabulary 0..399", "prompt"),
        ({"prompt": [1, 400]}, "token id 400 is outside", "prompt"),
        ({"prompt": [10**18]}, "is outside the vocabulary", "prompt"),
        ({"prompt": [1] * CONTEXT}, "at most 4095 fit", "prompt"),
        ({"prompt": "ab " * CONTEXT}, "at most 4095 fit", "prompt"),
        ({"max_tokens": -1}, "max_tokens = -1", "max_tokens"),
        ({"max_tokens": 0}, "max_tokens = 0", "max_tokens"),
        ({"max_tokens": CONTEXT}, "which leaves", "max_tokens"),
        ({"max_tokens": 2**62}, "which leaves", "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens", "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens = '10'", "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens = 1.5", "max_tokens"),
        ({"max_tokens": True}, "max_tokens = True", "max_tokens"),
        ({"temperature": -0.1}, "temperature = -0.1", "temperature"),
        ({"temperature": 2.5}, "temperature = 2.5", "temperature"),
        ({"temperature": "hot"}, "temperature = 'hot'", "temperature"),
        ({"top_p": 0}, "top_p = 0", "top_p"),
        ({"top_p": 1.5}, "top_p = 1.5", "top_p"),
        ({"top_k": -2}, "top_k = -2", "top_k"),
        ({"seed": 2**64}, "seed", "seed"),
        ({"n": 0}, "n = 0", "n"),
        ({"n": 100}, "n = 100", "n"),
        ({"stop": [""]}, "at least 1 character", "stop[0]"),
        ({"stop": 5}, "stop = 5", "stop"),
        ({"stop": ["x"] * 17}, "at most 16", "stop"),
        ({"stop": "x" * 300}, "at most 256", "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0] = -1", "stop_token_ids[0]"),
        ({"stream": "yes"}, "stream = 'yes'", "stream"),
        ({"stream_options": {"include_usage": True}}, "only allowed with stream", "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage", "stream_options.include_usage"),
        ({"logprobs": 0}, "logprobs = 0: not supported", "logprobs"),
        ({"logprobs": 5}, "logprobs = 5: not supported", "logprobs"),
        ({"echo": True}, "echo = True: not supported", "echo"),
        ({"suffix": "end"}, "suffix", "suffix"),
        ({"best_of": 2}, "best_of", "best_of"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5", "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty", "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias"),
        ({"tools": [{"type": "function"}]}, "tools", "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "response_format"),
        ({"guided_json": {}}, "guided_json", "guided_json"),
        ({"temprature": 0.5}, "temprature: unknown parameter", "temprature"),
    ],
)
async def test_a_wrong_field_is_named_with_its_value_and_rule(gateway, change, names, param):
    refused(await gateway.http.post("/v1/completions", json=COMPLETION | change), 400, names, param)


async def test_fields_that_ask_for_nothing_are_taken(tmp_path, redis_server):
    write_tokenizer(tmp_path)
    nothing = {
        "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "top_logprobs": None, "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "echo": False, "best_of": 1, "min_p": 0, "suffix": None,
        "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "stop": None, "n": None,
    }  # fmt: skip
    async with running_gateway(tmp_path, redis_server.url) as gateway:
        response = await gateway.http.post("/v1/chat/completions", json=CHAT | nothing)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("messages", "names", "param"),
    [
        (None, "messages: required", "messages"),
        ([], "at least one message", "messages"),
        ("hello", "messages = 'hello'", "messages"),
        (["hello"], "messages[0] = 'hello': must be an object", "messages[0]"),
        ([{"content": "x"}], "messages[0].role = None: must be one of", "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role = 'wizard'", "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role = 'tool'", "messages[0].role"),
        ([{"role": "user"}], "messages[0].content = None", "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content = 5", "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content", "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}]}],
            "a part of type 'image_url' is not supported",
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "must be a string", "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name = 5", "messages[0].name"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls: not supported", "messages[0].tool_calls"),
        ([{"role": "user", "content": "x " * 5000}], "at most 4095 fit", "messages"),
    ],
)
async def test_wrong_messages_are_named_by_place(gateway, messages, names, param):
    refused(await gateway.http.post("/v1/chat/completions", json=CHAT | {"messages": messages}), 400, names, param)


async def test_unknown_paths_methods_and_models(gateway):
    refused(await gateway.http.get("/v1/nothing"), 404, "/v1/nothing")
    refused(await gateway.http.get("/v1/completions"), 405, "takes POST only")
    refused(await gateway.http.delete("/v1/models"), 405, "takes")
    refused(await gateway.http.post("/v1/completions", json=COMPLETION | {"model": "huge"}), 404, "'huge'", "model")


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
async def test_a_wrong_content_type_is_415(gateway, media_type):
    response = await gateway.http.post("/v1/completions", content=json.dumps(COMPLETION), headers={"content-type": media_type})
    refused(response, 415, "must be application/json")


async def test_a_body_above_the_limit_is_413_declared_or_not(gateway):
    body = json.dumps(COMPLETION | {"prompt": "x" * MAX_BODY}).encode()
    headers = {"content-type": "application/json"}
    refused(await gateway.http.post("/v1/completions", content=body, headers=headers), 413, "larger than 200000 bytes")

    async def undeclared() -> AsyncIterator[bytes]:
        yield body[: len(body) // 2]
        yield body[len(body) // 2 :]

    refused(await gateway.http.post("/v1/completions", content=undeclared(), headers=headers), 413, "larger than 200000 bytes")


async def raw(gateway: RunningGateway, request: bytes) -> tuple[int, dict[str, Any]]:
    """Send bytes, read the answer to its end. -> status, JSON body."""
    reader, writer = await gateway.connect()
    writer.write(request)
    await writer.drain()
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"x-%d: y\r\n" % number for number in range(300)) + b"\r\n",
        b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        b"x: " + b"y" * 400_000,  # never ends
        b"y" * 400_000,  # not even a name
    ],
)
async def test_headers_too_many_or_too_large_are_431(gateway, head):
    status, body = await raw(gateway, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + head)
    assert (status, body["error"]["code"]) == (431, "request_header_fields_too_large")


async def test_what_is_no_http_is_a_400_in_json(gateway):
    status, body = await raw(gateway, b"hello\r\n\r\n")
    assert (status, body["error"]["code"]) == (400, "invalid_http")


async def test_many_headers_below_the_bound_pass(gateway):
    response = await gateway.http.get("/v1/models", headers={f"x-{number}": "y" * 200 for number in range(240)})
    assert response.status_code == 200


async def test_a_wrong_key_is_401_and_the_right_one_is_taken(tmp_path, redis_server):
    async with running_gateway(tmp_path, redis_server.url, api_key="secret") as gateway:
        refused(await gateway.http.get("/v1/models"), 401, "API key")
        refused(await gateway.http.get("/v1/models", headers={"authorization": "Bearer wrong"}), 401, "API key")
        assert (await gateway.http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await gateway.http.get("/health")).status_code == 200
