"""/v1/chat/completions: messages to a prompt, tokens to message deltas."""

from typing import Any

from pydantic import Field

from k3mesh.errors import BadRequest
from services.gateway.openai.types import AnswerHead, Delta, GenerationRequest, Usage, read_request, show
from services.gateway.text.template import ChatTemplate
from services.gateway.text.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant")
PASSED_ON = ("name", "reasoning_content", "reasoning")  # strings of a message that a template may use


class ChatRequest(GenerationRequest):
    messages: list[Any]
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class Chat:
    """The chat endpoint of a model with these text files."""

    name = "chat"
    prompt_field = "messages"

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None):
        self._tokenizer = tokenizer
        self._template = template

    def parse(self, body: dict[str, Any]) -> ChatRequest:
        return read_request(ChatRequest, body)

    async def tokenize(self, request: ChatRequest) -> list[int]:
        messages = read_messages(request.messages)
        if self._tokenizer is None or self._template is None:
            missing = "tokenizer files" if self._tokenizer is None else "chat template"
            raise BadRequest(
                f"messages: this checkpoint has no {missing}; send the prompt to /v1/completions"
                + (" as token ids" if self._tokenizer is None else ""),
                param="messages",
                detail="no_tokenizer" if self._tokenizer is None else "no_chat_template",
            )
        return await self._tokenizer.encode(self._template.render(messages), add_special_tokens=False)

    def default_max_tokens(self, room: int) -> int:
        return room

    def answer(self, head: AnswerHead) -> "ChatAnswer":
        return ChatAnswer(head)


class ChatAnswer:
    """chat.completion objects."""

    def __init__(self, head: AnswerHead):
        self._head = head

    def opening(self, index: int) -> list[dict[str, Any]]:
        chunk = self._chunk([_choice(index, {"delta": {"role": "assistant", "content": ""}}, None)])
        if self._head.with_token_ids and index == 0:
            chunk["prompt_token_ids"] = self._head.prompt
        return [chunk]

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        content: dict[str, Any] = {} if delta.finish_reason and not delta.text else {"content": delta.text}
        choice = _choice(index, {"delta": content}, delta.finish_reason)
        if self._head.with_token_ids:
            choice["token_ids"] = delta.tokens
        return self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage.to_json()}

    def whole(self, choices: list[Delta], usage: Usage) -> dict[str, Any]:
        written: list[dict[str, Any]] = []
        for index, delta in enumerate(choices):
            choice = _choice(index, {"message": {"role": "assistant", "content": delta.text}}, delta.finish_reason)
            if self._head.with_token_ids:
                choice["token_ids"] = delta.tokens
            written.append(choice)
        answer = self._object("chat.completion", written) | {"usage": usage.to_json()}
        return answer | ({"prompt_token_ids": self._head.prompt} if self._head.with_token_ids else {})

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._object("chat.completion.chunk", choices) | ({"usage": None} if self._head.with_usage else {})

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {"id": f"chatcmpl-{head.id}", "object": kind, "created": head.created, "model": head.model, "choices": choices}


def _choice(index: int, said: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}


def read_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """The conversation as a template takes it: role and text content. BadRequest names the message and the rule."""
    if not messages:
        raise BadRequest("messages: must hold at least one message", param="messages")
    return [_read_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _read_message(message: Any, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRequest(f"{at} = {show(message)}: must be an object with role and content", param=at)
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(f"{at}.role = {show(role)}: must be one of {', '.join(ROLES)}", param=f"{at}.role")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise BadRequest(f"{at}.{name}: not supported; remove it", param=f"{at}.{name}")
    read = {"role": "system" if role == "developer" else role, "content": _read_content(message.get("content"), at)}
    for name in PASSED_ON:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise BadRequest(f"{at}.{name} = {show(value)}: must be a string", param=f"{at}.{name}")
        read[name] = value
    return read


def _read_content(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequest(f"{at}.content = {show(content)}: must be a string or a list of text parts", param=f"{at}.content")
    return "\n".join(_read_part(part, f"{at}.content[{n}]") for n, part in enumerate(content))


def _read_part(part: Any, at: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise BadRequest(f"{at}: a part of type {show(kind)} is not supported; this model is served with text alone", param=at)
    if not isinstance(part.get("text"), str):
        raise BadRequest(f"{at}.text = {show(part.get('text'))}: must be a string", param=f"{at}.text")
    return part["text"]
