"""`k3mesh make-checkpoint --draft`: the published layouts, equal bytes for equal arguments, the target's own embedding."""

import json
from math import prod
from pathlib import Path

import pytest

from services.contracts.draft import parse_draft_config
from services.launch import draft_tensors
from services.launch.checkpoint_tensors import embedding
from services.launch.make_checkpoint import main
from tests.lib.k3 import K3_DSPARK, k3_model
from tests.unit.test_make_checkpoint import SMALL, tensors, tree

DSPARK = ["--draft", "dspark", "--num-hidden-layers", "4", *SMALL[2:]]
EMBEDDING = "language_model.model.embed_tokens.weight"


def test_a_dspark_drafter_has_the_published_tensors_and_the_targets_embedding(tmp_path: Path):
    assert main([str(tmp_path / "target"), "--num-hidden-layers", "4", *SMALL[2:]]) == 0
    assert main([str(tmp_path / "plain"), *DSPARK, "--target-layer-ids", "0,2,3"]) == 0
    assert main([str(tmp_path / "normed"), *DSPARK, "--target-layer-ids", "0,2,3", "--fc-norm"]) == 0
    plain, normed = tensors(tmp_path / "plain"), tensors(tmp_path / "normed")
    per_layer = 12
    assert len(plain) == 8 + 2 * per_layer and len(normed) == len(plain) + 3  # of the published 5 layers: 68, with 5 norms 73
    assert normed.keys() - plain.keys() == {f"fc_norm.{tap}.weight" for tap in range(3)}
    assert plain["context_proj.weight"][1] == [32, 3 * 32]
    assert plain["markov_head.markov_w1.weight"][1] == plain["markov_head.markov_w2.weight"][1] == [512, 16]
    assert {dtype for dtype, _, _ in plain.values()} == {"BF16"}
    assert plain["embed_tokens.weight"] == tensors(tmp_path / "target")[EMBEDDING]
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [
        "config.json", "k3mesh_checkpoint.json", "model.safetensors"
    ]  # fmt: skip


def test_the_full_preset_is_the_published_configuration():
    published = json.loads(K3_DSPARK.read_text())
    made = draft_tensors.dspark_config(k3_model(), "k3", draft_tensors.default_taps(93), "prefix", False, None)
    assert {key: made[key] for key in published} == published


@pytest.mark.parametrize(("fc_norm", "count", "parameters"), [(False, 68, 3_562_312_961), (True, 73, 3_562_348_801)])
def test_the_full_preset_has_the_published_number_of_tensors_and_parameters(fc_norm: bool, count: int, parameters: int):
    target = k3_model()
    config = draft_tensors.dspark_config(target, "k3", draft_tensors.default_taps(93), "prefix", fc_norm, None)
    specs = list(draft_tensors.dspark_specs(parse_draft_config(config, "config.json", target), embedding(target)))
    assert (len(specs), sum(prod(spec.shape) for spec in specs)) == (count, parameters)


def test_a_nextn_layer_stands_in_the_targets_checkpoint(tmp_path: Path):
    assert main([str(tmp_path / "plain"), *SMALL]) == 0
    assert main([str(tmp_path / "nextn"), *SMALL, "--draft", "nextn"]) == 0
    plain, nextn = tensors(tmp_path / "plain"), tensors(tmp_path / "nextn")
    layer = "language_model.model.layers.2."
    assert plain.items() <= nextn.items()
    assert all(name.startswith(layer) for name in nextn.keys() - plain.keys())
    assert nextn[f"{layer}eh_proj.weight"][1] == [32, 64]
    assert nextn[f"{layer}embed_tokens.weight"] == plain[EMBEDDING]
    assert nextn[f"{layer}shared_head.head.weight"] == plain["language_model.lm_head.weight"]
    config = json.loads((tmp_path / "nextn/config.json").read_text())
    assert config["text_config"]["num_nextn_predict_layers"] == 1
    assert (tmp_path / "nextn/tokenizer.json").is_file()


@pytest.mark.parametrize("flags", [DSPARK, [*SMALL, "--draft", "nextn"]], ids=["dspark", "nextn"])
def test_equal_arguments_give_equal_bytes_and_another_seed_others(tmp_path: Path, flags: list[str]):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main([str(tmp_path / name), *flags, "--seed", seed]) == 0
    first, second, other = (tree(tmp_path / name) for name in "abc")
    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--target-layer-ids", "0,9"], "target_layer_ids = [0, 9]"),
        (["--target-layer-ids", "2,1"], "must be ascending"),
        (["--target-layer-ids", "one"], "--target-layer-ids one: must be layer numbers"),
        (["--block-size", "0"], "block_size = 0"),
    ],
)
def test_a_drafter_that_could_not_be_served_is_not_written(tmp_path: Path, capsys, flags: list[str], words: str):
    assert main([str(tmp_path / "d"), *DSPARK, *flags]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_another_drafter_does_not_replace_one_that_is_there(tmp_path: Path, capsys):
    assert main([str(tmp_path / "d"), *DSPARK]) == 0
    assert main([str(tmp_path / "d"), *DSPARK]) == 0
    assert main([str(tmp_path / "d"), *DSPARK, "--fc-norm"]) == 2
    assert "made with other arguments" in capsys.readouterr().err
