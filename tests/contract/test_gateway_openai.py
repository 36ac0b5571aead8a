"""The gateway judged by OpenAI's own client: both endpoints, streaming and not, in text and in token ids."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from k3mesh.errors import CapacityAborted, Overloaded, TransferFailed
from tests.lib.byte_tokenizer import END, byte_tokenizer, write_tokenizer
from tests.lib.gateway import RunningGateway, running_gateway
from tests.lib.redis_server import RedisServer

TOKENIZER = byte_tokenizer()
EMOJI = "naïve 東京 한국어 갂갃 👩‍👩‍👧‍👦 🏳️‍🌈 — done"
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
GREEDY = {"model": "tiny", "temperature": 0.0}


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def gateway(tmp_path: Path, redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    write_tokenizer(tmp_path)
    async with running_gateway(tmp_path, redis_server.url) as running:
        running.mesh.end_token_ids = (TOKENIZER.token_to_id(END),)
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def says(gateway: RunningGateway, text: str, end: bool = True) -> None:
    """The model's answer from now on."""
    tokens = TOKENIZER.encode(text).ids + ([TOKENIZER.token_to_id(END)] if end else [])
    gateway.mesh.script.answer = lambda prompt: tokens


async def test_a_chat_answer_comes_whole_with_usage_and_a_reason(gateway, client):
    says(gateway, EMOJI)
    answer = await client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == EMOJI
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == ("chat.completion", "tiny", "stop")
    prompt = TOKENIZER.encode("<|user|>hi<|end|><|assistant|>").ids
    submitted = next(iter(gateway.mesh.requests.values()))
    assert submitted.prompt == b"".join(token.to_bytes(4, "little") for token in prompt)
    completion = len(TOKENIZER.encode(EMOJI).ids) + 1
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": completion,
        "total_tokens": len(prompt) + completion,
    }


@pytest.mark.parametrize("batch", [1, 3, 1000])
async def test_streamed_text_equals_the_whole_text_and_no_piece_is_broken(gateway, client, batch):
    says(gateway, EMOJI)
    gateway.mesh.script.batch = batch
    stream = await client.chat.completions.create(**GREEDY, stream=True, messages=[{"role": "user", "content": "hi"}])
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == EMOJI
    assert not any("\ufffd" in (delta.content or "") for delta in deltas)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1


async def test_tokens_are_shown_while_the_answer_is_still_being_made(gateway, client):
    says(gateway, ALPHABET)
    gateway.mesh.script.hold_after = 3
    stream = await client.completions.create(**GREEDY, stream=True, prompt="go", max_tokens=50)
    shown = ""
    async for chunk in stream:
        shown += chunk.choices[0].text
        if shown == "ABC":
            break
    assert gateway.mesh.live  # the mesh has not finished and the client has three tokens
    gateway.mesh.script.release.set()
    assert shown + "".join([chunk.choices[0].text async for chunk in stream]) == ALPHABET


async def test_usage_is_a_last_chunk_of_its_own_only_when_asked_for(gateway, client):
    says(gateway, "abc", end=False)
    stream = await client.completions.create(
        **GREEDY, stream=True, prompt="go", max_tokens=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 2
    assert chunks[-2].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 100])
async def test_nothing_of_a_stop_string_appears_and_the_mesh_stops_working(gateway, client, stream, batch):
    says(gateway, ALPHABET)
    gateway.mesh.script.batch = batch
    gateway.mesh.script.hold_after = 20 if batch < 100 else None  # well after J, before the end
    answer = await client.completions.create(
        **GREEDY, prompt="go", max_tokens=50, stop=["DEFGHIJ"], stream=stream, extra_headers={"X-Request-Id": "stopped"}
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == 10  # A to J
    assert (text, reason) == ("ABC", "stop")
    if batch < 100:
        await gateway.mesh.until(lambda mesh: mesh.ended.get("stopped") == "cancelled")


async def test_sampling_fields_reach_the_mesh_with_openais_defaults(gateway, client):
    await client.completions.create(model="tiny", prompt="one", extra_headers={"X-Request-Id": "default"})
    sampling = gateway.mesh.requests["default"].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, 16)
    await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}],
        temperature=0.5, top_p=0.25, seed=-1, max_completion_tokens=7,
        extra_body={"top_k": 9, "ignore_eos": True, "stop_token_ids": [5, 6], "user": "me", "metadata": {"a": "b"}},
        extra_headers={"X-Request-Id": "given"},
    )  # fmt: skip
    sampling = gateway.mesh.requests["given"].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 9, 7)
    assert (sampling.seed, sampling.ignore_eos, list(sampling.stop_token_ids)) == (2**64 - 1, True, [5, 6])


async def test_chat_without_a_limit_may_fill_the_context(gateway, client):
    says(gateway, "abc")
    await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], extra_headers={"X-Request-Id": "open"}
    )
    submitted = gateway.mesh.requests["open"]
    assert submitted.sampling.max_tokens == gateway.mesh.max_model_len - len(submitted.prompt) // 4


async def test_ignore_eos_runs_on_over_end_tokens_and_shows_none(gateway, client):
    end = TOKENIZER.token_to_id(END)
    gateway.mesh.script.answer = lambda prompt: [end, *TOKENIZER.encode("ab").ids, end, end]
    answer = await client.completions.create(**GREEDY, prompt="go", max_tokens=4, extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("ab", "length", 4)


async def test_a_stop_token_ends_the_answer_and_is_no_text(gateway, client):
    says(gateway, "XYZ")
    stop = TOKENIZER.encode("Y").ids[0]
    answer = await client.completions.create(
        **GREEDY, prompt="go", extra_body={"stop_token_ids": [stop], "return_token_ids": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("X", "stop")
    assert answer.choices[0].token_ids == TOKENIZER.encode("XY").ids


async def test_three_choices_come_with_their_indices(gateway, client):
    says(gateway, "ABC")
    ask = {**GREEDY, "prompt": "go", "n": 3, "seed": 4}
    whole = await client.completions.create(**ask, extra_headers={"X-Request-Id": "three"})
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "ABC"), (1, "ABC"), (2, "ABC")]
    assert whole.usage.prompt_tokens == len(TOKENIZER.encode("go").ids) and whole.usage.completion_tokens == 12
    seeds = {name: request.sampling.seed for name, request in gateway.mesh.requests.items()}
    assert seeds == {"three": 4, "three-1": 5, "three-2": 6}
    texts = {0: "", 1: "", 2: ""}
    async for chunk in await client.completions.create(**ask, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "ABC", 1: "ABC", 2: "ABC"}


async def test_token_ids_go_in_and_come_back(gateway, client):
    ids = TOKENIZER.encode("hello").ids
    ask = {**GREEDY, "prompt": ids, "max_tokens": 3, "extra_body": {"return_token_ids": True}}
    whole = await client.completions.create(**ask)
    assert (whole.choices[0].prompt_token_ids, whole.choices[0].token_ids) == (ids, ids[:3])
    chunks = [chunk async for chunk in await client.completions.create(**ask, stream=True)]
    assert chunks[0].choices[0].prompt_token_ids == ids
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == ids[:3]
    chat = await client.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": "x"}], max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert chat.prompt_token_ids == TOKENIZER.encode("<|user|>x<|end|><|assistant|>").ids
    assert chat.choices[0].token_ids == chat.prompt_token_ids[:2]


async def test_a_checkpoint_without_tokenizer_is_served_ids_in_ids_out(tmp_path, redis_server):
    async with (
        running_gateway(tmp_path, redis_server.url) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = await client.completions.create(**GREEDY, prompt=[7, 8, 9], max_tokens=2)
        assert (whole.choices[0].text, whole.choices[0].token_ids) == ("", [7, 8])
        stream = await client.completions.create(**GREEDY, prompt=[7, 8, 9], stream=True)
        assert [token async for chunk in stream for token in chunk.choices[0].token_ids] == [7, 8, 9]
        with pytest.raises(openai.BadRequestError, match="no tokenizer files"):
            await client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="list of token ids"):
            await client.completions.create(**GREEDY, prompt="text")
        with pytest.raises(openai.BadRequestError, match="stop_token_ids"):
            await client.completions.create(**GREEDY, prompt=[7], stop="x")


async def test_messages_of_text_parts_and_roles_reach_the_template(gateway, client):
    await client.chat.completions.create(
        **GREEDY,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        extra_headers={"X-Request-Id": "long"},
    )
    text = "<|system|>be brief<|end|><|user|>a\nb<|end|><|assistant|>c<|end|><|user|>d<|end|><|assistant|>"
    packed = gateway.mesh.requests["long"].prompt
    assert packed == b"".join(token.to_bytes(4, "little") for token in TOKENIZER.encode(text).ids)


async def test_the_blocking_client_streams_too(gateway):
    says(gateway, EMOJI)

    def blocking() -> tuple[str, list[str]]:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(**GREEDY, stream=True, messages=[{"role": "user", "content": "x"}])
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream), [m.id for m in client.models.list()]

    assert await asyncio.to_thread(blocking) == (EMOJI, ["tiny"])


async def test_models_are_listed_and_found_by_name(gateway, client):
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "k3mesh"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("huge")


async def test_an_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="huge", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_mesh_before_the_first_token_have_their_status(gateway, client, stream):
    gateway.mesh.script.refuse = Overloaded("the queue is full")
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(**GREEDY, prompt="x", stream=stream)
    assert caught.value.response.headers["retry-after"] == "1"
    gateway.mesh.script.refuse = None
    gateway.mesh.script.fail_after = (0, TransferFailed("the handoff failed", detail="PD_TIMEOUT_WAIT"))
    with pytest.raises(openai.InternalServerError) as failed:
        await client.completions.create(**GREEDY, prompt="x", stream=stream)
    assert (failed.value.status_code, failed.value.code) == (502, "transfer_failed")


async def test_an_error_after_the_first_token_is_the_last_event(gateway, client):
    says(gateway, ALPHABET)
    gateway.mesh.script.fail_after = (3, CapacityAborted("the cache is full"))
    shown = ""
    with pytest.raises(openai.APIError, match="the cache is full") as caught:
        async for chunk in await client.completions.create(**GREEDY, prompt="x", stream=True):
            shown += chunk.choices[0].text
    assert (shown, caught.value.code) == ("ABC", "capacity_aborted")
    with pytest.raises(openai.InternalServerError) as whole:
        await client.completions.create(**GREEDY, prompt="x")
    assert whole.value.status_code == 524
