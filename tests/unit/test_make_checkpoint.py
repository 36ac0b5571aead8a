"""`k3mesh make-checkpoint`: the released format, equal bytes for equal arguments, refusals that name the flag."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from k3mesh.errors import BadRequest
from services.contracts.model import parse_model_config
from services.gateway.text.template import ChatTemplate
from services.launch.make_checkpoint import main
from services.launch.tokenizer_files import tokenizer_files, whole_words
from tests.lib.golden import GOLDEN, TINY, needs_golden
from tests.lib.oracle import TIE, Oracle

SMALL = ["--num-hidden-layers", "2", "--vocab-size", "512", "--hidden-size", "32", "--num-experts", "4"]


def header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length])


def tensors(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name → dtype, shape, bytes, over all files."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for path in directory.glob("*.safetensors"):
        entries = header(path)
        del entries["__metadata__"]
        raw = path.read_bytes()
        data = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            found[name] = entry["dtype"], entry["shape"], data[begin:end]
    return found


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@needs_golden
def test_names_shapes_and_dtypes_are_the_released_ones(tmp_path: Path) -> None:
    assert main([str(tmp_path / "m"), "--vocab-size", "512"]) == 0
    golden = {name: value[:2] for name, value in tensors(GOLDEN / TINY).items()}
    assert {name: value[:2] for name, value in tensors(tmp_path / "m").items()} == golden


@needs_golden
def test_config_is_the_released_one(tmp_path: Path) -> None:
    assert main([str(tmp_path / "m"), "--vocab-size", "512"]) == 0
    assert json.loads((tmp_path / "m/config.json").read_text()) == json.loads((GOLDEN / TINY / "config.json").read_text())


def test_equal_arguments_give_these_bytes_on_every_machine(tmp_path: Path) -> None:
    assert main([str(tmp_path / "m"), *SMALL]) == 0
    digests = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in tree(tmp_path / "m").items()}
    assert digests == {
        "config.json": "e3c6bbafe8ee25b4",
        "k3mesh_checkpoint.json": "6dd0910b0062d41f",
        "model.safetensors": "a314658d007ae8d8",
        "tokenizer.json": "7ddd1f2fc6440603",
        "tokenizer_config.json": "140bc34e068af253",
    }, "a change of these bytes needs a new RECORD_VERSION"


def test_another_seed_changes_every_drawn_tensor(tmp_path: Path) -> None:
    assert main([str(tmp_path / "a"), *SMALL]) == 0
    assert main([str(tmp_path / "b"), *SMALL, "--seed", "1"]) == 0
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] == b[name]] == []


def test_several_files_hold_the_same_tensors_as_one(tmp_path: Path) -> None:
    assert main([str(tmp_path / "one")]) == 0
    assert main([str(tmp_path / "many"), "--max-shard-size", "1"]) == 0
    assert tensors(tmp_path / "many") == tensors(tmp_path / "one")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        assert name in header(tmp_path / "many" / file)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors(tmp_path / "many").values())
    assert all((tmp_path / "many" / file).stat().st_size < 1_100_000 for file in files)


@pytest.mark.parametrize(
    ("arguments", "dimensions"),
    [
        (["--num-experts", "8", "--num-experts-per-token", "2"], {"num_experts": 8, "num_experts_per_token": 2}),
        (["--num-hidden-layers", "5"], {"num_hidden_layers": 5, "mla_layers": (3, 4)}),
        (["--num-hidden-layers", "3", "--full-attn-layers", "1,3"], {"mla_layers": (0, 2)}),
        (["--kda-num-heads", "8", "--kda-head-dim", "16"], {"kda_num_heads": 8, "kda_head_dim": 16}),
        (["--first-k-dense-replace", "0"], {"first_k_dense_replace": 0}),
    ],
)
def test_a_flag_changes_its_dimension(tmp_path: Path, arguments: list[str], dimensions: dict[str, Any]) -> None:
    assert main([str(tmp_path / "m"), *SMALL, *arguments]) == 0
    model = parse_model_config(json.loads((tmp_path / "m/config.json").read_text()), "config.json")
    assert {field: getattr(model, field) for field in dimensions} == dimensions


def test_the_k3_preset_has_the_released_geometry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its size follows from every dimension: 1.56 TB, which no test machine has free."""
    assert main([str(tmp_path / "m"), "--preset", "k3"]) == 2
    assert "takes 1560.0 GB" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-experts", "2"], "--num-experts-per-token 4: must not exceed --num-experts 2"),
        (["--vocab-size", "300"], "--vocab-size 300: must be at least 512"),
        (["--moe-intermediate-size", "48"], "--moe-intermediate-size 48: must be a multiple of the MXFP4 group, 32"),
        (["--routed-expert-hidden-size", "100"], "--routed-expert-hidden-size 100: must be a multiple"),
        (["--hidden-size", "0"], "--hidden-size 0: must be at least 1"),
        (["--first-k-dense-replace", "14"], "--first-k-dense-replace 14: must not exceed --num-hidden-layers 13"),
        (["--full-attn-layers", "4,14"], "--full-attn-layers 4,14: must be different layer numbers from 1 to 13"),
        (["--full-attn-layers", "4,4"], "--full-attn-layers 4,4: must be different"),
        (["--full-attn-layers", ""], "--full-attn-layers : must be different"),
        (["--seed", "-1"], "--seed -1: must not be negative"),
        (["--max-shard-size", "0"], "--max-shard-size 0: must be at least 1"),
        (["--hidden-size", "big"], "--hidden-size: invalid int value: 'big'"),
        (["--preset", "huge"], "--preset: invalid choice: 'huge'"),
        (["--unheard-of"], "unrecognized arguments: --unheard-of"),
    ],
)
def test_impossible_values_are_refused_with_flag_value_and_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(tmp_path / "m"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_with_equal_arguments_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "m"
    assert main([str(directory), *SMALL]) == 0
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}
    assert main([str(directory), *SMALL]) == 0
    assert "already there" in capsys.readouterr().out
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()} == before


def test_other_arguments_need_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "m"
    assert main([str(directory), *SMALL]) == 0
    before = tree(directory)
    assert main([str(directory), *SMALL, "--seed", "1"]) == 2
    assert "add --force" in capsys.readouterr().err
    assert tree(directory) == before
    assert main([str(directory), *SMALL, "--seed", "1", "--force"]) == 0
    assert main([str(tmp_path / "fresh"), *SMALL, "--seed", "1"]) == 0
    assert tree(directory) == tree(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "m"]


def test_a_checkpoint_cut_short_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "m"
    assert main([str(directory), *SMALL]) == 0
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main([str(directory), *SMALL]) == 2
    assert "model.safetensors is missing or cut short" in capsys.readouterr().err
    assert main([str(directory), *SMALL, "--force"]) == 0
    assert main([str(directory), *SMALL]) == 0


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_files_of_someone_else_are_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str], force: list[str]) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/thesis.tex").write_text("years of work")
    assert main([str(tmp_path / "m"), *SMALL, *force]) == 2
    assert "did not write" in capsys.readouterr().err
    assert tree(tmp_path) == {"m/thesis.tex": b"years of work"}


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert main([str(tmp_path / "m"), *SMALL]) == 0
    assert (tmp_path / "m/model.safetensors").exists()


def test_without_tokenizer_there_are_weights_and_config_only(tmp_path: Path) -> None:
    assert main([str(tmp_path / "m"), *SMALL, "--no-tokenizer"]) == 0
    assert sorted(tree(tmp_path / "m")) == ["config.json", "k3mesh_checkpoint.json", "model.safetensors"]


def test_greedy_answers_of_the_tiny_model_are_varied_words_with_clear_margins(tmp_path: Path) -> None:
    assert main([str(tmp_path / "m")]) == 0
    oracle = Oracle(tmp_path / "m")
    tokens = list(range(60, 100))
    for _ in range(40):
        tokens.append(int(oracle.logits(tokens)[-1].argmax()))
    answer = tokens[40:]
    rows = oracle.logits(tokens)
    ordered = np.sort(rows, axis=1)
    margins = ordered[:, -1] - ordered[:, -2]
    assert np.isfinite(rows).all()
    assert len(set(answer)) > 20
    assert np.median(margins) > 100 * TIE
    assert set(answer) <= whole_words(1024) | {1024 - 256 + 2}


TOKENIZER = tokenizers.Tokenizer.from_str(tokenizer_files(1024)["tokenizer.json"].decode())


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token_and_words_are_short() -> None:
    assert [TOKENIZER.encode(chr(byte)).ids for byte in range(128)] == [[byte] for byte in range(128)]
    assert len(TOKENIZER.encode("The old harbour wakes before the sun.").ids) <= 14


def test_special_tokens_stand_where_config_says(tmp_path: Path) -> None:
    assert main([str(tmp_path / "m"), *SMALL]) == 0
    config = json.loads((tmp_path / "m/config.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in ("[BOS]", "<|end_of_msg|>", "[PAD]", "<|media_pad|>")}
    keys = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")
    assert list(ids.values()) == [config[key] for key in keys]
    for text, id in ids.items():
        assert tokenizer.encode(f"a{text}b", add_special_tokens=False).ids == [97, id, 98]
        assert tokenizer.decode([97, id, 98]) == "ab"


def test_the_chat_template_opens_the_assistants_answer(tmp_path: Path) -> None:
    assert main([str(tmp_path / "m"), *SMALL]) == 0
    template = ChatTemplate.load(tmp_path / "m")
    assert template is not None
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two?"}]},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "And?"},
    ]
    assert template.render(messages) == (
        '<|open|>message role="system"<|sep|> Be brief.\n<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>One two?<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>Three.<|close|>response<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="user"<|sep|>And?<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "judge", "content": "Order!"}, "not judge"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "text only, not image_url"),
    ],
)
def test_the_chat_template_refuses_what_it_cannot_say(tmp_path: Path, message: dict[str, Any], reason: str) -> None:
    assert main([str(tmp_path / "m"), *SMALL]) == 0
    template = ChatTemplate.load(tmp_path / "m")
    assert template is not None
    with pytest.raises(BadRequest, match=reason):
        template.render([message])
