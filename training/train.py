"""Trains the target: `python -m training.train DATA RUN --steps N`.

RUN/target.pt is written every SAVE_EVERY steps and at the end; a run that finds one goes on from there. Experts are quantised
in every forward pass, so what is trained is what the packed checkpoint will hold.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus import Corpus
from training.device import autocast, compiled, eager, prepare
from training.model import K3, demo_model, generate
from training.optimizer import Optimizer, schedule

LENGTH = 1024
CHAT_SHARE = 0.6
BALANCE_RATE = 0.001
SAVE_EVERY = 750
SAMPLES = ("What does textwrap.dedent do?", "What is a generator?", "Write a function that reverses a string.", "Hello!",
           "Say something about the sea.", "What is the json module for?", "What does enum.Enum do?")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop (resumably) after so long")
    options = parser.parse_args()
    began = time.monotonic()
    device = prepare()
    torch.manual_seed(0)
    corpus = Corpus(options.data / "tokens.npz", device)
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    model = K3(demo_model()).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    optimizer = Optimizer(model.named_parameters(), matrix_rate=0.02, vector_rate=0.003, decay=0.05)
    checkpoint = options.run / "target.pt"
    options.run.mkdir(parents=True, exist_ok=True)
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        torch.manual_seed(step)

    losses, mark = [], time.monotonic()
    while step < options.steps and time.monotonic() - began < options.seconds:
        rows = corpus.mixed(options.batch, options.length, CHAT_SHARE)
        with autocast(device):
            loss = cross_entropy(model.lm_head(model(rows[:, :-1]).hidden), rows[:, 1:])
        loss.backward()
        optimizer.step(schedule(step / options.steps))
        for moe in model.mixtures():
            moe.gate.balance(BALANCE_RATE)
        losses.append(loss.detach())
        step += 1
        if step % 100 == 0 or step == 10:
            mean = float(torch.stack(losses).mean())
            rate = len(losses) * options.batch * options.length / (time.monotonic() - mark)
            print(f"step {step} loss {mean:.4f} {rate / 1e3:.0f} k tokens/s {time.monotonic() - began:.0f} s", flush=True)
            losses, mark = [], time.monotonic()
        if step % SAVE_EVERY == 0 or step == options.steps:
            save(checkpoint, model, optimizer, step)
            report(model, corpus, tokenizer, device)
            mark = time.monotonic()
    save(checkpoint, model, optimizer, step)


@compiled
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def save(path: Path, model: K3, optimizer: Optimizer, step: int) -> None:
    partial = path.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(path)


@torch.no_grad()
def held_out_losses(model: K3, corpus: Corpus, device: torch.device, length: int = 512, batches: int = 4) -> dict[str, float]:
    """Mean cross-entropy (nats a token) of held-out text and chat."""
    model.eval()
    losses = {}
    with autocast(device), eager():
        for name, draw in (("text", corpus.text), ("chat", corpus.chat)):
            torch.manual_seed(1)
            rows = [draw(32, length, f"{name}_held_out") for _ in range(batches)]
            values = [
                F.cross_entropy(model.lm_head(model(r[:, :-1]).hidden).float().flatten(0, 1), r[:, 1:].flatten()) for r in rows
            ]
            losses[name] = float(torch.stack(values).mean())
    model.train()
    return losses


def report(model: K3, corpus: Corpus, tokenizer: Tokenizer, device: torch.device) -> None:
    """Held-out losses and answers to fixed questions."""
    state = torch.random.get_rng_state(), torch.cuda.get_rng_state_all()
    print("held out", {name: round(value, 4) for name, value in held_out_losses(model, corpus, device).items()})
    model.eval()
    with autocast(device), eager():
        for question, answer in zip(SAMPLES, answers(model, tokenizer, SAMPLES, device), strict=True):
            print(f"> {question}\n{answer}")
    model.train()
    torch.random.set_rng_state(state[0])
    torch.cuda.set_rng_state_all(state[1])


def answers(model: K3, tokenizer: Tokenizer, questions: tuple[str, ...], device: torch.device, total: int = 160) -> list[str]:
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
