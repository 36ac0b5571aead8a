"""What the target writes by itself: drafters serve its greedy answers, so they learn and are measured on those."""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.corpus import Corpus
from training.device import autocast, eager
from training.model import K3, generate, special_id

LONGEST_PROMPT = 96
TOTAL = 512  # tokens of a written sequence, its prompt included
SAMPLED = 0.25  # of the sequences, at temperatures up to 1


@dataclass
class Written:
    """Sequences of the target's own, and which tokens count: those it wrote, up to the end of its answer."""

    tokens: Tensor  # [B, T]
    starts: Tensor  # [B] position of the first written token
    counts: Tensor  # [B, T] bool

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and counts of `count` sequences at random."""
        chosen = torch.randint(len(self.tokens), (count,), device=self.tokens.device)
        return self.tokens[chosen], self.counts[chosen]


def write(target: K3, corpus: Corpus, count: int, total: int = TOTAL) -> Written:
    """The target answers questions and goes on from beginnings of texts, half of which were spliced from two and so are about
    nothing that it knows by heart."""
    asked, asked_lengths = corpus.questions(count // 2, LONGEST_PROMPT, "chat")
    texts, text_lengths = corpus.openings(count - len(asked), LONGEST_PROMPT, "text")
    (asked, asked_lengths), (texts, text_lengths) = spliced(asked, asked_lengths), spliced(texts, text_lengths)
    prompts, lengths = torch.cat([asked, texts]), torch.cat([asked_lengths, text_lengths])
    device = prompts.device
    temperature = torch.rand(count, 1, device=device) * (torch.rand(count, 1, device=device) < SAMPLED)
    with autocast(device), eager():
        return written(generate(target, prompts, lengths, total, temperature), lengths)


def write_greedily(target: K3, prompts: Tensor, lengths: Tensor, total: int) -> Written:
    """In float32, as it is served on a CPU."""
    return written(generate(target, prompts, lengths, total), lengths)


def spliced(prompts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Every other prompt gets the beginning of the one before it, up to anywhere inside both."""
    others = prompts.roll(1, 0)
    cut = torch.rand(len(prompts), device=prompts.device) * torch.minimum(lengths, lengths.roll(1, 0))
    cut[::2] = 0
    at = torch.arange(prompts.shape[1], device=prompts.device)
    return torch.where(at < cut.long().unsqueeze(1), others, prompts), lengths


def written(tokens: Tensor, starts: Tensor) -> Written:
    """What counts ends with the first message that the target ends."""
    own = torch.arange(tokens.shape[1], device=tokens.device) >= starts[:, None]
    ends = ((tokens == special_id("<|end_of_msg|>")) & own).long()
    return Written(tokens, starts, own & (ends.cumsum(1) - ends < 1))
