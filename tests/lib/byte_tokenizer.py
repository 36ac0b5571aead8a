"""A small byte-level BPE tokenizer with real merges and special tokens, and a model directory that holds it."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END, USER, ASSISTANT, SYSTEM = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
CORPUS = ["the mesh serves the answer, token by token", "abcdefghijklmnopqrstuvwxyz", "naïve café — 東京 한국어 👩‍💻"]
TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}{% endif -%}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """All 256 bytes, some merges and four special tokens; the same on every machine."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[END, USER, ASSISTANT, SYSTEM],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """tokenizer.json and tokenizer_config.json with a chat template, as a checkpoint carries them."""
    tokenizer = byte_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}))
    return tokenizer
