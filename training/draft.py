"""Trains both drafters on what the exported target writes: `python -m training.draft DATA TARGET OUT`.

TARGET is a checkpoint folder of `training.export`. OUT gets dspark/ (config.json, model.safetensors) and nextn.safetensors, the
tensors of `model.layers.N.`. A drafter that is already in OUT is not trained again.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus import Corpus
from training.device import autocast, eager, prepare
from training.dspark import BLOCK, DSpark, dspark_config
from training.export import PREFIX, fill, read_target, released_tensors
from training.model import K3, Output, demo_model, generate
from training.nextn import NextN, Rows
from training.optimizer import Optimizer, schedule

LONGEST_PROMPT = 64
TOTAL = 320  # tokens of a written sequence, its prompt included
POOL = 4096  # sequences written at once
BATCH = 64
ANCHORS = 64
CHAIN = 5  # steps of NextN's training; later ones are its own extrapolation
REFRESH = 250  # steps between new pools


@dataclass
class Written:
    """Sequences of the target's own, and which tokens count: those it wrote, up to the end of its answer."""

    tokens: Tensor  # [B, T]
    starts: Tensor  # [B] position of the first written token
    counts: Tensor  # [B, T] bool


@dataclass
class Job:
    """What both trainings need."""

    target: K3
    corpus: Corpus
    tokenizer: Tokenizer
    device: torch.device
    steps: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seconds", type=float, default=180, help="at most, for each of the two")
    options = parser.parse_args()
    device = prepare()
    torch.manual_seed(0)
    target = read_target(options.target).to(device).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    job = Job(target, Corpus(options.data / "tokens.npz", device), tokenizer, device, options.steps, options.seconds)
    folder, layer_file = options.out / "dspark", options.out / "nextn.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    with eager():
        if not (folder / "model.safetensors").exists():
            train_dspark(job, folder)
        if not layer_file.exists():
            train_nextn(job, layer_file)


def write(job: Job, count: int, total: int = TOTAL) -> Written:
    """The target goes on from questions and from beginnings of texts. Half of the questions are cut, so that it makes up their
    rest, and half of all rows are sampled, at temperatures up to 1."""
    prompts, lengths = questions(job, count // 2, "chat")
    allowed = torch.ones_like(lengths)
    cut = (torch.rand(len(lengths), device=job.device) < 0.5) & (lengths > 12)
    lengths = torch.where(cut, 8 + (torch.rand(len(lengths), device=job.device) * (lengths - 8)).long(), lengths)
    texts, text_lengths = job.corpus.openings(count - len(prompts), LONGEST_PROMPT, "text")
    prompts, lengths = torch.cat([prompts, texts]), torch.cat([lengths, text_lengths])
    allowed = torch.cat([allowed + cut, torch.ones_like(text_lengths)])
    temperature = (torch.rand(count, 1, device=job.device) * 2 - 1).clamp_min(0)
    with autocast(job.device):
        tokens = generate(job.target, prompts, lengths, total, temperature)
    return written(job, tokens, lengths, allowed)


def write_greedily(job: Job, prompts: Tensor, lengths: Tensor, total: int) -> Written:
    """In float32, as it is served on a CPU."""
    tokens = generate(job.target, prompts, lengths, total)
    return written(job, tokens, lengths, torch.ones_like(lengths))


def questions(job: Job, count: int, name: str) -> tuple[Tensor, Tensor]:
    opening, separator = (job.tokenizer.encode(token).ids[0] for token in ("<|open|>", "<|sep|>"))
    return job.corpus.questions(count, LONGEST_PROMPT, name, opening, separator)


def written(job: Job, tokens: Tensor, starts: Tensor, allowed: Tensor) -> Written:
    """What counts ends with the `allowed`-th message."""
    end = job.tokenizer.encode("<|end_of_msg|>").ids[0]
    own = torch.arange(tokens.shape[1], device=job.device) >= starts[:, None]
    ends = ((tokens == end) & own).long()
    return Written(tokens, starts, own & (ends.cumsum(1) - ends < allowed[:, None]))


def dspark_loss(job: Job, drafter: DSpark, written: Written, output: Output) -> Tensor:
    """Of ANCHORS blocks a sequence: the distance to the target's law and its likeliest token, near proposals weighing most."""
    embedding, head = job.target.embed_tokens.weight, job.target.lm_head.weight
    weights = torch.exp(-torch.arange(BLOCK, device=job.device) / 4)
    tokens, usable = written.tokens, written.tokens.shape[1] - BLOCK
    anchors = torch.multinomial(written.counts[:, 1 : usable + 1].float() + 1e-6, ANCHORS).sort(1).values
    at = anchors.unsqueeze(-1) + torch.arange(BLOCK, device=job.device)
    before = pick(tokens, at)
    valid = pick(written.counts, at + 1).int().cumprod(-1)
    ids = torch.full_like(at, drafter.config["mask_token_id"])
    ids[..., 0] = before[..., 0]
    hidden = drafter(drafter.context(output.taps), anchors, embedding[ids])
    logits = F.linear(hidden, head).float() + drafter.markov_head(before).float()
    law = pick(F.linear(output.hidden.detach(), head), at).float().softmax(-1)
    distance = (logits.softmax(-1) - law).abs().sum(-1)
    entropy = F.cross_entropy(logits.flatten(0, -2), law.argmax(-1).flatten(), reduction="none").view(valid.shape)
    sure = drafter.confidence(hidden.detach(), before).float()
    confidence = F.binary_cross_entropy_with_logits(sure, 1 - distance.detach() / 2, reduction="none")
    loss = (0.3 * entropy + 0.7 * distance + 0.1 * confidence) * valid * weights
    return loss.sum() / (valid * weights).sum()


def nextn_loss(job: Job, layer: NextN, written: Written, output: Output) -> Tensor:
    """Of chains of CHAIN steps from every position whose next token counts."""
    embedding, head = job.target.embed_tokens.weight, job.target.lm_head.weight
    tokens, span = written.tokens, written.tokens.shape[1] - CHAIN - 1
    laws = F.linear(output.hidden.detach(), head)
    rows, hidden = Rows(), output.hidden[:, :span].float()
    begun = written.counts[:, 1 : span + 1]
    total = valid = torch.zeros((), device=job.device)
    for step in range(CHAIN):
        hidden = layer.step(embedding[tokens[:, step + 1 : step + 1 + span]], hidden, rows)
        logits, law = F.linear(hidden, head).float(), laws[:, step + 1 : step + 1 + span].float().softmax(-1)
        entropy = F.cross_entropy(logits.flatten(0, 1), law.argmax(-1).flatten(), reduction="none").view(begun.shape)
        distance = (logits.softmax(-1) - law).abs().sum(-1)
        weight = begun * written.counts[:, step + 2 : step + 2 + span] * 0.8**step
        total = total + ((0.3 * entropy + 0.7 * distance) * weight).sum()
        valid = valid + weight.sum()
    return total / valid


def train_dspark(job: Job, folder: Path) -> None:
    drafter = DSpark(dspark_config(job.target.c)).to(job.device)
    optimize(job, drafter, lambda written: dspark_loss(job, drafter, written, target_output(job, written.tokens)), "dspark")
    save_dspark(job.target, drafter, folder)


def train_nextn(job: Job, file: Path) -> None:
    layer = NextN(job.target.c).to(job.device)

    def loss_of(written: Written) -> Tensor:
        layer.block_sparse_moe.gate.balance(0.001)
        return nextn_loss(job, layer, written, target_output(job, written.tokens))

    optimize(job, layer, loss_of, "nextn")
    save_nextn(job.target, layer, file)


def save_dspark(target: K3, drafter: DSpark, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().bfloat16().cpu() for name, value in drafter.state_dict().items()}
    tensors["embed_tokens.weight"] = target.embed_tokens.weight.detach().bfloat16().cpu()
    (folder / "config.json").write_text(json.dumps(drafter.config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_nextn(target: K3, layer: NextN, file: Path) -> None:
    name = f"model.layers.{target.c.num_hidden_layers}."
    embedding = target.embed_tokens.weight.detach().bfloat16().cpu()
    tensors = released_tensors(layer, name) | {f"{name}embed_tokens.weight": embedding}
    save_file({PREFIX + key: value for key, value in tensors.items()}, file, metadata={"format": "pt"})


def read_dspark(folder: Path) -> DSpark:
    drafter = DSpark(json.loads((folder / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: tensors[name].float() for name in drafter.state_dict()})
    return drafter


def read_nextn(tensors: dict[str, Tensor]) -> NextN:
    """From released tensors, by their names after `language_model.`"""
    layer = NextN(demo_model())
    fill(layer, tensors, f"model.layers.{layer.c.num_hidden_layers}.")
    return layer


def target_output(job: Job, tokens: Tensor) -> Output:
    with torch.no_grad():
        return job.target(tokens)


def pick(rows: Tensor, at: Tensor) -> Tensor:
    """rows [B, T, ...] at positions [B, A, G] -> [B, A, G, ...]."""
    return rows[torch.arange(len(rows), device=rows.device)[:, None, None], at]


def optimize(job: Job, module: torch.nn.Module, loss_of: Callable[[Written], Tensor], name: str) -> None:
    """Steps until `steps` or `seconds` are used up; the rate follows whichever is further."""
    optimizer = Optimizer(module.named_parameters(), matrix_rate=0.01, vector_rate=0.002, decay=0.02)
    began, losses = time.monotonic(), []
    pool = write(job, POOL)
    for step in range(job.steps):
        elapsed = time.monotonic() - began
        progress = max(step / job.steps, elapsed / job.seconds)
        if progress >= 1:
            break
        if step and step % REFRESH == 0:
            pool = write(job, POOL)
        chosen = torch.randint(POOL, (BATCH,), device=job.device)
        with autocast(job.device):
            loss = loss_of(Written(pool.tokens[chosen], pool.starts[chosen], pool.counts[chosen]))
        loss.backward()
        optimizer.step(schedule(progress))
        losses.append(loss.detach())
        if (step + 1) % 100 == 0:
            print(f"{name} step {step + 1} loss {float(torch.stack(losses).mean()):.4f} {elapsed:.0f} s", flush=True)
            losses = []


if __name__ == "__main__":
    main()
