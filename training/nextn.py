"""The NextN layer, differentiable (spec speculation §11): it reads the token after a position and the hidden there, and
predicts the token after that; from its own output it goes on, one row a step."""

import torch
from torch import Tensor, nn

from services.contracts.model import ModelConfig
from training.layers import LatentMoe, Linear, Mixer, Mla, Norm


class NextN(nn.Module):
    """One MLA and MoE layer without attention residuals, whose tensors it has all the same."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        h, eps = c.hidden_size, c.rms_norm_eps
        self.c = c
        self.enorm, self.hnorm = Norm(h, eps), Norm(h, eps)
        self.eh_proj = Linear(2 * h, h)
        self.self_attention_res, self.mlp_res = Mixer(h), Mixer(h)
        self.input_layernorm, self.post_attention_layernorm = Norm(h, eps), Norm(h, eps)
        self.self_attn = Mla(c)
        self.block_sparse_moe = LatentMoe(c)
        self.shared_head = SharedHead(c)

    def step(self, embedded: Tensor, hidden: Tensor, rows: "Rows") -> Tensor:
        """Row p of each: [B, P, h] the token's embedding and the hidden before it -> [B, P, h], what the head and the next
        step read. `rows` holds what the steps before have cached and gets this step's."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)).float()
        y = self.input_layernorm(x)
        x = x + self.self_attn.output(rows.attend(*self.self_attn.heads(y), self.c.qk_head_dim**-0.5), y)
        x = x + self.block_sparse_moe(self.post_attention_layernorm(x))
        return self.shared_head.norm(x)


class SharedHead(nn.Module):
    """The head itself is the target's."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


class Rows:
    """Cached rows of chains that start at every position at once: step 0's rows belong to all later chains, a later step's
    row to its own chain."""

    def __init__(self) -> None:
        self._shared: tuple[Tensor, Tensor] | None = None
        self._own: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q, k [B, H, P, dk], v [B, H, P, dv] of one step -> [B, H, P, dv]."""
        if self._shared is None:
            self._shared = (k, v)
        else:
            self._own.append((k, v))
        keys, values = self._shared
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ keys.mT).float().masked_fill(future, float("-inf"))]
        scores += [(q * own).sum(-1, keepdim=True).float() for own, _ in self._own]
        shares = (torch.cat(scores, -1) * scale).softmax(-1).to(v.dtype)
        out = shares[..., : keys.shape[2]] @ values
        for n, (_, own) in enumerate(self._own):
            out = out + shares[..., keys.shape[2] + n, None] * own
        return out


@torch.no_grad()
def propose(layer: NextN, embedding: Tensor, head: Tensor, hidden: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Greedy proposals [B, T, count] after the token at each position; those at position 0 are nothing.

    hidden [B, T, h] are the target's, tokens [B, T]. A chain of anchor n starts from the hidden at n - 1.
    """
    rows, out, token = Rows(), hidden[:, :-1], tokens[:, 1:]
    proposals = []
    for _ in range(count):
        out = layer.step(embedding[token], out, rows)
        token = (out @ head.T).argmax(-1)
        proposals.append(token)
    chains = torch.stack(proposals, -1)
    return torch.cat([torch.zeros_like(chains[:, :1]), chains], 1)
