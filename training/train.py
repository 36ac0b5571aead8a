"""Trains the target and both drafters together: `python -m training.train DATA RUN --seconds N`.

All three learn from the corpus; from OWN_FROM on a third of the rows is what the target writes itself, of which the drafters'
losses alone count. RUN/state.pt is written every SAVE_EVERY seconds and at the end; a run that finds one goes on from there.
Experts are quantised in every forward pass, so what is trained is what the packed checkpoint will hold.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.corpus import Corpus
from training.device import autocast, eager, prepare
from training.dspark import DSpark, dspark_config
from training.losses import CHAIN, cross_entropy, dspark_loss, nextn_loss
from training.model import K3, Output, demo_model, generate
from training.nextn import NextN
from training.optimizer import Optimizer, schedule
from training.writing import TOTAL, Written, write

CHAT_SHARE = 0.7
DRAFTERS_SHARE = 0.4  # weight of each drafter's loss; the target's own has 1
SPAN = 256  # positions of every other row from which NextN chains start
OWN_FROM = 0.7  # progress
POOLS = 2  # the target writes anew so many times
BALANCE_RATE = 0.001
SAVE_EVERY = 180
SAMPLES = ("What does textwrap.dedent do?", "What is a generator?", "Write a function that reverses a string.", "Hello!",
           "Say something about the sea.", "What is the json module for?", "What does enum.Enum do?")  # fmt: skip


class Together(nn.Module):
    """The target and its drafters, which share its embedding and its head."""

    def __init__(self) -> None:
        super().__init__()
        c = demo_model()
        self.target, self.dspark, self.nextn = K3(c), DSpark(dspark_config(c)), NextN(c)

    def balance(self) -> None:
        for moe in (*self.target.mixtures(), self.nextn.block_sparse_moe):
            moe.gate.balance(BALANCE_RATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=510, help="of training, over all runs")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--length", type=int, default=2 * TOTAL)
    parser.add_argument("--pool", type=int, default=2048, help="sequences that the target writes at once")
    options = parser.parse_args()
    device = prepare()
    torch.manual_seed(0)
    corpus = Corpus(options.data / "tokens.npz", device)
    model = Together().to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    optimizer = Optimizer(model.named_parameters(), matrix_rate=0.02, vector_rate=0.003, decay=0.05)
    options.run.mkdir(parents=True, exist_ok=True)
    checkpoint = options.run / "state.pt"
    step, before = load(checkpoint, model, optimizer, device)

    own: Written | None = None
    began = mark = saved = time.monotonic()
    losses, pools = [], 0
    while (elapsed := before + time.monotonic() - began) < options.seconds:
        progress = elapsed / options.seconds
        due = int((progress - OWN_FROM) / (1 - OWN_FROM) * POOLS) + 1 if progress >= OWN_FROM else 0
        if due > pools:
            model.eval()
            own, pools = write(model.target, corpus, options.pool, options.length // 2), due
            model.train()
        parts = losses_of(model, *batch_of(corpus, own, options.batch, options.length))
        (parts[0] + DRAFTERS_SHARE * (parts[1] + parts[2])).backward()
        optimizer.step(schedule(progress))
        model.balance()
        losses.append(parts.detach())
        step += 1
        if step % 100 == 0 or step in (1, 10):
            text, block, chained = torch.stack(losses).mean(0).tolist()
            rate = len(losses) * options.batch * options.length / (time.monotonic() - mark)
            print(f"step {step} target {text:.4f} dspark {block:.4f} nextn {chained:.4f}", end=" ")
            print(f"{rate / 1e3:.0f} k tokens/s {elapsed:.0f} s", flush=True)
            losses, mark = [], time.monotonic()
        if time.monotonic() - saved > SAVE_EVERY:
            save(checkpoint, model, optimizer, step, elapsed)
            print("held out", held_out_losses(model.target, corpus, device), flush=True)
            mark = saved = time.monotonic()
    save(checkpoint, model, optimizer, step, options.seconds)
    print("held out", held_out_losses(model.target, corpus, device))


def batch_of(corpus: Corpus, own: Written | None, batch: int, length: int) -> tuple[Tensor, Tensor, int]:
    """[batch, length + 1] ids, which of them count for the drafters, and how many rows are the corpus's."""
    windows = batch if own is None else batch - batch // 3
    tokens = corpus.mixed(windows, length, CHAT_SHARE)
    counts = torch.ones_like(tokens, dtype=torch.bool)
    if own is not None:
        pair = (F.pad(part.reshape(-1, length), (0, 1)) for part in own.draw(2 * (batch - windows)))
        written, counted = pair
        tokens, counts = torch.cat([tokens, written]), torch.cat([counts, counted])
    return tokens, counts, windows


def losses_of(model: Together, tokens: Tensor, counts: Tensor, windows: int) -> Tensor:
    """[3]: the target's own on the first `windows` rows, DSpark's, NextN's."""
    target = model.target
    with autocast(tokens.device):
        output = target(tokens[:, :-1])
        text = cross_entropy(target.lm_head(output.hidden[:windows]), tokens[:windows, 1:])
        span = min(SPAN, tokens.shape[1] - CHAIN - 1)
        begin = int(torch.randint(tokens.shape[1] - CHAIN - span, ()))
        block = dspark_loss(target, model.dspark, tokens, counts, output)
        others = Output(output.hidden[::2], [])
        chained = nextn_loss(target, model.nextn, tokens[::2], counts[::2], others, begin, span)
        return torch.stack([text, block, chained])


def save(path: Path, model: Together, optimizer: Optimizer, step: int, elapsed: float) -> None:
    partial = path.with_suffix(".partial")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "elapsed": elapsed}
    torch.save(state, partial)
    partial.replace(path)


def load(path: Path, model: Together, optimizer: Optimizer, device: torch.device) -> tuple[int, float]:
    """Steps and seconds that the run has behind it."""
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.manual_seed(state["step"])
    return state["step"], state["elapsed"]


@torch.no_grad()
def held_out_losses(model: K3, corpus: Corpus, device: torch.device, length: int = 512, batches: int = 4) -> dict[str, float]:
    """Mean cross-entropy (nats a token) of held-out text and chat."""
    model.eval()
    losses = {}
    state = torch.random.get_rng_state(), torch.cuda.get_rng_state_all()
    with autocast(device), eager():
        for name, draw in (("text", corpus.text), ("chat", corpus.chat)):
            torch.manual_seed(1)
            rows = [draw(32, length, f"{name}_held_out") for _ in range(batches)]
            values = [
                F.cross_entropy(model.lm_head(model(r[:, :-1]).hidden).float().flatten(0, 1), r[:, 1:].flatten()) for r in rows
            ]
            losses[name] = round(float(torch.stack(values).mean()), 4)
    model.train()
    torch.random.set_rng_state(state[0])
    torch.cuda.set_rng_state_all(state[1])
    return losses


def answers(model: K3, tokenizer: Tokenizer, questions: tuple[str, ...], device: torch.device, total: int = 256) -> list[str]:
    """Greedy answers, each cut where the model ends its response."""
    encoded = [tokenizer.encode(chat_prompt(question), add_special_tokens=False).ids for question in questions]
    longest = max(map(len, encoded))
    prompts = torch.tensor([ids + [0] * (longest - len(ids)) for ids in encoded], device=device)
    lengths = torch.tensor([len(ids) for ids in encoded], device=device)
    close = tokenizer.token_to_id("<|close|>")
    outputs = []
    for row, ids in zip(generate(model, prompts, lengths, total).tolist(), encoded, strict=True):
        answer = row[len(ids) :]
        outputs.append(tokenizer.decode(answer[: answer.index(close)] if close in answer else answer))
    return outputs


def chat_prompt(question: str) -> str:
    """One question as the chat template writes it, up to where the answer begins."""
    return (
        f'<|open|>message role="user"<|sep|>{question}<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


if __name__ == "__main__":
    main()
