"""A random target whose next token follows mostly from the last one, and drafters that know that part of it: windows are
sometimes right and sometimes wrong, after any number of proposals."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.launch.make_checkpoint import main as make_checkpoint

WEIGHTS = "model.safetensors"
QUIET = ("o_proj.weight", "down_proj.weight", "routed_expert_up_proj.weight")  # what sublayers add to the stream


def predictable(folder: Path, *flags: str, share: float = 0.1) -> tuple[Path, Path]:
    """A target with its NextN layer, and a DSpark drafter for it. `share` scales what layers add to the token's embedding:
    with 0 every proposal would be right, with 1 hardly any."""
    target, drafter = folder / "target", folder / "dspark"
    assert make_checkpoint([str(target), "--draft", "nextn", *flags]) == 0
    assert make_checkpoint([str(drafter), "--draft", "dspark", "--aux-hidden-stream", "attn_res", "--fc-norm", *flags]) == 0
    weights = load_file(target / WEIGHTS)
    for name in weights:
        if name.endswith(QUIET):
            weights[name] = (weights[name].float() * share).bfloat16()
    _prefer_tokens(weights)
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    _teach_markov_head(drafter, weights)
    return target, drafter


def _prefer_tokens(weights: dict[str, Tensor]) -> None:
    """The NextN layer looks at the token alone, as far as its first projection goes."""
    (name,) = [name for name in weights if name.endswith("eh_proj.weight")]
    width = weights[name].shape[0]
    weights[name] = torch.cat([torch.eye(width), torch.zeros(width, width)], 1).bfloat16()
    weights[name.replace("eh_proj", "enorm")] = torch.ones(width).bfloat16()
    weights[name.replace("eh_proj", "shared_head.norm")] = weights["language_model.model.norm.weight"].clone()


def _teach_markov_head(drafter: Path, target: dict[str, Tensor]) -> None:
    """Rank = width: the head's bias is the target's logits for the bare embedding; the block adds a little to it."""
    config = json.loads((drafter / "config.json").read_text())
    embedding = target["language_model.model.embed_tokens.weight"].float()
    normed = embedding / (embedding.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    weights = load_file(drafter / WEIGHTS)
    weights["markov_head.markov_w1.weight"] = (normed * target["language_model.model.norm.weight"].float()).bfloat16()
    weights["markov_head.markov_w2.weight"] = target["language_model.lm_head.weight"].clone()
    weights["final_norm.weight"] = (weights["final_norm.weight"].float() * 0.05).bfloat16()
    width = embedding.shape[1]
    weights["confidence_head.proj.weight"] = torch.zeros(1, 2 * width).bfloat16()
    save_file(weights, drafter / WEIGHTS, {"format": "pt"})
    (drafter / "config.json").write_text(json.dumps(config | {"markov_rank": width}))
