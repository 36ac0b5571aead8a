"""What a drafter's config.json may say, and where its taps are."""

import json
from dataclasses import replace
from typing import Any

import pytest

from k3mesh.errors import ConfigError
from services.contracts.draft import DraftConfig, parse_draft_config, parse_nextn_config, taps_in
from services.contracts.model import ModelConfig, parse_model_config
from services.contracts.topology import Topology
from services.launch.make_checkpoint import K3, Plan, released_config
from tests.lib.k3 import K3_DSPARK

PUBLISHED: dict[str, Any] = json.loads(K3_DSPARK.read_text())
PARTITIONS = [(24, 23, 23, 23), (24, 24, 24, 21)]


def k3() -> ModelConfig:
    layers = [n for n in range(1, 94) if n % 4 == 0 or n == 93]
    return parse_model_config(released_config(Plan(dict(K3), layers, 0, False, 1)), "k3")


def parse(**changes: Any) -> DraftConfig:
    config = {key: value for key, value in (PUBLISHED | changes).items() if value is not None}
    return parse_draft_config(config, "drafter/config.json", k3())


def test_the_published_configuration_is_read():
    draft = parse()
    assert (draft.hidden_size, draft.num_hidden_layers, draft.num_attention_heads, draft.mla_row) == (7168, 5, 64, 576)
    assert (draft.aux_hidden_stream, draft.fc_norm, draft.block_size, draft.block_causal) == ("prefix", False, None, False)
    assert draft.rope.magnitude == pytest.approx(1.34657, abs=1e-5)
    assert draft.softmax_scale == pytest.approx(0.130861, abs=1e-6)


@pytest.mark.parametrize(
    ("ids", "stream", "owners"),
    [
        ([2, 23, 47, 71, 89], "prefix", [(0, 0, 2, 3, 3), (0, 0, 1, 2, 3)]),
        ([2, 23, 47, 71, 89], "attn_res", [(0, 1, 2, 3, 3), (0, 1, 2, 3, 3)]),
        ([7, 31, 47, 63, 87], "attn_res", [(0, 1, 2, 2, 3), (0, 1, 2, 2, 3)]),
        ([7, 31, 47, 63, 92], "attn_res", [(0, 1, 2, 2, 3), (0, 1, 2, 2, 3)]),
    ],
)
def test_a_tap_belongs_to_the_stage_that_can_make_it(ids: list[int], stream: str, owners: list[tuple[int, ...]]):
    taps = parse(target_layer_ids=ids, aux_hidden_stream=stream).taps(93)
    for partition, wanted in zip(PARTITIONS, owners, strict=True):
        windows = Topology("prefill", 4, 1, 8, 8, 93, partition).windows
        found = {tap.index: stage for stage, window in enumerate(windows) for tap in taps_in(taps, window)}
        assert tuple(found[index] for index in range(5)) == wanted


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"target_layer_ids": [2, 23, 47, 71]}, "TAP_CONFIG", "names 4 taps, num_target_layers is 5"),
        ({"target_layer_ids": [], "num_target_layers": 0}, "TAP_CONFIG", "target_layer_ids"),
        ({"target_layer_ids": [2, 23, 71, 47, 89]}, "TAP_CONFIG", "ascending"),
        ({"target_layer_ids": [2, 2, 47, 71, 89]}, "TAP_CONFIG", "different"),
        ({"target_layer_ids": [-1, 23, 47, 71, 89]}, "TAP_CONFIG", "from 0 to 92"),
        ({"target_layer_ids": [2, 23, 47, 71, 93]}, "TAP_CONFIG", "from 0 to 92"),
        ({"aux_hidden_stream": "residual"}, "TAP_STREAM", "'prefix' or 'attn_res'"),
        ({"target_hidden_size": 4096}, "DRAFT_TARGET_MISMATCH", "target_hidden_size = 4096: the target has 7168"),
        ({"hidden_size": 4096}, "DRAFT_TARGET_MISMATCH", "hidden_size"),
        ({"target_num_hidden_layers": 61}, "DRAFT_TARGET_MISMATCH", "the target has 93"),
        ({"vocab_size": 1000}, "DRAFT_TARGET_MISMATCH", "vocab_size"),
        ({"draft_vocab_size": 32000}, "DRAFT_TARGET_MISMATCH", "draft_vocab_size"),
        ({"mask_token_id": None}, "DRAFT_CONFIG", "mask_token_id"),
        ({"mask_token_id": 163840}, "DRAFT_CONFIG", "from 0 to 163839"),
        ({"markov_rank": 0}, "DRAFT_CONFIG", "markov_rank = 0"),
        ({"markov_head_type": "gated"}, "DRAFT_CONFIG", "vanilla"),
        ({"mla_use_nope": True}, "DRAFT_CONFIG", "mla_use_nope"),
        ({"mla_use_output_gate": True}, "DRAFT_CONFIG", "mla_use_output_gate"),
        ({"q_lora_rank": 0}, "DRAFT_CONFIG", "q_lora_rank = 0"),
        ({"hidden_act": "situ"}, "DRAFT_CONFIG", "hidden_act"),
        ({"model_type": "qwen3"}, "DRAFT_CONFIG", "k3_dspark"),
        ({"rope_parameters": {"rope_type": "default"}}, "DRAFT_CONFIG", "yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "DRAFT_UNSUPPORTED", "quantized"),
    ],
)
def test_a_wrong_configuration_is_refused_by_key_value_and_code(changes: dict[str, Any], code: str, words: str):
    with pytest.raises(ConfigError) as refused:
        parse(**changes)
    assert refused.value.detail == code
    assert words in refused.value.message
    assert refused.value.message.startswith("drafter/config.json: ")


@pytest.mark.parametrize(("block", "width"), [(None, 2), (None, 8), (7, 8), (5, 6)])
def test_a_width_that_was_trained_is_accepted(block: int | None, width: int):
    replace(parse(), block_size=block).check_width(width, "drafter")


@pytest.mark.parametrize(("block", "width", "supported"), [(None, 9, 8), (7, 4, 8), (5, 8, 6)])
def test_an_unsupported_width_is_refused_and_the_right_one_named(block: int | None, width: int, supported: int):
    with pytest.raises(ConfigError, match=f"give --speculative-num-draft-tokens {supported}") as refused:
        replace(parse(), block_size=block).check_width(width, "drafter")
    assert refused.value.detail == "DRAFT_WIDTH"


def test_a_target_without_a_nextn_layer_is_refused():
    layers = [n for n in range(1, 94) if n % 4 == 0 or n == 93]
    config = released_config(Plan(dict(K3), layers, 0, False, 1))
    with pytest.raises(ConfigError, match="num_nextn_predict_layers = 0") as refused:
        parse_nextn_config(config, "config.json", k3())
    assert refused.value.detail == "DRAFT_CONFIG"
    config["text_config"]["num_nextn_predict_layers"] = 1
    assert parse_nextn_config(config, "config.json", k3()).layer == 93
