"""Requests and answers as OpenAI's API has them, without a server."""

import pytest

from k3mesh.errors import BadRequest, EngineLost, MeshError, NotFound, Overloaded, TransferFailed
from services.gateway.generation import Choice, child_id
from services.gateway.openai.chat import ChatRequest
from services.gateway.openai.completions import CompletionRequest
from services.gateway.openai.errors import error_body, error_headers
from services.gateway.openai.types import HARMLESS, NEUTRAL, Delta, read_request
from services.gateway.text.tokenizer import Tokenizer
from tests.lib.byte_tokenizer import byte_tokenizer

INNER = byte_tokenizer()
TOKENIZER = Tokenizer(INNER)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def test_null_stands_for_an_absent_field():
    nothing: dict[str, object] = {name: None for name in [*ChatRequest.model_fields, *NEUTRAL, *HARMLESS]}
    assert read_request(ChatRequest, nothing | CHAT) == read_request(ChatRequest, CHAT)


def test_max_completion_tokens_goes_before_max_tokens():
    assert read_request(ChatRequest, CHAT | {"max_tokens": 5}).new_tokens == 5
    assert read_request(ChatRequest, CHAT | {"max_tokens": 5, "max_completion_tokens": 3}).new_tokens == 3


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_field_that_would_change_the_answer_is_refused_by_name(name):
    with pytest.raises(BadRequest, match=f"^{name} = ") as caught:
        read_request(CompletionRequest, {"model": "m", "prompt": "x", name: {"some": "thing"}})
    assert (caught.value.param, caught.value.detail) == (name, "unsupported_parameter")


def test_zero_is_not_false_where_it_asks_for_something():
    with pytest.raises(BadRequest, match="logprobs = 0"):
        read_request(CompletionRequest, {"model": "m", "prompt": "x", "logprobs": 0})
    read_request(CompletionRequest, {"model": "m", "prompt": "x", "logprobs": False, "presence_penalty": 0.0})


def test_a_long_wrong_value_is_cut_in_the_message():
    with pytest.raises(BadRequest) as caught:
        read_request(CompletionRequest, {"model": "m" * 10, "prompt": "x", "temperature": "y" * 10_000})
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("error", "body", "headers"),
    [
        (BadRequest("b", param="n"), ("b", "invalid_request_error", "n", "bad_request"), {}),
        (NotFound("m", detail="model_not_found"), ("m", "invalid_request_error", None, "model_not_found"), {}),
        (Overloaded("o", retry_after=1.2), ("o", "rate_limit_error", None, "overloaded"), {"retry-after": "2"}),
        (EngineLost("e", detail="UNAVAILABLE"), ("e", "server_error", None, "engine_lost"), {"retry-after": "1"}),
        (TransferFailed("t", detail="PD_X"), ("t", "server_error", None, "transfer_failed"), {}),
    ],
)
def test_errors_have_openais_shape(error: MeshError, body, headers):
    message, kind, param, code = body
    assert error_body(error) == {"error": {"message": message, "type": kind, "param": param, "code": code}}
    assert error_headers(error) == headers


def test_a_stop_string_inside_a_batch_cuts_its_tokens_too():
    choice = Choice(TOKENIZER, ["CD"], frozenset())
    tokens = INNER.encode("ABCDEF").ids
    assert choice.push(tokens) == Delta("AB", tuple(tokens[:4]), "stop")


def test_held_back_text_comes_with_the_end():
    choice = Choice(TOKENIZER, ["XYZ"], frozenset())
    assert choice.push(INNER.encode("AX").ids).text == "A"
    assert choice.finish("length") == Delta("X", (), "length")


def test_every_choice_has_an_id_that_the_mesh_takes():
    assert child_id("r", 0) == "r"
    assert child_id("r", 3) == "r-3"
    ids = {child_id("x" * 64, index) for index in range(16)}
    assert len(ids) == 16 and max(map(len, ids)) == 64
