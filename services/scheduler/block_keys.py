"""Names of cache blocks: a block's key says which tokens it holds, after which tokens, of which model (spec
cache-and-handoff §13)."""

from collections.abc import Iterable
from hashlib import sha256

from services.contracts.ids import BLOCK_TOKENS, TOKEN_BYTES, BlockKey, Token

BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


class BlockKeys:
    """Chained hashes: key i = sha256(key i-1, tokens of block i), and a salt before the first. Equal keys mean equal rows, so
    whatever else the rows depend on belongs into the salt."""

    def __init__(self, *salt: str, tokens_ahead: int = 0):
        """`tokens_ahead`: how many tokens behind a block its rows depend on. One with a NextN layer: its row of a position
        reads the token after it."""
        self.root = BlockKey(sha256("\0".join(salt).encode()).digest())  # stands before the first block
        self._bytes_ahead = tokens_ahead * TOKEN_BYTES

    def of_prompt(self, tokens: bytes) -> tuple[BlockKey, ...]:
        """The keys of a prompt's full blocks, little-endian uint32 tokens -> keys. Its last token is in none of them: it is
        computed for whoever asks, because the first answer token comes from it."""
        count = (len(tokens) // TOKEN_BYTES - 1) // BLOCK_TOKENS
        return self.after(self.root, tokens, count)

    def after(self, key: BlockKey, tokens: bytes, count: int) -> tuple[BlockKey, ...]:
        """The keys of the `count` blocks that begin with `tokens` and follow the block of `key`."""
        keys: list[BlockKey] = []
        for start in range(0, count * BLOCK_BYTES, BLOCK_BYTES):
            key = BlockKey(sha256(key + tokens[start : start + BLOCK_BYTES + self._bytes_ahead]).digest())
            keys.append(key)
        return tuple(keys)


def token_bytes(tokens: Iterable[Token]) -> bytes:
    """As prompts have them: little-endian uint32 each."""
    return b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in tokens)


def tokens_of(data: bytes) -> list[Token]:
    return [Token(int.from_bytes(data[n : n + TOKEN_BYTES], "little")) for n in range(0, len(data), TOKEN_BYTES)]
