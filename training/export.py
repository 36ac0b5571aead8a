"""Checkpoints in the released format, out of training's modules and back: `python -m training.export RUN DATA DIRECTORY`.

DIRECTORY gets the target with the NextN layer among its shards, and dspark/ beside them. Routed experts become MXFP4, all else
bfloat16 (float32 where the release has float32), so reading a checkpoint back gives exactly the weights that it serves.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kernels.reference.mxfp4 import dequantize
from training.dspark import DSpark
from training.model import K3, demo_config, demo_model
from training.mxfp4 import GROUP, pack
from training.nextn import NextN
from training.train import Together

MAX_SHARD = 15 * 2**20
PREFIX = "language_model."
FLOAT32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
INDEX = "model.safetensors.index.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    model = Together()
    model.load_state_dict(torch.load(options.run / "state.pt", map_location="cpu")["model"])
    write_model(options.directory, model.target, model.dspark, model.nextn, options.data)


def write_model(directory: Path, target: K3, drafter: DSpark, layer: NextN, data: Path) -> None:
    """All files of the demo model except its card."""
    name = f"model.layers.{target.c.num_hidden_layers}."
    embedding = target.embed_tokens.weight.detach().bfloat16().cpu()
    released = released_tensors(target) | released_tensors(layer, name) | {f"{name}embed_tokens.weight": embedding.clone()}
    write_target(directory, released, data)
    folder = directory / "dspark"
    folder.mkdir(exist_ok=True)
    tensors = {key: value.detach().bfloat16().cpu() for key, value in drafter.state_dict().items()}
    (folder / "config.json").write_text(json.dumps(drafter.config, indent=1) + "\n")
    save_file(tensors | {"embed_tokens.weight": embedding}, folder / "model.safetensors", metadata={"format": "pt"})


def released_tensors(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a K3 or of a part of it, by their names after `language_model.`; `prefix` goes before those of a part."""
    tensors: dict[str, Tensor] = {}
    for key, value in module.state_dict().items():
        name, value = prefix + released_name(key) if prefix else _top_level(released_name(key)), value.detach().float().cpu()
        if name.endswith((".w1", ".w2", ".w3")):
            base, _, which = name.rpartition(".")
            packed, scales = pack(value)
            for expert in range(len(value)):
                tensors[f"{base}.experts.{expert}.{which}.weight_packed"] = packed[expert].contiguous()
                tensors[f"{base}.experts.{expert}.{which}.weight_scale"] = scales[expert].contiguous()
        elif name.endswith("A_log"):
            tensors[name] = torch.cat([value, value.new_zeros(-len(value) % GROUP)])  # the release pads it too
        else:
            tensors[name] = (value if name.endswith(FLOAT32) else value.bfloat16()).contiguous()
    return tensors


def released_name(key: str) -> str:
    for mixer in ("self_attention_res", "mlp_res", "output_attn_res"):
        key = key.replace(f"{mixer}.norm.", f"{mixer}_norm.").replace(f"{mixer}.proj.", f"{mixer}_proj.")
    return key


def _top_level(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


def write_target(directory: Path, tensors: dict[str, Tensor], data: Path) -> None:
    """Shards, index, config.json and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.safetensors"):
        old.unlink()
    shards = list(_shards({PREFIX + name: tensor for name, tensor in tensors.items()}))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    (directory / "config.json").write_text(json.dumps(demo_config(), indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if data.resolve() != directory.resolve():
            shutil.copyfile(data / name, directory / name)


def _shards(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """In order, each below MAX_SHARD with room for its header."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        cost = tensor.nbytes + 200
        if shard and size + cost > MAX_SHARD:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += cost
    yield shard


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files; the target's without `language_model.`."""
    tensors: dict[str, Tensor] = {}
    for path in [directory] if directory.is_file() else sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}
    return tensors


def fill(module: nn.Module, tensors: dict[str, Tensor], prefix: str = "") -> None:
    """Puts released tensors into a K3 or a part of it, as float32."""
    state = {}
    for key, value in module.state_dict().items():
        name = prefix + released_name(key) if prefix else _top_level(released_name(key))
        if name.endswith((".w1", ".w2", ".w3")):
            base, _, which = name.rpartition(".")
            experts = [f"{base}.experts.{expert}.{which}" for expert in range(len(value))]
            packed = torch.stack([tensors[f"{e}.weight_packed"] for e in experts])
            state[key] = dequantize(packed, torch.stack([tensors[f"{e}.weight_scale"] for e in experts]), torch.float32)
        else:
            state[key] = tensors[name].float().flatten()[: value.numel()].view(value.shape)
    module.load_state_dict(state)


def read_target(directory: Path) -> K3:
    """The checkpoint's weights in training's module. Its experts are MXFP4 values, which quantisation leaves as they are."""
    model = K3(demo_model())
    fill(model, read_tensors(directory))
    for moe in model.mixtures():
        moe.packed = True
    return model.eval()


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


if __name__ == "__main__":
    main()
