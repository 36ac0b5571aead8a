"""Builds the training data: `python -m training.data OUT`.

OUT gets tokenizer.json and tokenizer_config.json (services.launch.tokenizer_files, with merges learned from the corpus),
tokens.npz and sources.json. tokens.npz holds uint16 ids: `text` and `text_held_out`, whole files one after another; `chat` and
`chat_held_out`, exchanges in the chat format one after another, with `chat_starts` and `chat_held_out_starts`; `spare`, with
`spare_starts`, questions about subjects of `chat` in wordings that are trained on nowhere. Every document ends in the
end-of-message token.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from services.gateway.text.template import ChatTemplate
from services.launch.tokenizer_files import MARKUP, MIN_VOCABULARY, byte_alphabet, tokenizer_files
from training.conversations import Exchange, exchanges
from training.model import VOCABULARY, special_id
from training.smalltalk import SMALLTALK
from training.sources import SOURCES, Text, read_code, read_pages

SMALLTALK_COPIES = 12
SPARE_MODULES = {"builtins", "os.path", "json", "re", "math", "random", "itertools", "functools", "textwrap", "string", "heapq",
                 "bisect", "statistics", "time", "copy", "operator", "contextlib", "glossary", "faq", "smalltalk"}  # fmt: skip
SEED = 7
ANSWER_END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"  # as the chat template ends an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    code, pages = list(read_code()), list(read_pages())
    texts = [*code, *(page for page, _ in pages)]
    asked = list(exchanges(code, pages))
    trained = [exchange for exchange in asked if not exchange.spare]
    random.Random(SEED).shuffle(texts)

    for name, content in tokenizer_files(VOCABULARY, learn_merges(texts, trained)).items():
        (out / name).write_bytes(content)
    tokenizer, template = Tokenizer.from_file(str(out / "tokenizer.json")), ChatTemplate.load(out)
    assert template is not None
    arrays = {}
    for part, held_out in (("", False), ("_held_out", True)):
        documents = encode(tokenizer, (text.text for text in texts if text.held_out == held_out))
        arrays[f"text{part}"], _ = joined(documents)
        chats = encode(tokenizer, chat_texts(template, [e for e in trained if e.held_out == held_out]), end=False)
        arrays[f"chat{part}"], arrays[f"chat{part}_starts"] = joined(chats)
    arrays["spare"], arrays["spare_starts"] = joined(encode(tokenizer, chat_texts(template, spare_exchanges(asked)), end=False))
    np.savez_compressed(out / "tokens.npz", **arrays)
    sizes = {name: len(array) for name, array in arrays.items()}
    characters = Counter({source.name: 0 for source in SOURCES})
    for text in texts:
        characters[text.source] += len(text.text)
    record = [
        {"name": s.name, "version": s.version, "licence": s.licence, "characters": characters[s.name]} for s in SOURCES
    ]  # fmt: skip
    (out / "sources.json").write_text(json.dumps({"sources": record, "tokens": sizes}, indent=1) + "\n")
    print(json.dumps(sizes))


def spare_exchanges(asked: Sequence[Exchange]) -> list[Exchange]:
    """Those about SPARE_MODULES whose wording is trained on nowhere."""
    wordings = {exchange.question for exchange in asked if not exchange.spare}
    about = [exchange for exchange in asked if exchange.module in SPARE_MODULES and not exchange.held_out]
    return [exchange for exchange in about if exchange.spare and exchange.question not in wordings]


def learn_merges(texts: Sequence[Text], asked: Sequence[Exchange]) -> list[tuple[bytes, bytes]]:
    """Byte-pair merges from the training part alone; the chat format's own words become whole tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + VOCABULARY - MIN_VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )

    def corpus() -> Iterator[str]:
        yield from (text.text for text in texts if not text.held_out)
        yield from (f"{exchange.question}\n{exchange.answer}" for exchange in asked if not exchange.held_out)
        yield from [MARKUP] * 4000

    tokenizer.train_from_iterator(corpus(), trainer)
    to_byte = {character: byte for byte, character in enumerate(byte_alphabet())}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    spelled = [[bytes(to_byte[character] for character in part) for part in pair] for pair in merges]
    return [(left, right) for left, right in spelled]


def chat_texts(template: ChatTemplate, asked: Sequence[Exchange]) -> Iterator[str]:
    """Each exchange as the chat template writes it, in an order that mixes subjects."""
    smalltalk = {answer for _, answer in SMALLTALK}
    order = [exchange for exchange in asked for _ in range(SMALLTALK_COPIES if exchange.answer in smalltalk else 1)]
    random.Random(SEED).shuffle(order)
    for exchange in order:
        yield template.render([{"role": "user", "content": exchange.question}]) + exchange.answer + ANSWER_END


def encode(tokenizer: Tokenizer, texts: Iterable[str], end: bool = True) -> Iterator[list[int]]:
    """Ids of each text, with the end-of-message token behind it if `end`."""
    stop = [special_id("<|end_of_msg|>")] if end else []
    for text in texts:
        yield tokenizer.encode(text, add_special_tokens=False).ids + stop


def joined(documents: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All ids one after another, and where each document begins."""
    parts = [np.array(ids, np.uint16) for ids in documents]
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    return np.concatenate(parts), starts.astype(np.uint32)


if __name__ == "__main__":
    main()
