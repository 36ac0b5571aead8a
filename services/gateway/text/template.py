"""The model's chat template: messages to the prompt's text."""

import datetime
import json
from pathlib import Path
from typing import Any, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from k3mesh.errors import BadRequest, ConfigError

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A Jinja template in a sandbox, with the names that Hugging Face's chat templates use.

    Templates come from the model directory alone, never from a request.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """From chat_template.jinja or tokenizer_config.json; None if neither has one. ConfigError if it is broken."""
        try:
            config = _read_config(directory / "tokenizer_config.json")
            file = directory / "chat_template.jinja"
            source = file.read_text(encoding="utf-8") if file.exists() else _default(config.get("chat_template"))
            return None if source is None else cls(source, _special_tokens(config))
        except (OSError, ValueError, jinja2.TemplateError) as error:
            raise ConfigError(
                f"--tokenizer {directory}: the chat template cannot be used: {error}", param="tokenizer"
            ) from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, ending where the assistant is to speak. BadRequest if the template refuses the messages."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise BadRequest(f"messages: the model's chat template refuses them: {error}", param="messages") from error


def _read_config(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _default(template: str | list[dict[str, str]] | None) -> str | None:
    """A checkpoint may name several templates; chat uses the one called default."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    given = {name: config.get(name) for name in SPECIAL_TOKENS}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in given.items() if token}


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """As in Hugging Face's environment: no HTML escapes, characters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
