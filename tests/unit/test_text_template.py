"""Chat templates: found where checkpoints keep them, run in a sandbox, and clear when they refuse."""

import json
from pathlib import Path

import pytest

from k3mesh.errors import BadRequest, ConfigError
from services.gateway.text.template import ChatTemplate
from tests.lib.byte_tokenizer import TEMPLATE

HELLO = [{"role": "user", "content": "hello"}]


def config(folder: Path, **fields: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def load(folder: Path) -> ChatTemplate:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template


def test_messages_become_the_prompt_with_special_tokens_of_either_form(tmp_path):
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    config(tmp_path, chat_template=source, bos_token={"content": "<s>"}, eos_token="</s>")
    assert load(tmp_path).render(HELLO) == "<s>hello</s>"


def test_a_list_of_templates_means_its_default(tmp_path):
    config(tmp_path, chat_template=[{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}])
    assert load(tmp_path).render(HELLO) == "yes"


def test_a_template_file_beside_the_config_counts(tmp_path):
    config(tmp_path, eos_token="</s>")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}{{ eos_token }}")
    assert load(tmp_path).render([{"role": "user", "content": "<é>"}]) == '"<é>"</s>'


def test_without_a_template_there_is_none(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(config(tmp_path, eos_token="</s>")) is None


@pytest.mark.parametrize("text", ["{% for %}", "{{ unclosed"])
def test_a_broken_template_is_a_config_error(tmp_path, text):
    with pytest.raises(ConfigError, match="chat template cannot be used"):
        ChatTemplate.load(config(tmp_path, chat_template=text))


def test_what_the_template_refuses_is_a_bad_request_with_its_words(tmp_path):
    template = load(config(tmp_path, chat_template=TEMPLATE))
    with pytest.raises(BadRequest, match="no role wizard") as caught:
        template.render([{"role": "wizard", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__['os'] }}"]
)
def test_a_template_cannot_leave_the_sandbox(tmp_path, attack):
    with pytest.raises(BadRequest):
        load(config(tmp_path, chat_template=attack)).render(HELLO)
