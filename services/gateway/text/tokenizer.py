"""Text to token ids and token ids to bytes, by a model directory's tokenizer.json."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import tokenizers

from k3mesh.errors import ConfigError

INLINE_CHARACTERS = 2048  # what is encoded on the loop's own thread; such a text takes well under a millisecond
ENCODER_THREADS = 2


class Tokenizer:
    """A byte-level BPE tokenizer: each token is a run of bytes, and an answer's text is the UTF-8 of all its bytes.

    That property is what makes incremental detokenisation exact, so a tokenizer of another kind is refused.
    """

    def __init__(self, inner: tokenizers.Tokenizer):
        self._inner = inner
        self._special = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._pool = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        """The tokenizer of a model directory; None if it has none. ConfigError if it cannot be used."""
        if not directory.is_dir():
            raise ConfigError(f"--tokenizer {directory}: there is no such directory", param="tokenizer")
        path = directory / "tokenizer.json"
        if not path.exists():
            return None
        try:
            description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise ConfigError(f"--tokenizer {directory}: tokenizer.json cannot be read: {error}", param="tokenizer") from error
        kinds = _decoder_kinds(description.get("decoder"))
        if set(kinds) != {"ByteLevel"}:
            raise ConfigError(
                f"--tokenizer {directory}: the decoder of tokenizer.json is {'+'.join(kinds) or 'missing'}, but only ByteLevel "
                "is supported; convert the tokenizer to byte-level BPE",
                param="tokenizer",
            )
        return cls(inner)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; a long text is encoded in a thread, and the loop runs on meanwhile."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._encode, text, add_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the text: nothing for special tokens and for ids without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def _find_bytes(self, token: int) -> bytes:
        written = None if token in self._special else self._inner.id_to_token(token)
        if written is None:
            return b""
        try:
            return bytes(BYTE_OF[character] for character in written)
        except KeyError:  # an added token stands in the vocabulary as plain text
            return written.encode()


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for inner in decoder["decoders"] for kind in _decoder_kinds(inner)]
    return [decoder["type"]]


def _byte_alphabet() -> dict[str, int]:
    """Character → byte, as GPT-2's byte-level BPE writes them: printable Latin-1 bytes stand for themselves, the other
    68 are, in order, the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
