"""Trains both drafters on what the finished target writes: `python -m training.draft MODEL DATA OUT`.

MODEL is a checkpoint folder of `training.export`, target and drafters; OUT becomes the same with the drafters trained further.
The target stays as it is: as it is served, its greedy text is what they will have to predict.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from training.corpus import Corpus
from training.device import autocast, eager, prepare
from training.dspark import DSpark
from training.export import read_dspark, read_nextn, read_target, read_tensors, write_model
from training.losses import CHAIN, dspark_loss, nextn_loss
from training.model import K3
from training.nextn import NextN
from training.optimizer import Optimizer, schedule
from training.writing import write

BATCH = 64
LENGTH_SHARE = 0.5
POOLS = 2  # the target writes anew so many times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--pool", type=int, default=2048, help="sequences that the target writes at once")
    options = parser.parse_args()
    device = prepare()
    torch.manual_seed(0)
    corpus = Corpus(options.data / "tokens.npz", device)
    target = read_target(options.model).to(device).requires_grad_(False)
    drafter, layer = read_dspark(options.model / "dspark").to(device), read_nextn(read_tensors(options.model)).to(device)
    both = nn.ModuleDict({"dspark": drafter, "nextn": layer})
    optimizer = Optimizer(both.named_parameters(), matrix_rate=0.008, vector_rate=0.0015, decay=0.02)
    began, step, pools, losses = time.monotonic(), 0, 0, []
    pool = write(target, corpus, options.pool)
    with eager():
        while (progress := (time.monotonic() - began) / options.seconds) < 1:
            if (due := int(progress * POOLS)) > pools:
                pool, pools = write(target, corpus, options.pool), due
            parts = losses_of(target, drafter, layer, *pool.draw(BATCH))
            parts.sum().backward()
            optimizer.step(schedule(progress))
            layer.block_sparse_moe.gate.balance(0.001)
            losses.append(parts.detach())
            step += 1
            if step % 100 == 0:
                block, chained = torch.stack(losses).mean(0).tolist()
                print(f"step {step} dspark {block:.4f} nextn {chained:.4f} {progress:.2f}", flush=True)
                losses = []
    write_model(options.out, target, drafter, layer, options.data)


def losses_of(target: K3, drafter: DSpark, layer: NextN, tokens: Tensor, counts: Tensor) -> Tensor:
    """[2]: DSpark's, NextN's."""
    with autocast(tokens.device):
        with torch.no_grad():
            output = target(tokens)
        chained = nextn_loss(target, layer, tokens, counts, output, 0, tokens.shape[1] - CHAIN - 1)
        return torch.stack([dspark_loss(target, drafter, tokens, counts, output, LENGTH_SHARE), chained])


if __name__ == "__main__":
    main()
