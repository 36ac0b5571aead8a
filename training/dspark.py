"""The DSpark drafter, differentiable (spec speculation §1 to §6). Parameter names are those of a k3_dspark checkpoint."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.contracts.model import ModelConfig
from training.layers import Linear, Norm, Table
from training.model import TAPS

BLOCK = 7  # proposals, and query rows: the anchor and six masks
MASK_FROM_END = 3  # the mask token's place before the vocabulary's end, as in the published drafters


def dspark_config(target: ModelConfig) -> dict:
    """config.json of the demo's drafter."""
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32768, "rope_theta": 50000.0,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": target.max_position_embeddings,
        "num_target_layers": len(TAPS),
        "target_layer_ids": list(TAPS),
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_hidden_layers,
        "aux_hidden_stream": "attn_res",
        "fc_norm": True,
        "mask_token_id": target.vocab_size - MASK_FROM_END,
        "markov_rank": 128,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip


class DSpark(nn.Module):
    """Context from the target's taps, and a block of BLOCK rows behind each anchor."""

    def __init__(self, config: dict):
        super().__init__()
        c = self.config = config
        d, eps = c["hidden_size"], c["rms_norm_eps"]
        self.fc_norm = nn.ModuleList(Norm(d, eps) for _ in c["target_layer_ids"])
        self.context_proj = Linear(len(c["target_layer_ids"]) * d, d)
        self.context_norm, self.final_norm = Norm(d, eps), Norm(d, eps)
        self.layers = nn.ModuleList(DSparkLayer(c) for _ in range(c["num_hidden_layers"]))
        self.markov_head = MarkovHead(c)
        self.confidence_head = ConfidenceHead(d + c["markov_rank"])

    def context(self, taps: list[Tensor]) -> Tensor:
        """Taps [B, T, h] each -> C [B, T, d]."""
        normed = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        return self.context_norm(self.context_proj(torch.cat(normed, -1)).float())

    def forward(self, context: Tensor, anchors: Tensor, x: Tensor) -> Tensor:
        """context [B, T, d]; anchors [B, A] positions; x [B, A, BLOCK, d] embedded -> H [B, A, BLOCK, d]."""
        batch, count = anchors.shape
        positions = (anchors.unsqueeze(-1) + torch.arange(BLOCK, device=x.device)).flatten(1)
        owner = torch.arange(count, device=x.device).repeat_interleave(BLOCK)
        before = torch.arange(context.shape[1], device=x.device) < anchors.repeat_interleave(BLOCK, 1).unsqueeze(-1)
        inside = (owner[:, None] == owner[None]).expand(batch, -1, -1)
        mask = torch.cat([before, inside], -1).unsqueeze(1)
        rows = x.flatten(1, 2)
        for layer in self.layers:
            rows = layer(rows, positions, context, mask)
        return self.final_norm(rows).unflatten(1, (count, BLOCK))

    def confidence(self, hidden: Tensor, token: Tensor) -> Tensor:
        """Logit of a proposal's acceptance."""
        before = self.markov_head.markov_w1(token).to(hidden.dtype)
        return self.confidence_head.proj(torch.cat([hidden, before], -1))[..., 0]


class DSparkLayer(nn.Module):
    """Plain pre-norm: rotary MLA over context rows and the block, SwiGLU."""

    def __init__(self, c: dict):
        super().__init__()
        d = c["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = Norm(d, c["rms_norm_eps"]), Norm(d, c["rms_norm_eps"])
        self.self_attn = RotaryMla(c)
        self.mlp = SwiGlu(d, c["intermediate_size"])

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class SwiGlu(nn.Module):
    def __init__(self, outer: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Linear(outer, inner), Linear(outer, inner), Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MarkovHead(nn.Module):
    """What the token before adds to the logits: [...] -> [..., V]."""

    def __init__(self, c: dict):
        super().__init__()
        self.markov_w1 = Table(c["vocab_size"], c["markov_rank"], std=1.0)
        self.markov_w2 = Table(c["vocab_size"], c["markov_rank"], std=0.0)

    def forward(self, token: Tensor) -> Tensor:
        return F.linear(self.markov_w1(token), self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)


class RotaryMla(nn.Module):
    """Context rows enter without the layer's input norm."""

    def __init__(self, c: dict):
        super().__init__()
        self.c = c
        d, heads, eps = c["hidden_size"], c["num_attention_heads"], c["rms_norm_eps"]
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        self.q_a_proj, self.q_a_layernorm = Linear(d, c["q_lora_rank"]), Norm(c["q_lora_rank"], eps)
        self.q_b_proj = Linear(c["q_lora_rank"], heads * (nope + rope))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = Linear(d, c["kv_lora_rank"] + rope), Norm(c["kv_lora_rank"], eps)
        self.kv_b_proj = Linear(c["kv_lora_rank"], heads * (nope + value))
        self.o_proj = Linear(heads * value, d)
        self.register_buffer("frequency", frequencies(c["rope_parameters"], rope), persistent=False)
        self.frequency: Tensor
        magnitude = 0.1 * math.log(c["rope_parameters"]["factor"]) + 1
        self.scale = (nope + rope) ** -0.5 * magnitude**2

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        heads, nope = self.c["num_attention_heads"], self.c["qk_nope_head_dim"]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (heads, -1))
        q = torch.cat([q[..., :nope], rotate(q[..., nope:], positions, self.frequency)], -1)
        everywhere = torch.arange(context.shape[1], device=x.device).expand(len(x), -1)
        seen = [self._keys(context, everywhere), self._keys(x, positions)]
        k, v = (torch.cat([part[which] for part in seen], 1).transpose(1, 2) for which in (0, 1))
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, padded, attn_mask=mask, scale=self.scale)
        return self.o_proj(o[..., : v.shape[-1]].transpose(1, 2).flatten(-2))

    def _keys(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """rows [B, S, d] -> k [B, S, H, dk], v [B, S, H, dv]."""
        c = self.c
        latent, key = self.kv_a_proj_with_mqa(rows).split([c["kv_lora_rank"], c["qk_rope_head_dim"]], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c["num_attention_heads"], -1))
        k, v = kv.split([c["qk_nope_head_dim"], c["v_head_dim"]], -1)
        key = rotate(key.unsqueeze(-2), positions, self.frequency).expand(*k.shape[:-1], -1)
        return torch.cat([k, key], -1), v


def frequencies(rope: dict, dim: int) -> Tensor:
    """[dim / 2] radians a position: YaRN's, fast pairs as they are and slow ones divided by the factor."""
    pair = torch.arange(dim // 2, dtype=torch.float64)
    plain = rope["rope_theta"] ** (-2 * pair / dim)

    def pair_of(turns: float) -> float:
        whole = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(whole) / (2 * math.log(rope["rope_theta"]))

    low = max(math.floor(pair_of(rope["beta_fast"])), 0)
    high = min(math.ceil(pair_of(rope["beta_slow"])), dim - 1)
    slow = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return (plain * (1 - slow) + plain / rope["factor"] * slow).float()


def rotate(x: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
    """x [B, S, H, dim], interleaved pairs, at positions [B, S]."""
    angle = (positions.unsqueeze(-1) * frequency).unsqueeze(-2)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


@torch.no_grad()
def propose(drafter: DSpark, embedding: Tensor, head: Tensor, taps: list[Tensor], tokens: Tensor, anchors: Tensor) -> Tensor:
    """Greedy proposals [B, A, BLOCK] after the tokens [B, T] at positions `anchors` [B, A]."""
    ids = torch.full((*anchors.shape, BLOCK), drafter.config["mask_token_id"], device=tokens.device)
    ids[..., 0] = token = tokens.gather(1, anchors)
    base = F.linear(drafter(drafter.context(taps), anchors, embedding[ids]), head)
    proposals = []
    for k in range(BLOCK):
        token = (base[:, :, k].float() + drafter.markov_head(token).float()).argmax(-1)
        proposals.append(token)
    return torch.stack(proposals, -1)
