"""Token ids to text while they arrive, without a broken character."""

import codecs
from collections.abc import Iterable

from services.gateway.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer. Bytes of an unfinished character wait for their rest, so the joined pieces equal the
    decoding of all tokens at once, however the tokens were split; U+FFFD stands only for bytes that are no UTF-8."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """The text that is complete now and was not before."""
        return self._utf8.decode(b"".join(map(self._token_bytes, tokens)))

    def finish(self) -> str:
        """What was held back; no more tokens follow."""
        return self._utf8.decode(b"", final=True)
