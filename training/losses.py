"""What the drafters learn: the tokens that follow, behind many positions of a sequence at once.

In training both losses flow on into the target: its hidden states come to hold not only the next token but the ones behind it,
which a drafter as small as the demo's could not find out by itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.device import compiled
from training.dspark import BLOCK, DSpark
from training.model import K3, Output
from training.nextn import NextN, Rows

ANCHORS = 64  # blocks of a sequence
CHAIN = 5  # steps of NextN's training; later ones are its own extrapolation


@compiled
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def dspark_loss(
    target: K3, drafter: DSpark, tokens: Tensor, counts: Tensor, output: Output, length_share: float = 0.0
) -> Tensor:
    """Cross-entropy of ANCHORS blocks a sequence, near proposals weighing most; tokens and counts [B, T], of which `output`
    covers all or all but the last. From it goes `length_share` of the expected number of right proposals before the first wrong
    one. The confidence head learns beside it whether a proposal is right."""
    weights = torch.exp(-torch.arange(BLOCK, device=tokens.device) / 4)
    usable = tokens.shape[1] - BLOCK
    anchors = torch.multinomial(counts[:, 1 : usable + 1].float() + 1e-6, ANCHORS).sort(1).values
    at = anchors.unsqueeze(-1) + torch.arange(BLOCK, device=tokens.device)
    before, labels = pick(tokens, at), pick(tokens, at + 1)
    valid = pick(counts, at + 1).int().cumprod(-1)
    ids = torch.full_like(at, drafter.config["mask_token_id"])
    ids[..., 0] = before[..., 0]
    hidden = drafter(drafter.context(output.taps), anchors, target.embed_tokens(ids))
    logits = target.lm_head(hidden).float() + drafter.markov_head(before).float()
    entropy = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(valid.shape)
    sure = drafter.confidence(hidden.detach(), before).float()
    confidence = F.binary_cross_entropy_with_logits(sure, (logits.argmax(-1) == labels).float(), reduction="none")
    loss = ((entropy + 0.1 * confidence) * valid * weights).sum() / (valid * weights).sum()
    begun, length = valid[..., 0], ((-entropy).exp() * valid).cumprod(-1).sum(-1)
    return loss - length_share * (length * begun).sum() / begun.sum()


def nextn_loss(target: K3, layer: NextN, tokens: Tensor, counts: Tensor, output: Output, begin: int, span: int) -> Tensor:
    """Cross-entropy of chains of CHAIN steps from the `span` positions at `begin`, near steps weighing most."""
    rows, hidden = Rows(), output.hidden[:, begin : begin + span].float()
    begun = counts[:, begin + 1 : begin + 1 + span]
    total = valid = torch.zeros((), device=tokens.device)
    for step in range(CHAIN):
        known = begin + step + 1
        hidden = layer.step(target.embed_tokens(tokens[:, known : known + span]), hidden, rows)
        logits, labels = target.lm_head(hidden).float(), tokens[:, known + 1 : known + 1 + span]
        entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(begun.shape)
        weight = begun * counts[:, known + 1 : known + 1 + span] * 0.8**step
        total = total + (entropy * weight).sum()
        valid = valid + weight.sum()
    return total / valid


def pick(rows: Tensor, at: Tensor) -> Tensor:
    """rows [B, T] at positions [B, A, G] -> [B, A, G]."""
    return rows[torch.arange(len(rows), device=rows.device)[:, None, None], at]
