"""What the finished checkpoint does on held-out text: `python -m training.evaluate MODEL DATA`, all in float32."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training import dspark, nextn
from training.acceptance import accepted
from training.corpus import Corpus
from training.device import eager, prepare
from training.dspark import BLOCK
from training.export import read_dspark, read_nextn, read_target, read_tensors
from training.model import K3
from training.train import SAMPLES, answers
from training.writing import LONGEST_PROMPT, write_greedily


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rows", type=int, default=64, help="prompts of each kind")
    parser.add_argument("--total", type=int, default=320, help="tokens of a prompt and its answer")
    options = parser.parse_args()
    device = prepare()
    target = read_target(options.model).to(device)
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    corpus = Corpus(options.data / "tokens.npz", device)
    with eager(), torch.no_grad():
        for part, label in (("_held_out", "held-out"), ("", "seen")):
            for kind, (loss, right) in predictions(target, corpus, part).items():
                print(f"{label} {kind}: {loss:.3f} nats a token, {right:.1%} of tokens are the likeliest")
        for question, answer in zip(SAMPLES, answers(target, tokenizer, SAMPLES, device), strict=True):
            print(f"> {question}\n{answer}")
        rounds(target, corpus, options)


def predictions(target: K3, corpus: Corpus, part: str) -> dict[str, tuple[float, float]]:
    """Cross-entropy and top-1 accuracy on windows of 512 tokens."""
    found = {}
    for kind, draw in (("text", corpus.text), ("chat", corpus.chat)):
        torch.manual_seed(1)
        rows = draw(8, 512, kind + part)
        logits = target.lm_head(target(rows[:, :-1]).hidden)
        labels = rows[:, 1:]
        loss = float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        found[kind] = (loss, float((logits.argmax(-1) == labels).float().mean()))
    return found


def rounds(target: K3, corpus: Corpus, options: argparse.Namespace) -> None:
    """Acceptance at width BLOCK + 1 of both drafters, on greedy text."""
    weights = target.embed_tokens.weight, target.lm_head.weight
    drafter = read_dspark(options.model / "dspark").to(corpus.device)
    layer = read_nextn(read_tensors(options.model)).to(corpus.device)
    torch.manual_seed(5)
    prompts = {
        "unseen wordings": corpus.questions(options.rows, LONGEST_PROMPT, "spare"),
        "unseen subjects": corpus.questions(options.rows, LONGEST_PROMPT, "chat_held_out"),
        "unseen texts": corpus.openings(options.rows, LONGEST_PROMPT, "text_held_out"),
        "seen questions": corpus.questions(options.rows, LONGEST_PROMPT, "chat"),
    }
    for label, (ids, lengths) in prompts.items():
        written = write_greedily(target, ids, lengths, options.total)
        ends = written.starts + written.counts.sum(1)
        block, chain = [], []
        for rows in written.tokens.split(8):
            output = target(rows)
            block.append(everywhere(drafter, target, output.taps, rows))
            chain.append(nextn.propose(layer, *weights, output.hidden, rows, BLOCK))
        for name, proposals in (("DSpark", block), ("NextN", chain)):
            print(f"{name}, {label}: {accepted(written.tokens, written.starts, ends, torch.cat(proposals))}", flush=True)


def everywhere(drafter: dspark.DSpark, target: K3, taps: list[Tensor], tokens: Tensor) -> Tensor:
    """DSpark's proposals [B, T, BLOCK] after every position."""
    found = torch.zeros(*tokens.shape, BLOCK, dtype=torch.long, device=tokens.device)
    for some in torch.arange(1, tokens.shape[1] - BLOCK, device=tokens.device).split(64):
        anchors = some.expand(len(tokens), -1)
        weights = target.embed_tokens.weight, target.lm_head.weight
        found[:, some] = dspark.propose(drafter, *weights, taps, tokens, anchors)
    return found


if __name__ == "__main__":
    main()
