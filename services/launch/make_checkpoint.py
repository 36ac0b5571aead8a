"""`k3mesh make-checkpoint DIR`: a random checkpoint in the released K3 format, of any geometry, with a small tokenizer.

--draft nextn adds the NextN layer to it. --draft dspark writes into DIR the drafter for the checkpoint that the same arguments
make without it.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from k3mesh.errors import ConfigError, MeshError
from services.contracts.draft import ATTN_RES, PREFIX, parse_draft_config
from services.contracts.model import ModelConfig, parse_model_config
from services.launch import draft_tensors
from services.launch.checkpoint_tensors import GROUP, TensorSpec, embedding, head, tensor_specs
from services.launch.tokenizer_files import (
    BOS,
    END_OF_MESSAGE,
    MEDIA,
    MIN_VOCABULARY,
    PAD,
    SPECIAL_IDS,
    tokenizer_files,
    whole_words,
)

RECORD = "k3mesh_checkpoint.json"  # the arguments of the run that wrote the directory; written last
RECORD_VERSION = 1  # raise it when equal arguments give other bytes

TINY = {
    "vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 13, "num_attention_heads": 4, "q_lora_rank": 48,
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "kda_num_heads": 4,
    "kda_head_dim": 32, "short_conv_kernel_size": 4, "intermediate_size": 256, "first_k_dense_replace": 1,
    "num_experts": 16, "num_experts_per_token": 4, "num_shared_experts": 2, "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 64, "attn_res_block_size": 4, "max_position_embeddings": 1048576,
}  # fmt: skip
K3 = {
    "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kda_num_heads": 96,
    "kda_head_dim": 128, "short_conv_kernel_size": 4, "intermediate_size": 33792, "first_k_dense_replace": 1,
    "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584, "attn_res_block_size": 12, "max_position_embeddings": 1048576,
}  # fmt: skip
SLIM = {**K3, "vocab_size": 32768, "num_hidden_layers": 5, "num_experts": 32, "attn_res_block_size": 2}  # K3's widths
PRESETS = {"tiny": TINY, "k3": K3, "slim": SLIM}
MAY_BE_ZERO = {"first_k_dense_replace"}
DSPARK, NEXTN = "dspark", "nextn"


@dataclass(frozen=True)
class DraftPlan:
    """What drafter to write."""

    kind: str
    preset: str
    taps: list[int]
    stream: str
    fc_norm: bool
    block_size: int | None


@dataclass(frozen=True)
class Plan:
    """What to write: a whole checkpoint follows from these."""

    dimensions: dict[str, int]
    full_attn_layers: list[int]  # 1-based
    seed: int
    tokenizer: bool
    max_shard_bytes: int
    draft: DraftPlan | None = None
    device: str = "cpu"

    def record(self) -> dict[str, Any]:
        own = {key: value for key, value in vars(self).items() if key not in ("draft", "device")}
        own |= {"device": self.device} if self.device != "cpu" else {}
        return {"version": RECORD_VERSION, **own, **({"draft": vars(self.draft)} if self.draft else {})}


def main(argv: list[str]) -> int:
    """Write the checkpoint; 0, or 2 after one line that says which argument is wrong."""
    try:
        options = _parse(argv)
        directory, plan = Path(options.directory), _plan(options)
        contents = _contents(plan)
        if _is_written(directory, plan, options.force):
            print(f"{directory}: already there, made with the same arguments")
            return 0
        size = _write(directory, plan, contents)
        print(f"{directory}: {contents.layers} layers, {size / 1e6:.1f} MB, seed {plan.seed}")
        return 0
    except MeshError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; --help lists all flags")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="k3mesh make-checkpoint", description=__doc__, allow_abbrev=False)
    parser.add_argument("directory", help="where to write; must not exist, or be empty")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="geometry that the flags below change")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; equal arguments give equal bytes")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what draws the weights; a GPU draws others, and much faster"
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="leave out tokenizer.json and tokenizer_config.json")
    parser.add_argument(
        "--max-shard-size", type=int, default=4096, metavar="MB", help="split the weights into files below this"
    )
    parser.add_argument("--force", action="store_true", help="replace the checkpoint that is there")
    draft = parser.add_argument_group("drafter")
    draft.add_argument("--draft", choices=(DSPARK, NEXTN), help="write this drafter: dspark alone, nextn with the target")
    draft.add_argument("--target-layer-ids", metavar="N,N,...", help="dspark's taps: target layers, counted from 0")
    draft.add_argument("--aux-hidden-stream", choices=(PREFIX, ATTN_RES), default=PREFIX, help="what dspark's taps read")
    draft.add_argument("--fc-norm", action="store_true", help="dspark norms each tap")
    draft.add_argument("--block-size", type=int, metavar="N", help="proposals that dspark's config.json names; default: none")
    geometry = parser.add_argument_group("geometry")
    for field in TINY:
        geometry.add_argument(_flag(field), type=int, metavar="N", help=f"tiny {TINY[field]}, k3 {K3[field]}")
    geometry.add_argument(
        "--full-attn-layers", metavar="N,N,...", help="MLA layers, counted from 1; default: every fourth and the last"
    )
    return parser.parse_args(argv)


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _plan(options: argparse.Namespace) -> Plan:
    """Presets and flags, checked by the rules that a flag can break. ConfigError names flag, value and rule."""
    given = {field: value for field in TINY if (value := getattr(options, field)) is not None}
    dimensions = PRESETS[options.preset] | given

    def require(condition: bool, field: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{_flag(field)} {dimensions[field]}: {rule}", param=field)

    for field, value in dimensions.items():
        least = 0 if field in MAY_BE_ZERO else 1
        require(value >= least, field, f"must be at least {least}")
    require(
        dimensions["vocab_size"] >= MIN_VOCABULARY, "vocab_size",
        f"must be at least {MIN_VOCABULARY}: 256 bytes and {SPECIAL_IDS} ids for special tokens",
    )  # fmt: skip
    for field in ("moe_intermediate_size", "routed_expert_hidden_size"):
        require(dimensions[field] % GROUP == 0, field, f"must be a multiple of the MXFP4 group, {GROUP}")
    require(
        dimensions["num_experts_per_token"] <= dimensions["num_experts"], "num_experts_per_token",
        f"must not exceed --num-experts {dimensions['num_experts']}",
    )  # fmt: skip
    layers = dimensions["num_hidden_layers"]
    require(
        dimensions["first_k_dense_replace"] <= layers, "first_k_dense_replace", f"must not exceed --num-hidden-layers {layers}"
    )
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: must not be negative", param="seed")
    if options.max_shard_size < 1:
        raise ConfigError(f"--max-shard-size {options.max_shard_size}: must be at least 1 MB", param="max_shard_size")
    return Plan(
        dimensions,
        _full_attn_layers(options.full_attn_layers, layers),
        options.seed,
        not options.no_tokenizer and options.draft != DSPARK,
        options.max_shard_size * 10**6,
        _draft_plan(options, layers),
        options.device,
    )


def _draft_plan(options: argparse.Namespace, layers: int) -> DraftPlan | None:
    if options.draft is None:
        return None
    text = options.target_layer_ids
    if text is None:
        taps = draft_tensors.default_taps(layers)
    else:
        words = text.split(",")
        taps = [int(word) for word in words if word.strip().isdecimal()]
        if len(taps) != len(words):
            raise ConfigError(
                f"--target-layer-ids {text}: must be layer numbers from 0, separated by commas", param="target_layer_ids"
            )
    return DraftPlan(options.draft, options.preset, taps, options.aux_hidden_stream, options.fc_norm, options.block_size)


@dataclass(frozen=True)
class Contents:
    """The files of a checkpoint, weights as what is drawn for them."""

    layers: int
    files: dict[str, bytes]
    specs: list[TensorSpec]


def _contents(plan: Plan) -> Contents:
    """What the plan says. ConfigError if its numbers do not make a model."""
    config, draft = released_config(plan), plan.draft
    model = parse_model_config(config, "the new config.json")
    if draft is not None and draft.kind == DSPARK:
        config = draft_tensors.dspark_config(model, draft.preset, draft.taps, draft.stream, draft.fc_norm, draft.block_size)
        drafter = parse_draft_config(config, "the new config.json", model)
        specs = draft_tensors.dspark_specs(drafter, embedding(model))
        return Contents(drafter.num_hidden_layers, {"config.json": _json(config)}, list(specs))
    quiet = _quiet_tokens(model) if plan.tokenizer else ()
    specs = list(tensor_specs(model, quiet))
    if draft is not None:
        config = draft_tensors.with_nextn(config)
        specs += draft_tensors.nextn_specs(model, embedding(model), head(model, quiet))
    files = {"config.json": _json(config), **(tokenizer_files(model.vocab_size) if plan.tokenizer else {})}
    return Contents(model.num_hidden_layers, files, specs)


def _full_attn_layers(text: str | None, layers: int) -> list[int]:
    """1-based MLA layers; K3's rule is every fourth and the last (spec k3-model §1)."""
    if text is None:
        return [n for n in range(1, layers + 1) if n % 4 == 0 or n == layers]
    words = text.split(",")
    numbers = sorted({int(word) for word in words if word.isdecimal()})
    if len(numbers) != len(words) or numbers[0] < 1 or numbers[-1] > layers:
        raise ConfigError(
            f"--full-attn-layers {text}: must be different layer numbers from 1 to {layers}, separated by commas",
            param="full_attn_layers",
        )
    return numbers


def k3_config() -> dict[str, Any]:
    """config.json of K3 itself."""
    full_attn_layers = _full_attn_layers(None, K3["num_hidden_layers"])
    return released_config(Plan(K3, full_attn_layers, seed=0, tokenizer=False, max_shard_bytes=0))


def released_config(plan: Plan) -> dict[str, Any]:
    """config.json in the released form: the text model's keys under text_config."""
    dimensions = dict(plan.dimensions)
    layers = range(1, dimensions["num_hidden_layers"] + 1)
    linear = {
        "full_attn_layers": plan.full_attn_layers,
        "kda_layers": [n for n in layers if n not in plan.full_attn_layers],
        "num_heads": dimensions.pop("kda_num_heads"),
        "head_dim": dimensions.pop("kda_head_dim"),
        "short_conv_kernel_size": dimensions.pop("short_conv_kernel_size"),
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    }
    first = dimensions["vocab_size"] - SPECIAL_IDS
    ids = {"pad_token_id": first + PAD, "bos_token_id": first + BOS, "eos_token_id": first + END_OF_MESSAGE}
    weights = {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False,
        "observer": "minmax", "scale_dtype": "torch.uint8",
    }  # fmt: skip
    group = {
        "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": weights,
    }  # fmt: skip
    ignored = (
        "self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower", "mm_projector"
    )  # fmt: skip
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": dimensions["num_attention_heads"],
        **ids,
        "linear_attn_config": linear,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": [f"re:.*{pattern}.*" for pattern in ignored],
        },
        **dimensions,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text,
        **ids,
        "media_placeholder_token_id": first + MEDIA,
        "tie_word_embeddings": False,
    }


def _is_written(directory: Path, plan: Plan, force: bool) -> bool:
    """Whether `directory` already holds this very checkpoint. ConfigError if it holds anything else, unless `force` and it
    is a checkpoint of this command."""
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise ConfigError(f"{directory}: is a file; name a directory")
    if not any(directory.iterdir()):
        return False
    record = _read_record(directory)
    if record is None:
        raise ConfigError(f"{directory}: holds files that `k3mesh make-checkpoint` did not write; choose another directory")
    if force:
        return False
    if {key: value for key, value in record.items() if key != "files"} != plan.record():
        raise ConfigError(f"{directory}: holds a checkpoint made with other arguments; add --force to replace it")
    damaged = [name for name, size in record["files"].items() if not _has_size(directory / name, size)]
    if damaged:
        raise ConfigError(f"{directory}: {', '.join(damaged)} is missing or cut short; add --force to write it anew")
    return True


def _read_record(directory: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((directory / RECORD).read_text())
        return record if isinstance(record, dict) and isinstance(record.get("files"), dict) else None
    except (OSError, ValueError):
        return None


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _write(directory: Path, plan: Plan, contents: Contents) -> int:
    """Write everything beside `directory`, then put it there in one rename. Returns the bytes written."""
    directory = directory.absolute()
    _require_space(directory, sum(spec.nbytes for spec in contents.specs))
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        for name, content in contents.files.items():
            (new / name).write_bytes(content)
        _write_weights(new, contents.specs, plan)
        files = {path.name: path.stat().st_size for path in sorted(new.iterdir())}
        (new / RECORD).write_bytes(_json(plan.record() | {"files": files}))
        if directory.exists():
            directory.rename(old)
        new.rename(directory)
    return sum(files.values())


def _quiet_tokens(model: ModelConfig) -> tuple[int, ...]:
    """Tokens that are no word by themselves, so that an answer reads as words and not as broken UTF-8; the end of a message
    stays."""
    spoken = whole_words(model.vocab_size) | set(model.eos_token_ids)
    return tuple(token for token in range(model.vocab_size) if token not in spoken)


def _require_space(directory: Path, needed: int) -> None:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ConfigError(
            f"{directory}: the checkpoint takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
            "make it smaller (--num-hidden-layers, --num-experts) or choose another disk"
        )


def _write_weights(directory: Path, specs: list[TensorSpec], plan: Plan) -> None:
    """model.safetensors, or several files and their index."""
    shards = list(_shards(specs, plan.max_shard_bytes))
    if len(shards) == 1:
        _write_safetensors(directory / "model.safetensors", shards[0], plan)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(directory / name, shard, plan)
        weight_map |= {spec.name: name for spec in shard}
    index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_bytes(_json(index))


def _shards(specs: list[TensorSpec], limit: int) -> Iterator[list[TensorSpec]]:
    """Consecutive tensors that fit into `limit` bytes; a larger tensor has a file of its own."""
    shard: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if shard and size + spec.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(spec)
        size += spec.nbytes
    yield shard


def _write_safetensors(path: Path, specs: list[TensorSpec], plan: Plan) -> None:
    """The safetensors format: length of the header, header, data. Widest dtype first, so that every tensor is aligned."""
    ordered = sorted(specs, key=lambda spec: ("F32", "BF16", "U8").index(spec.dtype))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in ordered:
        header[spec.name] = {
            "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes]
        }  # fmt: skip
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in ordered:
            file.writelines(_blocks(spec, plan))
        file.flush()
        os.fsync(file.fileno())


def _blocks(spec: TensorSpec, plan: Plan) -> Iterator[bytes]:
    if plan.device == "cpu":
        return spec.blocks(plan.seed)
    from services.launch.cuda_tensors import blocks  # loads torch, which a CPU does not need here

    return blocks(spec, plan.seed)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
