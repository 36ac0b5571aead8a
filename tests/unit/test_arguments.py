"""The engine's flags: the deployment guide's blocks word for word, derived values, and each rule's refusal."""

import json
import re
import shlex
from pathlib import Path

import pytest

from k3mesh.errors import ConfigError
from services.contracts import argument_rules as rules
from services.contracts.arguments import (
    AgentArguments,
    EngineArguments,
    GatewayArguments,
    SchedulerArguments,
    WorkerArguments,
)
from services.contracts.flags import FlagSet
from tests.lib.k3 import K3_DSPARK, k3_model

GUIDE = Path(__file__).parents[2].parent / "shared" / "spec" / "requirement.txt"
COMMON = """
--model <K3_MODEL_PATH>
--speculative-draft-model-path <K3_DSPARK_MODEL_PATH>
--speculative-algorithm DSPARK
--speculative-num-draft-tokens 8
--dtype bfloat16
--kv-cache-dtype bfloat16
--attention-backend flashmla
--drafter-attention-backend flashmla
--kda-backend flashkda
--moe-backend marlin
--all2all-backend deepep
--world-size 32
--nnodes 4
--nprocs-per-node 8
--attn-tp-size 8
--dense-tp-size 8
--moe-tp-size 1
--disable-kvstore
"""
PREFILL = """
--disaggregation-mode prefill
--pipeline-parallel-size 4
--data-parallel-size 1
--expert-parallel-size 8
--deepep-mode normal
--mm-encoder-tp-mode data
--max-num-seqs 32
--chunked-prefill-size 8192
"""
DECODE = """
--disaggregation-mode decode
--pipeline-parallel-size 1
--data-parallel-size 4
--expert-parallel-size 32
--deepep-mode auto
--max-num-seqs 128
--max-cudagraph-capture-size 32
"""
P, D = ["--model", "m", "--disaggregation-mode", "prefill"], ["--model", "m", "--disaggregation-mode", "decode"]


def parse(*words: str) -> EngineArguments:
    return EngineArguments.parse([word for text in words for word in text.split()])


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch):
    for field in EngineArguments.model_fields:
        monkeypatch.delenv(f"K3MESH_{field.upper()}", raising=False)


def test_the_guides_argument_sets_parse_word_for_word():
    p, d = parse(COMMON, PREFILL), parse(COMMON, DECODE)
    assert (p.disaggregation_mode, p.pipeline_parallel_size, p.max_num_seqs, p.chunked_prefill_size) == ("prefill", 4, 32, 8192)
    assert (d.disaggregation_mode, d.data_parallel_size, d.replica_seqs, d.verify_width) == ("decode", 4, 32, 8)
    assert p.disable_kvstore and p.enforce_eager and not d.enforce_eager and p.mm_encoder_tp_mode == "data"
    assert d.buckets() == (1, 2, 4, 8, 16, 24, 31, 32)
    rules.check_pair(p, d)


@pytest.mark.skipif(not GUIDE.exists(), reason=f"the deployment guide is not at {GUIDE}")
def test_the_blocks_here_are_the_guides():
    blocks = re.findall(r"(?:^--\S+(?: \S+)?\n)+", GUIDE.read_text(), re.MULTILINE)
    assert [block.split() for block in blocks[:3]] == [text.split() for text in (COMMON, PREFILL, DECODE)]


def test_the_guides_engines_have_its_shape_on_k3():
    p, d = parse(COMMON, PREFILL).topology(k3_model()), parse(COMMON, DECODE).topology(k3_model())
    assert (p.stages, p.dp_size, p.tp_size, p.ep_size, p.partition) == (4, 1, 8, 8, (24, 23, 23, 23))
    assert (d.stages, d.dp_size, d.tp_size, d.ep_size, d.world_size) == (1, 4, 8, 32, 32)
    candidate = parse(COMMON, PREFILL, "--pp-layer-partition 24,24,24,21").topology(k3_model())
    assert candidate.partition == (24, 24, 24, 21)


def test_sizes_that_are_not_given_follow_from_those_that_are():
    a = parse("--model dir/k3 --disaggregation-mode decode --tp 2 --data-parallel-size 2")
    assert (a.world_size, a.nprocs_per_node, a.expert_parallel_size, a.moe_tp_size, a.dense_tp_size) == (4, 4, 4, 1, 2)
    assert (a.engine_id, a.served_model_name, a.tokenizer) == ("decode-0", "k3", "dir/k3")
    assert parse("--model m --disaggregation-mode decode --world-size 8 --attn-tp-size 2").data_parallel_size == 4
    assert parse("--model m --disaggregation-mode prefill --chunked-prefill-size 300").chunked_prefill_size == 256
    assert (a.compute_dtype, a.cache_dtype, a.verify_width) == ("bfloat16", "bfloat16", 1)
    assert parse(*P, "--dtype float32").cache_dtype == "float32"


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "engine.toml"
    file.write_text('model = "from-file"\nmax-num-seqs = 4\nchunked_prefill_size = 128\ndisable-kvstore = true\n')
    monkeypatch.setenv("K3MESH_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("K3MESH_CHUNKED_PREFILL_SIZE", "256")
    monkeypatch.setenv("K3MESH_PARENT", "1")  # of the supervisor, no flag
    a = parse("--config", str(file), "--disaggregation-mode prefill --chunked-prefill-size 384")
    assert (a.model, a.max_num_seqs, a.chunked_prefill_size, a.disable_kvstore) == ("from-file", 5, 384, True)


@pytest.mark.parametrize(
    "words", [COMMON + PREFILL, COMMON + DECODE, "--model m --disaggregation-mode prefill --no-enforce-eager"]
)
def test_arguments_as_flags_parse_to_themselves(words: str):
    a = parse(words)
    assert EngineArguments.parse(a.argv()) == a


def test_processes_take_the_engines_flags_and_their_own():
    engine = parse(COMMON, DECODE).argv()
    own = ["--rank", "31", "--listen", "127.0.0.1:1", "--agent-socket", "/s"]
    assert WorkerArguments.parse([*engine, *own, "--run-dir", "/r"]).rank == AgentArguments.parse([*engine, *own]).rank == 31
    addresses = ",".join(f"127.0.0.1:{port}" for port in range(1, 33))
    leaders = ",".join(addresses.split(",")[::8])
    scheduler = SchedulerArguments.parse([*engine, "--listen", "h:1", "--workers", leaders, "--agents", addresses])
    assert len(scheduler.workers) == 4 and len(scheduler.agents) == 32
    with pytest.raises(ConfigError, match=r"--rank 32: must be below --world-size 32"):
        AgentArguments.parse([*engine, "--rank", "32", *own[2:]])
    with pytest.raises(ConfigError, match=r"--workers \S+: has 32 addresses where the topology has 4"):
        SchedulerArguments.parse([*engine, "--listen", "h:1", "--workers", addresses, "--agents", addresses])
    with pytest.raises(ConfigError, match=r"--decode-address h:2: goes with --disaggregation-mode prefill and only with it"):
        SchedulerArguments.parse(
            [*engine, "--listen", "h:1", "--workers", leaders, "--agents", addresses, "--decode-address", "h:2"]
        )


REFUSALS = [
    # form
    ("--modle x", r"--modle: unknown flag; did you mean --model\?"),
    ("--disaggregation-mode prefill", r"--model: is required; "),
    ("--model m", r"--disaggregation-mode: is required; "),
    ("--model", r"--model: expected one argument; "),
    ("--model m --disaggregation-mode both", r"--disaggregation-mode both: no such choice; give one of prefill, decode"),
    ("P --max-num-seqs many", r"--max-num-seqs many: must be a whole number; "),
    ("P --max-num-seqs 0", r"--max-num-seqs 0: must be at least 1; "),
    ("P --world-size 0", r"--world-size 0: must be at least 1; "),
    ("P --startup-timeout 0", r"--startup-timeout 0: must be above 0"),
    ("P --dist-init-addr nowhere", r"--dist-init-addr nowhere: must be HOST:PORT; "),
    ("P --pp-layer-partition 1,x", r"--pp-layer-partition 1,x: must be a whole number; "),
    # topology
    ("P --world-size 6 --nnodes 2 --nprocs-per-node 4", r"--world-size 6: must be --nnodes 2 x --nprocs-per-node 4 = 8; "),
    ("P --world-size 6 --pipeline-parallel-size 4", r"--world-size 6: must be divisible by --pipeline-parallel-size 4; "),
    ("D --world-size 8 --tp 2 --data-parallel-size 2", r"--world-size 8: one stage has 8 ranks, but .* is 4; "),
    ("P --node-rank 1", r"--node-rank 1: must be below --nnodes 1; "),
    ("D --tp 4 --nnodes 2 --world-size 4", r"--attn-tp-size 4: must divide --nprocs-per-node 2; "),
    # parallel sizes
    ("D --tp 2 --moe-tp-size 2 --expert-parallel-size 2", r"--moe-tp-size 2: .*cannot both be above 1; "),
    ("D --tp 4 --expert-parallel-size 2", r"--expert-parallel-size 2: .*4 ranks.*; give --expert-parallel-size 4 "),
    ("D --tp 2 --expert-parallel-size 1", r"--expert-parallel-size 1: .*2 ranks.*; give --expert-parallel-size 2 "),
    ("D --tp 2 --dense-tp-size 1", r"--dense-tp-size 1: must equal --attn-tp-size 2; "),
    ("P --pp-layer-partition 7,6", r"--pp-layer-partition 7,6: needs --pipeline-parallel-size above 1; "),
    ("P --pipeline-parallel-size 3 --pp-layer-partition 7,6", r"--pp-layer-partition 7,6: has 2 entries for "),
    ("P --pipeline-parallel-size 2 --pp-layer-partition 13,0", r"--pp-layer-partition 13,0: each stage needs a layer; "),
    # scheduling
    ("D --data-parallel-size 4 --max-num-seqs 2", r"--max-num-seqs 2: is shared by --data-parallel-size 4 replicas"),
    ("D --data-parallel-size 4 --max-num-seqs 6", r"--max-num-seqs 6: is shared by --data-parallel-size 4 replicas"),
    ("D --max-cudagraph-capture-size 0", r"--max-cudagraph-capture-size 0: must be at least 1; "),
    ("D --cudagraph-capture-sizes 0,8", r"--cudagraph-capture-sizes 0,8: a batch has at least one request; "),
    (
        "D --data-parallel-size 4 --max-num-seqs 128 --cudagraph-capture-sizes 1,16",
        r"--cudagraph-capture-sizes 1,16: .* up to 32 .*; add 32, or ",
    ),
    ("P --chunked-prefill-size 127", r"--chunked-prefill-size 127: must be at least 128; "),
    ("P --disaggregation-layerwise-interval -1", r"--disaggregation-layerwise-interval -1: must be at least 0; "),
    # backends
    ("P --attention-backend tokenspeed_mla", r"--attention-backend tokenspeed_mla: uses Blackwell instructions; "),
    ("P --drafter-attention-backend tokenspeed_mla", r"--drafter-attention-backend tokenspeed_mla: uses Blackwell"),
    ("P --attention-backend flashmla --kv-cache-dtype float32", r"--attention-backend flashmla: has bfloat16 .* only; "),
    ("P --moe-backend marlin --dtype float32", r"--moe-backend marlin: takes bfloat16 activations only; "),
    (
        "P --all2all-backend deepep --moe-backend reference",
        r"--all2all-backend deepep: needs experts whose rows the device counts, not --moe-backend reference; ",
    ),
    ("P --deepep-mode low_latency", r"--deepep-mode low_latency: a prefill engine runs extend-shaped work; "),
    ("D --deepep-mode normal", r"--deepep-mode normal: decode rounds of fixed shape use low latency; "),
    ("D --low-latency-max-num-tokens-per-gpu 0", r"--low-latency-max-num-tokens-per-gpu 0: must be at least 1; "),
    ("P --load-format instanttensor", r"--load-format instanttensor: no such choice; give one of auto, safetensors"),
    # cache
    ("D --retraction-snapshot-ratio -0.5", r"--retraction-snapshot-ratio -0.5: must be at least 0"),
    ("D --num-blocks 1", r"--num-blocks 1: must be at least 2; "),
    # speculation
    ("P --speculative-algorithm EAGLE3", r"--speculative-algorithm EAGLE3: no such choice; give one of DSPARK, MTP"),
    ("P --speculative-algorithm DSPARK --speculative-num-draft-tokens 8", r"--speculative-algorithm DSPARK: .*-model-path"),
    ("P --speculative-algorithm MTP", r"--speculative-algorithm MTP: a NextN layer .* names no width; give"),
    ("P --speculative-num-draft-tokens 8", r"--speculative-num-draft-tokens 8: needs a drafter; "),
    ("P --speculative-algorithm MTP --speculative-num-draft-tokens 1", r"--speculative-num-draft-tokens 1: must be at least 2"),
    # role
    ("P --data-parallel-size 2", r"--data-parallel-size 2: a prefill engine is one replica; "),
    ("D --pipeline-parallel-size 2", r"--pipeline-parallel-size 2: needs --disaggregation-mode prefill; "),
    ("D --mm-encoder-tp-mode data", r"--mm-encoder-tp-mode data: a decode engine runs no encoder; "),
]


@pytest.mark.parametrize(("words", "refusal"), REFUSALS)
def test_an_impossible_combination_is_refused_by_flag_value_and_rule(words: str, refusal: str):
    role = {"P": P, "D": D}
    argv = [flag for word in shlex.split(words) for flag in role.get(word, [word])]
    with pytest.raises(ConfigError, match=f"^{refusal}") as error:
        EngineArguments.parse(argv)
    assert "\n" not in error.value.message


def test_a_wrong_value_of_the_environment_or_the_file_is_told_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "engine.toml"
    file.write_text("max-num-seqs = 0\n")
    with pytest.raises(ConfigError, match=rf"^{file}: max-num-seqs = 0: must be at least 1"):
        EngineArguments.parse([*P, "--config", str(file)])
    file.write_text("max-sequences = 4\n")
    with pytest.raises(ConfigError, match=rf"^--config {file}: unknown flag max-sequences"):
        EngineArguments.parse([*P, "--config", str(file)])
    with pytest.raises(ConfigError, match=r"^--config /nowhere: cannot be read as TOML"):
        EngineArguments.parse([*P, "--config", "/nowhere"])
    monkeypatch.setenv("K3MESH_MAX_NUM_SEQS", "few")
    with pytest.raises(ConfigError, match=r"^K3MESH_MAX_NUM_SEQS=few: must be a whole number"):
        EngineArguments.parse(P)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--attn-tp-size 5", r"--attn-tp-size 5: must divide the model's 96 attention heads"),
        ("--tp 32 --expert-parallel-size 32 --max-model-len 2000000", r"--max-model-len 2000000: the model's positions end at"),
        ("--data-parallel-size 5", r"--expert-parallel-size 5: must divide the model's 896 experts"),
    ],
)
def test_a_model_that_cannot_be_cut_that_way_is_refused(words: str, refusal: str):
    with pytest.raises(ConfigError, match=f"^{refusal}"):
        parse(*D, words).topology(k3_model())


def test_a_partition_must_sum_to_the_models_layers():
    a = parse(*P, "--pipeline-parallel-size 4 --pp-layer-partition 24,24,24,24")
    with pytest.raises(ConfigError, match=r"^--pp-layer-partition 24,24,24,24: sums to 96, the model has 93 target layers"):
        a.topology(k3_model())


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("--attention-backend flashmla", r"--attention-backend flashmla: needs an NVIDIA GPU, .*; on a CPU host use reference"),
        ("--kda-backend flashkda", r"--kda-backend flashkda: needs an NVIDIA GPU"),
        ("--moe-backend marlin", r"--moe-backend marlin: needs an NVIDIA GPU"),
        ("--moe-backend wgmma", r"--moe-backend wgmma: needs an NVIDIA GPU"),
        ("--all2all-backend deepep --moe-backend marlin", r"--moe-backend marlin: needs an NVIDIA GPU"),
    ],
)
def test_what_this_version_or_machine_cannot_do_is_refused_before_a_start(words: str, refusal: str):
    with pytest.raises(ConfigError, match=f"^{refusal}"):
        rules.check_runnable(parse(*D, words), cuda=False)


def test_the_device_is_what_is_asked_for_or_a_gpu_where_one_is():
    for words, without, having in (("", False, True), ("--device cpu", False, False), ("--device cuda", True, True)):
        a = parse(*D, words)
        assert (rules.runs_on_gpu(a, cuda=False), rules.runs_on_gpu(a, cuda=True)) == (without, having)
    with pytest.raises(ConfigError, match=r"--device cuda: this machine has no NVIDIA GPU; give cpu or auto"):
        rules.check_runnable(parse(*D, "--device cuda"), cuda=False)
    with pytest.raises(ConfigError, match=r"--moe-backend marlin: needs an NVIDIA GPU, and --device is cpu; use reference"):
        rules.check_runnable(parse(*D, "--device cpu --moe-backend marlin"), cuda=True)


def test_the_image_pool_is_a_share_of_the_cache_and_without_one_every_place_has_an_image(drafter: str):
    def pool(words: str, role: str = DECODE) -> int:
        a = parse(COMMON, role, drafter, "--num-blocks 1001 --num-slots 33 --max-num-seqs 128", words)
        return a.image_blocks(a.geometry(k3_model()), 1001, 33)

    block, slot = 29 * 147_456, 56_171_520
    cache = 1001 * block + 33 * slot
    assert pool("--retraction-snapshot-ratio 0") == 0
    assert pool("--retraction-snapshot-ratio 1") == cache // block
    assert pool("--retraction-snapshot-ratio 0.125") == cache // 8 // block
    assert pool("") == min(32 * (32 * block + slot), cache) // block
    with pytest.raises(ConfigError, match=r"^--retraction-snapshot-ratio 0.0001: that share .* less than one block of 4276224"):
        pool("--retraction-snapshot-ratio 0.0001")
    assert pool("--retraction-snapshot-ratio 1", PREFILL) == 0


@pytest.mark.parametrize("other", ["--dtype float32", "--kv-cache-dtype float32", "--attn-tp-size 2", "--max-model-len 4096"])
def test_engines_that_could_not_hand_over_are_refused(other: str):
    flag, value = other.split()
    with pytest.raises(ConfigError, match=rf"^{flag} \S+: must be the same on both engines, decode has {value}"):
        rules.check_pair(parse(*P), parse(*D, other))


@pytest.fixture
def drafter(tmp_path: Path) -> str:
    """The guide's flag, with the published drafter's configuration in its directory."""
    (tmp_path / "config.json").write_text(K3_DSPARK.read_text())
    return f"--speculative-draft-model-path {tmp_path}"


@pytest.mark.parametrize(("config", "width"), [({}, 8), ({"block_size": 5}, 6), ({"dspark_block_size": 3}, 4)])
def test_a_width_that_is_not_given_is_what_the_drafter_was_trained_for(tmp_path: Path, config: dict[str, int], width: int):
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = f"--speculative-algorithm DSPARK --speculative-draft-model-path {tmp_path}"
    assert parse(*D, words).verify_width == width
    assert parse(*D, words, "--speculative-num-draft-tokens 7").verify_width == 7
    (tmp_path / "config.json").write_text('{"block_size": 0}')
    with pytest.raises(ConfigError, match=r"config.json: block_size = 0: must be at least 1"):
        _ = parse(*D, words).verify_width


def test_the_cache_is_derived_bounded_and_refused_when_one_request_does_not_fit(drafter: str):
    model = k3_model()
    guide = parse(COMMON, DECODE, drafter)
    with pytest.raises(ConfigError, match=r"^--max-model-len 8192: one such request needs 65 blocks of .*; lower it or "):
        guide.cache_size(guide.geometry(model))
    given = parse(COMMON, DECODE, drafter, "--num-blocks 1000 --num-slots 40")
    assert given.cache_size(given.geometry(model)) == (1000, 40)
    small = parse(COMMON, DECODE, drafter, "--max-num-seqs 4 --max-model-len 1000")
    assert small.cache_size(small.geometry(model)) == (8 + 1, 2)
    edge = parse(COMMON, DECODE, drafter, "--max-num-seqs 4 --max-model-len 1010")  # the last block of proposals needs a block
    assert edge.cache_size(edge.geometry(model)) == (9 + 1, 2)


def test_prefill_has_slots_for_checkpoints_as_far_as_they_are_small(drafter: str):
    """A slot of the guide's stages takes 14.7 MB."""
    words = (COMMON, PREFILL, drafter, "--max-num-seqs 4 --max-model-len 1000")
    small, plain = parse(*words), parse(*words, "--no-enable-prefix-caching")
    many = parse(*words, "--max-num-seqs 64 --num-blocks 100")
    counts = [it.cache_size(it.geometry(k3_model()))[1] for it in (small, plain, many)]
    assert counts == [4 + 4 + 1, 4 + 1, 64 + (1 << 28) // small.geometry(k3_model()).slot_bytes + 1]


def test_the_drafters_rows_are_in_the_cache_of_the_stage_that_drafts(drafter: str):
    prefill = parse(COMMON, PREFILL, drafter)
    geometry = prefill.geometry(k3_model())
    drafted = [[f.field_id for f in geometry.fields_of_stage(stage) if f.arena == "draft"] for stage in range(4)]
    assert drafted == [[], [], [], [f"d.{n}.mla" for n in range(93, 98)]]
    assert len(geometry.producer_steps(3)) == 23 + 1


@pytest.mark.parametrize(
    ("words", "detail", "refusal"),
    [
        ("--speculative-num-draft-tokens 9", "DRAFT_WIDTH", "give --speculative-num-draft-tokens 8"),
        ("--speculative-algorithm MTP", "DRAFT_CONFIG", "num_nextn_predict_layers = 0"),
        ("--max-model-len 2000000", "", "--max-model-len 2000000: the drafter's positions end at 1048576"),
        ("--speculative-draft-model-path /nowhere", "", "--speculative-draft-model-path /nowhere: config.json cannot be read"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(drafter: str, words: str, detail: str, refusal: str):
    with pytest.raises(ConfigError) as refused:
        parse(COMMON, PREFILL, drafter, words).load_draft_config(k3_model())
    assert refusal in refused.value.message
    assert refused.value.detail == detail


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [("8,1,32", (1, 8, 32)), ("1,64", (1, 32)), ("4,40,160", (4, 32)), ("1,16 --enforce-eager", (1, 16))],
)
def test_a_list_of_capture_sizes_replaces_the_ladder_up_to_a_replicas_batch(sizes: str, buckets: tuple[int, ...]):
    words = "--model m --disaggregation-mode decode --data-parallel-size 4 --max-num-seqs 128"
    assert parse(words, f"--cudagraph-capture-sizes {sizes}").buckets() == buckets


def test_a_capacity_below_a_full_round_is_noted():
    assert not rules.notes(parse(COMMON, DECODE))
    assert "give at least 32" in rules.notes(parse(COMMON, DECODE, "--low-latency-max-num-tokens-per-gpu 31"))[0]
    assert "diagnostic" in rules.notes(parse(*D, "--enforce-eager"))[0]
    assert "never retracts" in rules.notes(parse(*P, "--retraction-snapshot-ratio 1"))[0]


def test_every_flag_has_a_help_text():
    sets: list[type[FlagSet]] = [EngineArguments, WorkerArguments, AgentArguments, SchedulerArguments, GatewayArguments]
    assert not [(cls, name) for cls in sets for name, field in cls.model_fields.items() if not field.description]
