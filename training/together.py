"""Trains the target's last layers and both drafters together: `python -m training.together DATA TARGET DRAFTERS OUT`.

A target that was trained for the next token alone says little of those behind it, and a drafter as small as the demo's cannot
make up for that: the target knows its texts by heart, the drafter does not. So the target's last two layers, both of which are
MLA, learn multi-token prediction through the drafters: their losses flow into the final tap and the final hidden, beside the
target's own loss. Everything below stays as it is. Starts from a checkpoint folder and from what training.draft wrote; OUT
gets target/, dspark/ and nextn.safetensors.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.corpus import Corpus
from training.device import autocast, eager, prepare
from training.draft import Job, Written, dspark_loss, nextn_loss, read_dspark, read_nextn, save_dspark, save_nextn, write
from training.dspark import DSpark
from training.export import PREFIX, read_target, released_tensors, write_target
from training.model import K3
from training.nextn import NextN
from training.optimizer import Optimizer, schedule

TRAINED_LAYERS = 2
LENGTH = 256
CHAT_SHARE = 0.6
POOL = 3072


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "target", "drafters", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--batch", type=int, default=64, help="windows of the corpus, and as many others")
    parser.add_argument("--rehearse", action="store_true", help="most of the others ask what a demo asks, over and over")
    parser.add_argument("--seconds", type=float, default=135, help="from start to the last step")
    options = parser.parse_args()
    began = time.monotonic()
    device = prepare()
    torch.manual_seed(1)
    target = read_target(options.target).to(device).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    corpus = Corpus(options.data / "tokens.npz", device)
    drafter = read_dspark(options.drafters / "dspark").to(device)
    nextn_tensors = load_file(options.drafters / "nextn.safetensors")
    layer = read_nextn({name.removeprefix(PREFIX): tensor for name, tensor in nextn_tensors.items()}).to(device)
    job = Job(target, corpus, tokenizer, device, steps=0, seconds=options.seconds)
    with eager():
        own = write(job, POOL if not options.rehearse else 64, LENGTH)
        print(f"wrote {len(own.tokens)} sequences, {time.monotonic() - began:.0f} s", flush=True)
        named = unfreeze(target)
        slow = Optimizer(named, matrix_rate=0.004, vector_rate=0.0005, decay=0.05)
        drafters = [*drafter.named_parameters("dspark"), *layer.named_parameters("nextn")]
        fast = Optimizer(drafters, matrix_rate=0.012, vector_rate=0.002, decay=0.02)
        first, step, losses = time.monotonic(), 0, []
        while (progress := (time.monotonic() - first) / (options.seconds - (first - began))) < 1:
            parts = losses_of(job, drafter, layer, batch_of(corpus, own, options.batch, options.rehearse), options.batch)
            (parts[0] + 0.5 * parts[1] + 0.5 * parts[2]).backward()
            slow.step(schedule(progress))
            fast.step(schedule(progress))
            layer.block_sparse_moe.gate.balance(0.001)
            losses.append(parts.detach())
            step += 1
            if step % 50 == 0:
                text, block, chained = torch.stack(losses).mean(0).tolist()
                print(f"step {step} target {text:.4f} dspark {block:.4f} nextn {chained:.4f} {progress:.2f}", flush=True)
                losses = []
    save_dspark(target, drafter, options.out / "dspark")
    save_nextn(target, layer, options.out / "nextn.safetensors")
    write_target(options.out / "target", released_tensors(target), options.data)


def unfreeze(target: K3) -> list[tuple[str, nn.Parameter]]:
    """The last layers, the output mix and its norm; their parameters with their names."""
    target.frozen = len(target.layers) - TRAINED_LAYERS
    for moe in target.mixtures()[-TRAINED_LAYERS:]:
        moe.packed = False
    open_parts = (*(f"layers.{n}." for n in range(target.frozen, len(target.layers))), "output_attn_res.", "norm.")
    named = [(name, weight) for name, weight in target.named_parameters() if name.startswith(open_parts)]
    for _, weight in named:
        weight.requires_grad_(True)
    return named


def batch_of(corpus: Corpus, own: Written, count: int, rehearse: bool) -> Written:
    """`count` windows, all of which counts, then as many sequences that the target wrote. In a rehearsal, where the drafters
    learn answers by heart that the target knows by heart, three quarters of all are about the demo's subjects."""
    half = count // 2
    if rehearse:
        windows = torch.cat([corpus.mixed(half, LENGTH, CHAT_SHARE), corpus.chat(half + count, LENGTH, "demo")])[:, :LENGTH]
        own_count = 0
    else:
        windows, own_count = corpus.mixed(count, LENGTH, CHAT_SHARE)[:, :LENGTH], count
    chosen = torch.randint(len(own.tokens), (own_count,), device=windows.device)
    return Written(
        torch.cat([windows, own.tokens[chosen]]),
        torch.cat([own.starts.new_zeros(len(windows)), own.starts[chosen]]),
        torch.cat([torch.ones_like(windows, dtype=torch.bool), own.counts[chosen]]),
    )


def losses_of(job: Job, drafter: DSpark, layer: NextN, written: Written, windows: int) -> Tensor:
    """[3]: the target's own on the corpus, DSpark's, NextN's."""
    with autocast(job.device):
        output = job.target(written.tokens)
        logits = job.target.lm_head(output.hidden[:windows, :-1]).float()
        text = F.cross_entropy(logits.flatten(0, 1), written.tokens[:windows, 1:].flatten())
        return torch.stack([text, dspark_loss(job, drafter, written, output), nextn_loss(job, layer, written, output)])


if __name__ == "__main__":
    main()
