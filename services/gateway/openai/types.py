"""What both endpoints take and give: request fields and their rules, deltas, usage, and the dialect of an endpoint."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from k3mesh.client import SamplingParams
from k3mesh.errors import BadRequest

MAX_CHOICES, MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 16, 16, 256, 64
SHOWN_CHARACTERS = 80  # of a wrong value, in an error message

# Parameters that would change the answer and are not served, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "allowed_token_ids": ([],), "audio": (), "bad_words": ([],), "best_of": (1,),
    "chat_template": (), "chat_template_kwargs": ({},), "continue_final_message": (False,), "documents": ([],),
    "echo": (False,), "frequency_penalty": (0,), "function_call": ("none",), "functions": ([],), "guided_choice": (),
    "guided_grammar": (), "guided_json": (), "guided_regex": (), "include_stop_str_in_output": (False,),
    "length_penalty": (1,), "logit_bias": ({},), "logprobs": (False,), "min_p": (0,), "min_tokens": (0,),
    "modalities": (["text"],), "prediction": (), "presence_penalty": (0,), "prompt_logprobs": (), "reasoning_effort": (),
    "repetition_penalty": (1,), "response_format": ({"type": "text"},), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False), "structured_outputs": (), "suffix": ("",), "tools": ([],),
    "tool_choice": ("none", "auto"), "top_logprobs": (0,), "truncate_prompt_tokens": (), "use_beam_search": (False,),
    "verbosity": (), "web_search_options": (),
}  # fmt: skip
# Parameters that do not bear on the answer; accepted and left alone.
HARMLESS = frozenset({
    "cache_salt", "metadata", "parallel_tool_calls", "priority", "prompt_cache_key", "prompt_cache_retention", "request_id",
    "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


class GenerationRequest(BaseModel):
    """The fields that /v1/completions and /v1/chat/completions share."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None  # unset: the one that is served
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)  # 0 and -1 are off
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    stop: Annotated[list[StopString], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = []
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    ignore_eos: bool = False
    return_token_ids: bool = False

    @property
    def new_tokens(self) -> int | None:
        """How many tokens the client asked for at most."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, choice: int) -> SamplingParams:
        """For one of n choices; with a seed each choice has its own, and the first one that of n = 1."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=None if self.seed is None else (self.seed + choice) % (1 << 64),
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice has new: shown text, its tokens, and at the end why it ended."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None  # "stop" | "length"


@dataclass(slots=True)
class Usage:
    """Tokens of a request; the prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    proposed_tokens: int = 0  # by a drafter
    accepted_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        accepted, rejected = self.accepted_tokens, self.proposed_tokens - self.accepted_tokens
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"completion_tokens_details": drafts} if self.proposed_tokens else {}),
        }


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What is equal in all objects of one answer."""

    id: str
    created: int  # Unix seconds
    model: str
    prompt: list[int] = field(repr=False)
    with_token_ids: bool  # token ids are part of the answer
    with_usage: bool  # a stream that ends with a usage chunk; the others then say usage: null


class Answer(Protocol):
    """Makes one endpoint's JSON objects."""

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Chunks that come before a choice's first delta."""
        ...

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, choices: list[Delta], usage: Usage) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        ...


class Dialect(Protocol):
    """One endpoint: how it reads a request and how it writes the answer."""

    name: str
    prompt_field: str  # where the prompt stands in a request

    def parse(self, body: dict[str, Any]) -> GenerationRequest: ...

    async def tokenize(self, request: Any) -> list[int]:
        """The prompt's token ids; BadRequest if there is no way to them."""
        ...

    def default_max_tokens(self, room: int) -> int:
        """When the client names none; `room` is what the context leaves."""
        ...

    def answer(self, head: AnswerHead) -> Answer: ...


Kind = TypeVar("Kind", bound=GenerationRequest)


def read_request(kind: type[Kind], body: dict[str, Any]) -> Kind:
    """A JSON object as a request; null stands for an absent field. BadRequest names the field, its value and the rule."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in kind.model_fields and name not in HARMLESS:
            _refuse_unless_neutral(name, value)
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        raise _explain(error) from error
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options: only allowed with stream = true", param="stream_options")
    return request


def _refuse_unless_neutral(name: str, value: Any) -> None:
    if name not in NEUTRAL:
        raise BadRequest(f"{name}: unknown parameter; remove it", param=name, detail="unknown_parameter")
    if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name]):
        raise BadRequest(f"{name} = {show(value)}: not supported; remove it", param=name, detail="unsupported_parameter")


def _explain(error: ValidationError) -> BadRequest:
    problem = error.errors(include_url=False)[0]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem["loc"]).removeprefix(".")
    if problem["type"] == "missing":
        return BadRequest(f"{param}: required and missing", param=param)
    return BadRequest(f"{param} = {show(problem['input'])}: {problem['msg']}", param=param)


def show(value: Any) -> str:
    """A client's value for an error message, cut to a readable length."""
    text = repr(value) if not isinstance(value, list) or len(value) <= 8 else f"list of {len(value)}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
