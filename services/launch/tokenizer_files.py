"""A small byte-level BPE tokenizer with K3's special tokens and a chat template in K3's form, in Hugging Face's files.

Ids: the 256 bytes; merges learned from TEXT and MARKUP; and, in the last 256 ids of the vocabulary as in the released K3,
the special tokens. Every UTF-8 text encodes and decodes to itself. Nothing here depends on a library or a machine.
"""

import json
import re
from collections import Counter
from itertools import pairwise

SPECIAL_IDS = 256  # ids kept for special tokens at the vocabulary's end
MIN_VOCABULARY = 256 + SPECIAL_IDS

# Special tokens by their place in the last 256 ids; the released vocabulary of 163,840 has them at 163584 + n.
SPECIAL_TOKENS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",  # ends a message; config.json's eos_token_id
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
BOS, END_OF_MESSAGE, MEDIA, PAD = 0, 2, 21, 255

# A message is <|open|>message role="R"<|sep|>…<|close|>message<|sep|><|end_of_msg|>. The assistant's holds its answer in a
# `response` span, which the prompt's end opens; K3 has a `think` span before it, which a random model has no use for.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}
{%- if part.type != 'text' -%}{{ raise_exception('this model reads text only, not ' ~ part.type) }}{%- endif -%}
{{ part.text }}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|open|>message role="assistant"<|sep|><|open|>response<|sep|>{{ text(message.content) }}<|close|>response<|sep|>
{%- elif message.role in ('system', 'user') -%}
<|open|>message role="{{ message.role }}"<|sep|>{{ text(message.content) }}
{%- else -%}
{{ raise_exception('a message must be of role system, user or assistant, not ' ~ message.role) }}
{%- endif -%}
<|close|>message<|sep|><|end_of_msg|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|open|>message role="assistant"<|sep|><|open|>response<|sep|>{%- endif -%}
"""

TEXT = """
The old harbour wakes before the sun. A lamp is lit in the bakery, and the smell of bread runs down the narrow street to
the water. Two boats come home with the tide, their nets full of silver fish, and the gulls follow them in. The baker
knows every captain by name. She gives them warm rolls and they give her news: which way the wind has turned, where the
ice has broken, how far the big ships lie from the coast.

At eight the school bell rings. Children walk along the wall, counting stones, and each of them has a different number by
the end. Their teacher says that this is how science began: people looked at the same thing, wrote down what they saw,
and asked why the answers were not the same. So they measure the wall again with a long rope, and this time they agree.

In the afternoon the market opens. There are apples, onions, honey, wool, old books and new knives. A man sells clocks that
he has made himself from brass and wood. None of them shows quite the right time, but all of them sound beautiful. If you
ask him what time it is, he listens for a moment, smiles, and says: it is now.

When rain comes, everything slows. Water collects in the square, and the lights of the houses stand in it upside down. Some
people read, some people write letters, some only watch the clouds move over the hills. The doctor visits the lighthouse
keeper, who has not been well, and they play chess until the storm has passed. The keeper always loses, and always wants
to play one more game. The light must turn, he says, but a game can wait.

At night the town is quiet. One can hear the machines of the mill, the river under the bridge, a dog far away. Someone
plays a slow song on a piano. The stars are very clear here, because there is little light, and on some nights you can see
the whole bright road of the galaxy from one side of the world to the other. Then even those who have lived here for all of
their lives stop on their way home, look up, and say nothing at all.

What would you like to know? I can tell you about numbers, words, places and things. First we make a plan, then we build
it, then we test it; when it works we make it simple. Please give me a question and I will try to give you a good answer.
Yes, of course. No, not yet. Thank you, that is very kind. Here is a short list: one, two, three, four, five, six, seven.
"""
MARKUP = 'message role="system" message role="user" message role="assistant" response ' * 4  # in every chat: keep it short


def tokenizer_files(vocab_size: int, merges: list[tuple[bytes, bytes]] | None = None) -> dict[str, bytes]:
    """File name → content, for a vocabulary of at least MIN_VOCABULARY; `merges` learned elsewhere replace those of TEXT."""
    special = special_tokens(vocab_size)
    if merges is None:
        merges = _learn_merges(vocab_size - MIN_VOCABULARY)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for id, text in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_spell(word): id for id, word in enumerate(_words(merges))} | {text: id for id, text in special.items()},
            "merges": [f"{_spell(left)} {_spell(right)}" for left, right in merges],
        },
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[END_OF_MESSAGE],
        "pad_token": SPECIAL_TOKENS[PAD],
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": _json(tokenizer),
        "tokenizer_config.json": _json(config),
    }


def special_tokens(vocab_size: int) -> dict[int, str]:
    """Id → text of the last 256 ids; those without a use have a name too, as in the release."""
    first = vocab_size - SPECIAL_IDS
    return {first + n: SPECIAL_TOKENS.get(n, f"<|reserved_token_{first + n}|>") for n in range(SPECIAL_IDS)}


def whole_words(vocab_size: int) -> frozenset[int]:
    """Ids of tokens that are a word or a punctuation mark of TEXT by themselves."""
    pieces = {piece.encode() for piece in _pieces(TEXT)}
    words = _words(_learn_merges(vocab_size - MIN_VOCABULARY))
    return frozenset(id for id, word in enumerate(words) if word in pieces)


def _words(merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Bytes of every plain token, by id."""
    return [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]


def _learn_merges(count: int) -> list[tuple[bytes, bytes]]:
    """Byte-pair encoding: join the most frequent pair of neighbours, `count` times or until each word is one token.
    Pairs of equal frequency go in byte order."""
    pieces = Counter(_pieces(TEXT) + _pieces(MARKUP))
    words = [([bytes([byte]) for byte in piece.encode()], times) for piece, times in pieces.items()]
    merges: list[tuple[bytes, bytes]] = []
    while len(merges) < count:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for symbols, times in words:
            for pair in pairwise(symbols):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for symbols, _ in words:
            _join(symbols, best)
    return merges


def _pieces(text: str) -> list[str]:
    """Words with the space before them, as the tokenizer cuts a text before it merges."""
    return re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z]+|\s+(?!\S)|\s+", " ".join(text.split()))


def _join(symbols: list[bytes], pair: tuple[bytes, bytes]) -> None:
    at = 0
    while at < len(symbols) - 1:
        if (symbols[at], symbols[at + 1]) == pair:
            symbols[at : at + 2] = [pair[0] + pair[1]]
        at += 1


def _spell(word: bytes) -> str:
    """Bytes as GPT-2's byte-level BPE writes them: printable Latin-1 as itself, the other bytes from U+0100 on, in order."""
    return "".join(_ALPHABET[byte] for byte in word)


def byte_alphabet() -> list[str]:
    """The character of each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]


_ALPHABET = byte_alphabet()


def _json(value: object) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()
