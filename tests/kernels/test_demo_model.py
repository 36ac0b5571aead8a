"""The trained checkpoint in models/demo: the worker runs it as the equations say, and it says what its card says."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from services.gateway.text.template import ChatTemplate
from tests.lib.golden import Engine, golden_model, relative_error, request, topology_of
from tests.lib.oracle import Oracle
from training.export import read_dspark, read_nextn, read_target, read_tensors
from training.model import special_id

DEMO = Path(__file__).parents[2] / "models" / "demo"
HELD_OUT = Path(__file__).with_name("demo_held_out.txt")  # of Python's documentation of mailbox, PSF licence; never trained on
MIB = 2**20


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


@cache
def engine() -> Engine:
    return Engine(str(DEMO), topology_of(golden_model(str(DEMO))), torch.float32)


def logits_of(ids: list[int]) -> Tensor:
    return engine().step([(request(ids), len(ids))], "extend")


def test_every_file_is_small_enough_for_the_repository():
    files = [path for path in DEMO.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) <= 15 * MIB
    assert sum(path.stat().st_size for path in files) <= 48 * MIB


def test_the_index_names_every_tensor_where_it_is():
    weight_map = json.loads((DEMO / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name.removeprefix("language_model.") for name in weight_map} == read_tensors(DEMO).keys()
    assert "language_model.model.layers.9.eh_proj.weight" in weight_map


def test_the_worker_gives_the_logits_of_the_equations():
    ids = encode(HELD_OUT.read_text())[:150]
    assert relative_error(logits_of(ids), torch.from_numpy(Oracle(DEMO).logits(ids))) < 1e-3


@torch.no_grad()
def test_the_trained_module_gives_the_worker_s_logits():
    ids = encode(HELD_OUT.read_text())[:150]
    model = read_target(DEMO)
    assert relative_error(model.lm_head(model(torch.tensor([ids])).hidden)[0], logits_of(ids)) < 1e-3


def test_held_out_text_is_predicted_as_well_as_the_card_says():
    ids = encode(HELD_OUT.read_text())[:512]
    scores, labels = logits_of(ids)[:-1], torch.tensor(ids[1:])
    assert float((scores.argmax(-1) == labels).float().mean()) == pytest.approx(0.599, abs=0.02)
    assert float(torch.nn.functional.cross_entropy(scores, labels)) == pytest.approx(1.64, abs=0.05)


def test_a_greedy_answer_is_the_one_in_the_model_card():
    card = (DEMO / "README.md").read_text()
    example = re.search(r"^> ([^\n]+)\n\n(.+?)\n\n<!-- end of the example -->", card, re.MULTILINE | re.DOTALL)
    assert example, "the card shows an answer"
    template = ChatTemplate.load(DEMO)
    assert template
    sequence = request(encode(template.render([{"role": "user", "content": example[1]}])) + [0] * 400)
    ids, prompt = sequence.tokens, len(sequence.tokens) - 400
    end = special_id("<|end_of_msg|>")
    token = int(engine().step([(sequence, prompt)], "extend")[-1].argmax())
    while token != end and sequence.done < len(ids):
        ids[sequence.done] = token
        token = int(engine().step([(sequence, 1)], "decode")[-1].argmax())
    assert token == end
    assert tokenizer().decode(ids[prompt : ids.index(special_id("<|close|>"), prompt)]) == example[2]


def test_both_drafters_are_complete_and_share_the_target_s_embedding():
    target = read_tensors(DEMO)
    read_nextn(target)
    read_dspark(DEMO / "dspark")
    embedding = target["model.embed_tokens.weight"]
    assert torch.equal(target["model.layers.9.embed_tokens.weight"], embedding)
    assert torch.equal(read_tensors(DEMO / "dspark")["embed_tokens.weight"], embedding)
