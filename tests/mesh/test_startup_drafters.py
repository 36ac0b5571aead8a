"""A drafter that does not fit is refused by `k3mesh check` and `k3mesh up` in one line, which names the file and the key or
tensor."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from k3mesh.cli.main import run
from services.launch.child import ROOT
from services.launch.ports import free_ports
from services.launch.state import StateDir
from tests.lib.drafted import Checkpoints
from tests.lib.mesh import short_folder

FILE = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
NEXTN_EMBEDDING = "language_model.model.layers.6.embed_tokens.weight"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("drafters"))


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def changed(
    checkpoint: Path, folder: Path, config: dict[str, Any] | None = None, tensors: Callable[[Tensors], object] | None = None
) -> Path:
    """A copy with other keys in config.json (None: without the key), or other tensors."""
    copy = folder / "changed"
    copy.mkdir()
    read = json.loads((checkpoint / "config.json").read_text()) | (config or {})
    (copy / "config.json").write_text(json.dumps({key: value for key, value in read.items() if value is not None}))
    if tensors is None:
        (copy / FILE).symlink_to(checkpoint / FILE)
    else:
        loaded = load_file(checkpoint / FILE)
        tensors(loaded)
        save_file(loaded, copy / FILE)
    return copy


def words(target: Path, prefill: str, decode: str | None = None, topology: str = "laptop") -> list[str]:
    decode = prefill if decode is None else decode
    return ["--topology", topology, "--model", str(target), f"--prefill={prefill}", f"--decode={decode}"]


def dspark(drafter: Path, width: int | None = 8) -> str:
    flags = f"--speculative-algorithm DSPARK --speculative-draft-model-path {drafter}"
    return flags if width is None else f"{flags} --speculative-num-draft-tokens {width}"


MTP = "--speculative-algorithm MTP --speculative-num-draft-tokens 4"


# ---- what config.json says, known before any process starts
@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_target_layers": 4}, "target_layer_ids = [1, 3, 5]: names 3 taps, num_target_layers is 4"),
        ({"target_layer_ids": [1, 3, 9]}, "target_layer_ids = [1, 3, 9]: must be ascending, different and from 0 to 5"),
        ({"aux_hidden_stream": "residual"}, "aux_hidden_stream = 'residual': must be 'prefix' or 'attn_res'"),
        ({"target_hidden_size": 128}, "target_hidden_size = 128: the target has 64"),
        ({"target_num_hidden_layers": 7}, "target_num_hidden_layers = 7: the target has 6"),
        ({"vocab_size": 1024}, "vocab_size = 1024: the target has 512"),
        ({"draft_vocab_size": 256}, "draft_vocab_size = 256: the target has 512"),
        ({"mask_token_id": None}, "mask_token_id = None: must be a whole number"),
        ({"mask_token_id": 512}, "mask_token_id = 512: must be from 0 to 511"),
        ({"markov_rank": 0}, "markov_rank = 0: must be at least 1"),
        ({"markov_head_type": "gated"}, "markov_head_type = 'gated': is not supported"),
        ({"mla_use_nope": True}, "mla_use_nope = True: is not supported"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate = True: is not supported"),
        ({"q_lora_rank": 0}, "q_lora_rank = 0: must be at least 1"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = '…': a quantized drafter cannot be served"),
        ({"block_size": 5}, "block_size = 5 proposals were trained, 7 are asked for; give --speculative-num-draft-tokens 6"),
    ],
)
def test_a_wrong_key_is_refused_by_file_key_and_value(
    checkpoints: Checkpoints, folder: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], told: str
):
    drafter = changed(checkpoints.dspark(), folder, config)
    assert run(["check", *words(checkpoints.target, dspark(drafter))]) == 2
    assert capsys.readouterr().err.startswith(f"error: {drafter}/config.json: {told}")


def test_flags_that_cannot_be_are_refused(checkpoints: Checkpoints, folder: Path, capsys: pytest.CaptureFixture[str]):
    target, drafter = checkpoints.target, checkpoints.dspark()
    plain = changed(target, folder, {"text_config": {**text_config(target), "num_nextn_predict_layers": 0}})
    for line, told in (
        (words(target, dspark(drafter, 9)), f"{drafter}/config.json: 7 proposals were trained, 8 are asked for; give --spec"),
        (
            words(target, dspark(drafter, 8), dspark(drafter, 4)),
            "--speculative-algorithm DSPARK: algorithm and verify width must",
        ),
        (words(target, dspark(drafter, 4), MTP), "--speculative-algorithm DSPARK: algorithm and verify width must be the same"),
        (words(plain, MTP), f"{plain}/config.json: num_nextn_predict_layers = 0: --speculative-algorithm MTP needs exactly 1"),
        (
            words(target, "--speculative-algorithm MTP"),
            "--speculative-algorithm MTP: a NextN layer drafts any number of tokens",
        ),
        (
            words(target, "--speculative-algorithm DSPARK"),
            "--speculative-algorithm DSPARK: K3 has its DSpark drafter in a chec",
        ),
    ):
        assert run(["check", *line]) == 2
        assert capsys.readouterr().err.startswith(f"error: {told}")


@pytest.mark.parametrize(("config", "width"), [({}, 8), ({"block_size": 7}, 8), ({"dspark_block_size": 5}, 6)])
def test_a_width_that_is_not_given_is_the_drafters_own(
    checkpoints: Checkpoints, folder: Path, capsys: pytest.CaptureFixture[str], config: dict[str, Any], width: int
):
    drafter = changed(checkpoints.dspark(), folder, config)
    assert run(["check", *words(checkpoints.target, dspark(drafter, None))]) == 0
    assert f"verify width {width}," in capsys.readouterr().out


# ---- what tensors say, known when a worker reads them
def up(folder: Path, *line: str) -> str:
    """What `k3mesh up` says, which fails; afterwards nothing runs."""
    where = ["--state-dir", str(folder / "state"), "--port", str(free_ports(1)[0])]
    command = [sys.executable, "-m", "k3mesh.cli.main", "up", *line, *where]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode != 0 and result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert StateDir(folder / "state").processes() == {} and StateDir(folder / "state").holder() is None
    return result.stderr


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def with_another_row(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name][300].neg_()


def narrowed(tensors: Tensors) -> None:
    tensors["context_proj.weight"] = tensors["context_proj.weight"][:, :128].clone()


def surplus(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors[EMBEDDING].clone()


SOAK = pytest.mark.soak
DSPARK_FAULTS = [
    pytest.param(without(EMBEDDING), f"tensor {EMBEDDING} is missing; the last pipeline stage needs", id="no embedding"),
    pytest.param(
        with_another_row(EMBEDDING), f"tensor {EMBEDDING} is another embedding than language_model.model.{EMBEDDING} of",
        id="another embedding", marks=SOAK,
    ),
    pytest.param(narrowed, "tensor context_proj.weight has shape [64, 128], expected [64, 192]", id="shape", marks=SOAK),
    pytest.param(surplus, "tensor lm_head.weight belongs to no K3 DSpark drafter", id="surplus", marks=SOAK),
    pytest.param(without("final_norm.weight"), "tensor final_norm.weight is missing", id="missing", marks=SOAK),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "told"), DSPARK_FAULTS)
def test_up_names_the_tensor_of_a_dspark_drafter(
    checkpoints: Checkpoints, folder: Path, fault: Callable[[Tensors], object], told: str
):
    drafter = changed(checkpoints.dspark(), folder, tensors=fault)
    said = up(folder, *words(checkpoints.target, dspark(drafter)))
    assert f"{drafter}/{FILE}: {told}" in said and ".worker-" in said


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (without(NEXTN_EMBEDDING), f"tensor {NEXTN_EMBEDDING} is missing; the last pipeline stage needs"),
        (with_another_row(NEXTN_EMBEDDING), f"tensor {NEXTN_EMBEDDING} is another embedding than language_model.model."),
        (without("language_model.model.layers.6.hnorm.weight"), "tensor language_model.model.layers.6.hnorm.weight is missing"),
    ],
    ids=["no embedding", "another embedding", "missing"],
)
def test_up_names_the_tensor_of_a_nextn_layer(
    checkpoints: Checkpoints, folder: Path, fault: Callable[[Tensors], object], told: str
):
    target = changed(checkpoints.target, folder, tensors=fault)
    assert f"{target}/{FILE}: {told}" in up(folder, *words(target, MTP))


@pytest.mark.soak
def test_up_names_the_dimension_that_does_not_divide(checkpoints: Checkpoints, folder: Path):
    drafter = changed(checkpoints.dspark(), folder, {"num_attention_heads": 7})
    said = up(folder, *words(checkpoints.target, dspark(drafter), topology="laptop-tp2"))
    assert "--attn-tp-size 2: the drafter's num_attention_heads = 7 must be a multiple of it" in said


@pytest.mark.soak
def test_up_refuses_engines_with_different_drafters(checkpoints: Checkpoints, folder: Path):
    other = changed(checkpoints.dspark(), folder, tensors=lambda tensors: tensors["final_norm.weight"].neg_())
    said = up(folder, *words(checkpoints.target, dspark(checkpoints.dspark()), dspark(other)))
    assert "draft_fingerprint" in said


def text_config(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text())["text_config"]
