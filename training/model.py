"""The differentiable K3, as large as the demo needs it (spec k3-model §2)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.contracts.model import ModelConfig, parse_model_config
from services.launch.make_checkpoint import Plan, released_config
from services.launch.tokenizer_files import SPECIAL_IDS, SPECIAL_TOKENS
from training.layers import Kda, LatentMoe, Linear, Memory, Mixer, Mla, Mlp, Norm, Table

VOCABULARY = 640  # 256 bytes, 128 merges and K3's 256 special ids: short tokens, which a drafter can guess by their spelling
DIMENSIONS = {
    "vocab_size": VOCABULARY, "hidden_size": 384, "num_hidden_layers": 9, "num_attention_heads": 6, "q_lora_rank": 192,
    "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "kda_num_heads": 6,
    "kda_head_dim": 64, "short_conv_kernel_size": 4, "intermediate_size": 768, "first_k_dense_replace": 1,
    "num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 2, "moe_intermediate_size": 128,
    "routed_expert_hidden_size": 192, "attn_res_block_size": 4, "max_position_embeddings": 1048576,
}  # fmt: skip
MLA_LAYERS = [4, 8, 9]  # counted from 1: every fourth and the last, so the last two are both MLA as in K3
TAPS = (1, 3, 5, 8)  # of the drafter: one for each of four stages, one at a block's edge, one behind the last layer


def demo_config() -> dict:
    """config.json in the released form, with the NextN layer counted."""
    plan = Plan(DIMENSIONS, MLA_LAYERS, seed=0, tokenizer=True, max_shard_bytes=0)
    config = released_config(plan)
    config["text_config"]["num_nextn_predict_layers"] = 1
    return config


def demo_model() -> ModelConfig:
    return parse_model_config(demo_config(), "training.model.DIMENSIONS")


def special_id(token: str) -> int:
    place = next(place for place, name in SPECIAL_TOKENS.items() if name == token)
    return VOCABULARY - SPECIAL_IDS + place


@dataclass
class Output:
    """Of T tokens: what the head reads, and the taps in the stream `attn_res`."""

    hidden: Tensor  # [B, T, h], normed
    taps: list[Tensor]  # [B, T, h] each


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.closes = layer, c.closes_block(layer)
        self.self_attention_res, self.mlp_res = Mixer(c.hidden_size), Mixer(c.hidden_size)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Mla(c) if c.is_mla(layer) else Kda(c)
        if c.is_dense(layer):
            self.mlp = Mlp(c, c.intermediate_size)
        else:
            self.block_sparse_moe = LatentMoe(c)

    def forward(self, blocks: list[Tensor], prefix: Tensor, memory: Memory | None) -> tuple[list[Tensor], Tensor, Tensor]:
        """-> blocks, prefix, and the mix at this layer's entry, which a drafter may tap."""
        entry = self.self_attention_res(blocks, prefix)
        a = self.self_attn(self.input_layernorm(entry), memory, self.layer)
        if self.closes:
            blocks, prefix = [*blocks, prefix], a.float()
        else:
            prefix = prefix + a
        y = self.post_attention_layernorm(self.mlp_res(blocks, prefix))
        ffn = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return blocks, prefix + ffn(y), entry


class K3(nn.Module):
    """Embedding, layers, output mix and head."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.c = c
        self.embed_tokens = Table(c.vocab_size, c.hidden_size, std=1.0)
        self.layers = nn.ModuleList(Layer(c, layer) for layer in range(c.num_hidden_layers))
        self.output_attn_res = Mixer(c.hidden_size)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, gain=0.5)

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> Output:
        """tokens [B, T]; with `memory` T is 1 and the sequences go on from there."""
        blocks: list[Tensor] = []
        prefix = self.embed_tokens(tokens)
        entries: list[Tensor] = []
        for layer in self.layers:
            blocks, prefix, entry = layer(blocks, prefix, memory)
            entries.append(entry)
        final = self.output_attn_res(blocks, prefix)
        entries.append(final)
        if memory is not None:
            memory.length += 1
        return Output(self.norm(final), [entries[tap + 1] for tap in TAPS])

    def mixtures(self) -> list[LatentMoe]:
        """Of every layer that has one, from below."""
        return [module for module in self.modules() if isinstance(module, LatentMoe)]


@torch.no_grad()
def generate(model: K3, prompts: Tensor, lengths: Tensor, total: int, temperature: Tensor | None = None) -> Tensor:
    """prompts [B, P], of which row b's first lengths[b] ids count -> [B, total]: each row goes on by itself, greedily or at
    temperature [B, 1] where that is above zero."""
    memory = Memory(capacity=total)
    tokens = torch.zeros(len(prompts), total, dtype=torch.long, device=prompts.device)
    tokens[:, 0] = prompts[:, 0]
    for position in range(total - 1):
        logits = model.lm_head(model(tokens[:, position : position + 1], memory).hidden)[:, 0].float()
        best = logits.argmax(-1)
        if temperature is not None:
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-9, 1 - 1e-7)))
            best = (logits + temperature * noise).argmax(-1)
        following = position + 1
        if following < prompts.shape[1]:
            best = torch.where(following < lengths, prompts[:, following], best)
        tokens[:, following] = best
    return tokens
