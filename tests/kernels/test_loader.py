"""Reading a checkpoint: each rank its own ranges, and errors that say what is wrong where."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3mesh.errors import ConfigError
from services.contracts.sharding import PREFIX, stage_targets
from services.contracts.topology import Topology
from services.worker.model.loader import INDEX, SINGLE, load_stage_weights
from tests.lib.golden import GOLDEN, TINY, golden_model, needs_golden, topology_of

pytestmark = needs_golden

LAYER = f"{PREFIX}model.layers."


@pytest.fixture(scope="module")
def released() -> dict[str, Tensor]:
    return load_file(GOLDEN / TINY / SINGLE)


def load(path: Path, topology: Topology | None = None, rank: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = golden_model(TINY)
    topology = topology or topology_of(model)
    return load_stage_weights(path, model, topology, topology.place_of(rank), dtype)


def changed(released: dict[str, Tensor], folder: Path, changes: dict[str, Tensor | None]) -> Path:
    """A copy of the checkpoint with some tensors replaced, or left out where None."""
    tensors = {name: tensor for name, tensor in (released | changes).items() if tensor is not None}
    save_file(tensors, folder / SINGLE)
    return folder


def sharded(released: dict[str, Tensor], folder: Path) -> dict[str, list[str]]:
    """The checkpoint as one file a layer, and one for the rest, with an index -> tensors by file."""
    files: dict[str, list[str]] = {}
    for name in released:
        layer = name.removeprefix(LAYER).split(".")[0] if name.startswith(LAYER) else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({name: released[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def test_one_rank_alone_uses_every_released_tensor_once(released: dict[str, Tensor]):
    model = golden_model(TINY)
    topology = topology_of(model)
    sources = [s.tensor for t in stage_targets(model, topology, topology.place_of(0)) for s in t.sources]
    assert sorted(PREFIX + name for name in sources) == sorted(released)


@pytest.mark.parametrize(("stages", "dp", "tp"), [(1, 1, 2), (1, 1, 4), (4, 1, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)])
def test_the_ranks_together_hold_every_element_and_split_tensors_only_once(
    released: dict[str, Tensor], stages: int, dp: int, tp: int
):
    """Ranges of a split tensor tile it; a tensor is either whole or in equal parts on the ranks of its group."""
    model = golden_model(TINY)
    topology = topology_of(model, stages=stages, dp=dp, tp=tp)
    ranges: dict[str, set[tuple[int, int, int]]] = {}
    for rank in range(topology.world_size):
        for target in stage_targets(model, topology, topology.place_of(rank)):
            for source in target.sources:
                ranges.setdefault(PREFIX + source.tensor, set()).add((source.dim, source.start, source.stop))
    assert ranges.keys() == released.keys()
    for tensor, parts in ranges.items():
        dims, ordered = {dim for dim, _, _ in parts}, sorted((start, stop) for _, start, stop in parts)
        assert len(dims) == 1
        extent = model.kda_num_heads if tensor.endswith("A_log") else released[tensor].shape[dims.pop()]
        assert [0, *(stop for _, stop in ordered)] == [*(start for start, _ in ordered), extent]


def test_fused_and_stacked_targets_hold_their_parts_in_order(released: dict[str, Tensor]):
    weights = load(GOLDEN / TINY)
    attention = f"{LAYER}0.self_attn."
    parts = [released[f"{attention}{name}_proj.weight"].float() for name in ("q", "k", "v", "g", "f_a", "b")]
    assert torch.equal(weights["model.layers.0.self_attn.in_proj.weight"], torch.cat(parts))
    convs = [released[f"{attention}{name}_conv1d.weight"][:, 0] for name in "qkv"]
    assert torch.equal(weights["model.layers.0.self_attn.conv1d.weight"], torch.cat(convs))
    experts = f"{LAYER}12.block_sparse_moe.experts."
    for expert in range(16):
        w13 = [released[f"{experts}{expert}.{name}.weight_packed"] for name in ("w1", "w3")]
        assert torch.equal(weights["model.layers.12.block_sparse_moe.experts.w13.weight_packed"][expert], torch.cat(w13))
        scale = released[f"{experts}{expert}.w2.weight_scale"]
        assert torch.equal(weights["model.layers.12.block_sparse_moe.experts.w2.weight_scale"][expert], scale)


def test_a_rank_holds_its_heads_columns_and_experts(released: dict[str, Tensor]):
    topology = topology_of(golden_model(TINY), dp=2, tp=2)
    weights = load(GOLDEN / TINY, topology, rank=3)  # replica 1, tensor-parallel rank 1
    attention = "model.layers.0.self_attn."
    local = {name: released[f"{PREFIX}{attention}{name}_proj.weight"].float() for name in ("q", "k", "v", "g", "f_a", "b", "o")}
    fused = torch.cat([*(local[name][64:] for name in "qkvg"), local["f_a"], local["b"][2:]])
    assert torch.equal(weights[f"{attention}in_proj.weight"], fused)
    assert torch.equal(weights[f"{attention}o_proj.weight"], local["o"][:, 64:])
    assert torch.equal(weights[f"{attention}A_log"], released[f"{PREFIX}{attention}A_log"][2:4])
    assert torch.equal(weights["lm_head.weight"], released[f"{PREFIX}lm_head.weight"][256:].float())
    moe = "model.layers.1.block_sparse_moe."
    stack = weights[f"{moe}experts.w2.weight_packed"]
    assert stack.shape[0] == 4
    assert torch.equal(stack[1], released[f"{PREFIX}{moe}experts.13.w2.weight_packed"])
    assert torch.equal(weights[f"{moe}gate.weight"], released[f"{PREFIX}{moe}gate.weight"].float())
    up = released[f"{PREFIX}{moe}routed_expert_up_proj.weight"].float()
    assert torch.equal(weights[f"{moe}routed_expert_up_proj.weight"], up[64:])


def test_matrices_take_the_model_dtype_and_norms_and_experts_keep_theirs():
    weights = load(GOLDEN / TINY, dtype=torch.bfloat16)
    assert weights["model.layers.0.self_attn.in_proj.weight"].dtype == torch.bfloat16
    assert weights["model.layers.1.block_sparse_moe.experts.w13.weight_packed"].dtype == torch.uint8
    for name in ("norm.weight", "layers.0.self_attn.dt_bias", "layers.1.block_sparse_moe.gate.e_score_correction_bias"):
        assert weights[f"model.{name}"].dtype == torch.float32


def test_only_the_ends_of_the_pipeline_hold_embedding_and_head():
    topology = topology_of(golden_model(TINY), stages=3)
    names = [set(load(GOLDEN / TINY, topology, rank)) for rank in range(3)]
    assert ["model.embed_tokens.weight" in stage for stage in names] == [True, False, False]
    for name in ("lm_head.weight", "model.norm.weight", "model.output_attn_res_proj.weight"):
        assert [name in stage for stage in names] == [False, False, True]


def test_a_sharded_checkpoint_equals_the_single_file(released: dict[str, Tensor], tmp_path: Path):
    sharded(released, tmp_path)
    single, split = load(GOLDEN / TINY), load(tmp_path)
    assert single.keys() == split.keys()
    assert all(torch.equal(single[name], split[name]) for name in single)


def test_a_stage_opens_only_the_files_that_hold_its_layers(released: dict[str, Tensor], tmp_path: Path):
    sharded(released, tmp_path)
    topology = topology_of(golden_model(TINY), partition=(5, 4, 4))
    for layer in (*range(5), *range(9, 13)):
        (tmp_path / f"model-{layer}.safetensors").unlink()
    weights = load(tmp_path, topology, rank=1)
    assert "model.layers.5.input_layernorm.weight" in weights
    with pytest.raises(ConfigError, match=r"model-0.safetensors: no such file"):
        load(tmp_path, topology, rank=0)


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (128,)], ids=str)
def test_a_log_may_have_any_shape_that_holds_the_heads(released: dict[str, Tensor], tmp_path: Path, shape: tuple[int, ...]):
    name = f"{LAYER}0.self_attn.A_log"
    padded = torch.zeros(torch.Size(shape).numel())
    padded[:4] = released[name][:4]
    weights = load(changed(released, tmp_path, {name: padded.reshape(shape)}))
    assert torch.equal(weights["model.layers.0.self_attn.A_log"], released[name][:4])


def test_a_missing_tensor_is_named_with_its_file(released: dict[str, Tensor], tmp_path: Path):
    name = f"{LAYER}7.self_attn.kv_b_proj.weight"
    with pytest.raises(ConfigError, match=rf"{tmp_path}/{SINGLE}: tensor {name} is missing"):
        load(changed(released, tmp_path, {name: None}))


def test_a_wrong_shape_is_named_beside_the_expected_one(released: dict[str, Tensor], tmp_path: Path):
    name = f"{LAYER}3.self_attn.o_proj.weight"
    with pytest.raises(ConfigError, match=rf"{SINGLE}: tensor {name} has shape \[128, 127\], expected \[128, 128\]"):
        load(changed(released, tmp_path, {name: torch.zeros(128, 127)}))


def test_too_short_an_a_log_is_refused(released: dict[str, Tensor], tmp_path: Path):
    name = f"{LAYER}0.self_attn.A_log"
    with pytest.raises(ConfigError, match=rf"tensor {name} has shape \[3\], expected at least 4 elements"):
        load(changed(released, tmp_path, {name: torch.zeros(3)}))


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [("1.block_sparse_moe.experts.0.w1.weight_packed", torch.int32, "U8"), ("3.self_attn.g_proj.weight", torch.int8, "BF16")],
)
def test_a_wrong_dtype_is_refused(released: dict[str, Tensor], tmp_path: Path, name: str, dtype: torch.dtype, expected: str):
    name = LAYER + name
    with pytest.raises(ConfigError, match=rf"tensor {name} has dtype I\d+, expected {expected}"):
        load(changed(released, tmp_path, {name: released[name].to(dtype)}))


def test_an_index_that_names_the_wrong_file_is_refused(released: dict[str, Tensor], tmp_path: Path):
    sharded(released, tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    name = f"{LAYER}2.input_layernorm.weight"
    index["weight_map"][name] = "model-3.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"model-3.safetensors: tensor {name} is missing, although {INDEX} names it there"):
        load(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"{tmp_path}/{SINGLE}: no such file"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ConfigError, match="not a safetensors index"):
        load(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path):
    shutil.copy(GOLDEN / TINY / SINGLE, tmp_path / SINGLE)
    (tmp_path / SINGLE).chmod(0o600)
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/{SINGLE}: not a readable safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("tp", "dp", "flag", "extent"),
    [(3, 1, "--attn-tp-size", "num_attention_heads = 4"), (1, 3, "--expert-parallel-size", "16")],
)
def test_a_group_that_does_not_divide_the_model_is_refused(tp: int, dp: int, flag: str, extent: str):
    with pytest.raises(ConfigError, match=rf"{flag} 3: .*{extent} must be a multiple of it"):
        load(GOLDEN / TINY, topology_of(golden_model(TINY), tp=tp, dp=dp))
