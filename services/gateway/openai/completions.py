"""/v1/completions: a text or token ids in, text or token ids out."""

from typing import Any

from k3mesh.errors import BadRequest
from services.gateway.openai.types import AnswerHead, Delta, GenerationRequest, Usage, read_request, show
from services.gateway.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionRequest(GenerationRequest):
    prompt: Any


class Completions:
    """The completion endpoint; without a tokenizer it serves token ids alone."""

    name = "completions"
    prompt_field = "prompt"

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        return read_request(CompletionRequest, body)

    async def tokenize(self, request: CompletionRequest) -> list[int]:
        prompt = read_prompt(request.prompt)
        if isinstance(prompt, list):
            return prompt
        if self._tokenizer is None:
            raise BadRequest(
                "prompt: this checkpoint has no tokenizer files; send the prompt as a list of token ids",
                param="prompt",
                detail="no_tokenizer",
            )
        return await self._tokenizer.encode(prompt, add_special_tokens=True)

    def default_max_tokens(self, room: int) -> int:
        return min(DEFAULT_MAX_TOKENS, room)

    def answer(self, head: AnswerHead) -> "CompletionAnswer":
        return CompletionAnswer(head)


class CompletionAnswer:
    """text_completion objects."""

    def __init__(self, head: AnswerHead):
        self._head = head
        self._begun: set[int] = set()

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        choice = self._choice(index, delta, with_prompt=index not in self._begun)
        self._begun.add(index)
        return self._object([choice]) | ({"usage": None} if self._head.with_usage else {})

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._object([]) | {"usage": usage.to_json()}

    def whole(self, choices: list[Delta], usage: Usage) -> dict[str, Any]:
        written = [self._choice(index, delta, with_prompt=True) for index, delta in enumerate(choices)]
        return self._object(written) | {"usage": usage.to_json()}

    def _choice(self, index: int, delta: Delta, *, with_prompt: bool) -> dict[str, Any]:
        choice = {"index": index, "text": delta.text, "logprobs": None, "finish_reason": delta.finish_reason}
        if self._head.with_token_ids:
            choice |= {"token_ids": delta.tokens} | ({"prompt_token_ids": self._head.prompt} if with_prompt else {})
        return choice

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"cmpl-{head.id}",
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }


def read_prompt(prompt: Any) -> str | list[int]:
    """The one prompt of a request: a text, token ids, or a list that holds one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return prompt
        if all(isinstance(each, str | list) for each in prompt):
            raise BadRequest(f"prompt: holds {len(prompt)} prompts; send one a request", param="prompt")
    raise BadRequest(f"prompt = {show(prompt)}: must be a string or a list of token ids", param="prompt")
