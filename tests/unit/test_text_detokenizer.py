"""Promises of the text layer: tokens in any split give the text that all of them give at once."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from k3mesh.errors import ConfigError
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.tokenizer import INLINE_CHARACTERS, Tokenizer
from tests.lib.byte_tokenizer import END, byte_tokenizer

INNER = byte_tokenizer()
TOKENIZER = Tokenizer(INNER)
VOCAB = INNER.get_vocab_size()

token_runs = st.lists(st.lists(st.integers(0, VOCAB + 3), max_size=6), max_size=12)


def joined(pieces: Sequence[Sequence[int]]) -> Iterator[str]:
    detokenizer = Detokenizer(TOKENIZER)
    for piece in pieces:
        yield detokenizer.push(piece)
    yield detokenizer.finish()


@given(token_runs)
@settings(max_examples=400)
def test_any_split_of_any_tokens_gives_the_full_decode(pieces: list[list[int]]) -> None:
    tokens = [token for piece in pieces for token in piece]
    assert "".join(joined(pieces)) == INNER.decode(tokens, skip_special_tokens=True)


@given(st.text(), st.integers(1, 5))
def test_text_comes_back_whole_with_no_replacement_character_in_any_piece(text: str, size: int) -> None:
    tokens = INNER.encode(text.replace("\ufffd", "")).ids
    pieces = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    deltas = list(joined(pieces))
    assert "".join(deltas) == text.replace("\ufffd", "")
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_unfinished_character_waits_and_a_truly_broken_end_shows_once() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    first, second, third = INNER.encode("€").ids
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second]) == ""
    assert detokenizer.push([third]) == "€"
    assert detokenizer.push([first, second]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_and_ids_without_a_token_add_no_text() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    end = INNER.token_to_id(END)
    tokens = [*INNER.encode("a").ids, end, VOCAB + 1000, *INNER.encode("b").ids]
    assert detokenizer.push(tokens) + detokenizer.finish() == "ab"


async def test_long_and_short_texts_are_encoded_alike() -> None:
    text = "héllo ✨ " * INLINE_CHARACTERS
    assert await TOKENIZER.encode(text, add_special_tokens=False) == INNER.encode(text).ids
    assert await TOKENIZER.encode("héllo ✨", add_special_tokens=False) == INNER.encode("héllo ✨").ids


def test_a_directory_without_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.load(tmp_path) is None


def test_a_broken_tokenizer_file_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    other.decoder = tokenizers.decoders.WordPiece()
    other.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["decoder"]["type"] == "WordPiece"
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer.load(tmp_path)
