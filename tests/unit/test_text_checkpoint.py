"""The text files of checkpoints that this product makes, read by its own gateway."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.template import ChatTemplate
from services.gateway.text.tokenizer import Tokenizer
from services.launch.tokenizer_files import END_OF_MESSAGE, SPECIAL_IDS, tokenizer_files

VOCABULARY = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    for name, content in tokenizer_files(VOCABULARY).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


@given(text=st.text(max_size=200))
async def test_every_text_comes_back_as_it_was(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    tokens = await tokenizer.encode(text, add_special_tokens=False)
    assert "".join(detokenizer.push([token]) for token in tokens) + detokenizer.finish() == text


async def test_a_chat_prompt_has_its_markers_as_single_tokens(folder, tokenizer):
    template = ChatTemplate.load(folder)
    assert template is not None
    prompt = template.render([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])
    tokens = await tokenizer.encode(prompt, add_special_tokens=False)
    first_special = VOCABULARY - SPECIAL_IDS
    assert tokens.count(first_special + END_OF_MESSAGE) == 2
    assert Detokenizer(tokenizer).push(range(first_special, VOCABULARY)) == ""
