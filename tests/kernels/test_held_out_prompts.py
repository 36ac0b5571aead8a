"""The bench's prompts are what they claim to be."""

import json

import pytest

from services.launch.bench.speculation import HELD_OUT
from training.conversations import exchanges
from training.sources import DOCS, read_code, read_pages


@pytest.mark.soak
@pytest.mark.skipif(not DOCS.is_dir(), reason="the documentation that training reads (python3.11-doc) is not installed")
def test_no_prompt_of_the_bench_is_in_what_the_demo_model_is_trained_on():
    code, pages = list(read_code()), list(read_pages())
    questions = {exchange.question for exchange in exchanges(code, pages) if not (exchange.held_out or exchange.spare)}
    texts = [text.text for text in (*code, *(page for page, _ in pages)) if not text.held_out]
    prompts = json.loads(HELD_OUT.read_text())["prompts"]
    assert len(prompts) >= 30 and len({json.dumps(prompt) for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        if "chat" in prompt:
            assert prompt["chat"] not in questions
        else:
            assert not any(prompt["text"] in text for text in texts)
