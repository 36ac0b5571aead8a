"""The capacity model at the size of K3, against the figures of the specifications, and its refusals."""

import json
from dataclasses import replace

import pytest

from k3mesh.cli.main import run
from k3mesh.errors import ConfigError
from services.contracts.arguments import EngineArguments
from services.contracts.buffers import (
    GIB,
    MIB,
    Part,
    compact_rows,
    low_latency_bytes,
    low_latency_hidden,
    normal_bytes,
    replay_row_bytes,
)
from services.contracts.capacity import GPUS, EngineCapacity, Measured, capacity_of, check_host, weight_bytes
from services.contracts.mesh import MeshArguments
from services.contracts.topology import Topology
from tests.lib.k3 import K3_FOLDER, k3_model

MODEL = k3_model()
USABLE = 131 * GIB  # of an H200, as the cache specification's example has it (§12)


def engines(prefill: str = "", decode: str = "") -> tuple[EngineArguments, EngineArguments]:
    words = ["--topology", "k3", "--model", str(K3_FOLDER), f"--prefill={prefill}", f"--decode={decode}"]
    return MeshArguments.parse(words).engines()


def decode(flags: str = "", memory: int = USABLE) -> EngineCapacity:
    return capacity_of(engines(decode=flags)[1], memory)


def part(it: EngineCapacity, name: str, stage: int = 0) -> int:
    return sum(part.bytes for part in it.ranks[stage].parts if part.name == name)


def test_weights_of_each_rank_are_those_of_the_model_specification():
    """k3-model §12, table: GiB per rank with the up-projection replicated; ours is cut over the TP group."""
    p, d = engines()
    up_beyond_shard = 2 * 7168 * 3584 * 7 // 8  # of one MoE layer
    for arguments, moe_layers, wanted in ((p, 23, (48.1, 47.6, 47.5, 47.8)), (d, 92, (64.7,))):
        topology = arguments.topology(MODEL)
        for stage, gib in enumerate(wanted):
            place = topology.place_of(topology.rank_of(stage, 0, 0))
            replicated = weight_bytes(arguments, MODEL, topology, place) + moe_layers * up_beyond_shard
            assert replicated / GIB == pytest.approx(gib, abs=0.07)


def test_one_rank_with_everything_holds_the_published_checkpoint():
    """k3-model §12: 1,559,965,606,912 bytes on disk. Ours are the same with float32 norms and 96 entries of A_log."""
    whole = replace(engines()[0].topology(MODEL), stages=1, tp_size=1, ep_size=1, partition=(93,))
    found = weight_bytes(engines()[0], MODEL, whole, whole.place_of(0))
    assert found == pytest.approx(1_559_965_606_912, rel=1e-5)


def test_the_drafters_weights_are_those_of_the_speculation_specification():
    """speculation §2: about 1.1 to 1.5 GiB on the last P stage, 1.2 on D, 0.1 to 0.2 where there are taps, else nothing."""
    p = capacity_of(engines()[0], USABLE)
    gib = [part(p, "drafter's weights", stage) / GIB for stage in range(4)]
    assert gib == [pytest.approx(0.19, abs=0.01), 0, pytest.approx(0.1, abs=0.01), pytest.approx(1.15, abs=0.01)]
    assert part(decode(), "drafter's weights") / GIB == pytest.approx(1.2, abs=0.05)


@pytest.mark.parametrize(("capacity", "native", "padded"), [(32, 0.778, 0.889), (64, 1.555, 1.777), (256, 6.221, 7.109)])
def test_low_latency_buffers_are_those_of_the_expert_specification(capacity: int, native: float, padded: float):
    assert low_latency_bytes(capacity, 3584, 896) / GIB == pytest.approx(native, abs=6e-4)
    assert low_latency_bytes(capacity, 4096, 896) / GIB == pytest.approx(padded, abs=6e-4)
    if capacity == 256:
        assert low_latency_bytes(capacity, 3584, 896) == 6_679_436_416


def test_the_released_kernels_need_k3s_latent_padded_in_two_passes():
    assert low_latency_hidden(MODEL) == (4096, 2)
    assert low_latency_hidden(replace(MODEL, routed_expert_hidden_size=7168, num_experts_per_token=8)) == (7168, 1)


def test_normal_mode_buffers_are_those_of_the_expert_specification():
    assert normal_bytes(3584, 8) == (188_909_184, 0)
    assert normal_bytes(3584, 32) == (212_524_544, 94_623_360)


@pytest.mark.parametrize(("bucket", "rows"), [(1, 944), (8, 4_528), (16, 8_624), (32, 16_816)])
def test_compacted_rows_are_those_of_the_expert_specification(bucket: int, rows: int):
    assert compact_rows(32 * bucket, 16, 28, 32 * 256) == rows
    if bucket == 32:
        assert part(decode(), "experts' work space") == pytest.approx(525.5 * MIB, rel=1e-3)


def test_replay_rows_are_those_of_the_speculation_specification():
    assert replay_row_bytes(MODEL, 8, 2) == 15_640
    assert part(decode(), "KDA rows to replay") == pytest.approx(69 * 256 * 15_640 + 32 * 1.9e6, rel=0.01)


def test_decode_holds_the_tokens_of_the_capacity_formula():
    """cache-and-handoff §12: tokens = (M - slots x 56,171,520) / 33,408 with M the bytes left for caches; about 1.63 M a
    replica for C = 32 and 1.4 M for C = 256, by an estimate of 10 GiB for what is neither weights nor expert buffers."""
    for flags, about in (("--low-latency-max-num-tokens-per-gpu 32 --num-slots 81", 1.63e6), ("--num-slots 81", 1.4e6)):
        it = decode(flags)
        left = USABLE - it.ranks[0].fixed
        assert it.replica_tokens == ((left - it.slots * 56_171_520) // (33_408 * 128) - 1) * 128
        assert it.replica_tokens == pytest.approx(about, rel=0.15)
    assert decode("--num-slots 81").replica_tokens < decode("--num-slots 33").replica_tokens


def test_blocks_of_prefill_are_those_of_the_tightest_stage():
    it = capacity_of(engines()[0], USABLE)
    fits = [rank.blocks_in(USABLE, it.slots) for rank in it.ranks]
    assert it.blocks == min(fits) == fits[3]
    assert all(it.total(rank) <= USABLE for rank in it.ranks)
    assert it.total(it.ranks[3]) > USABLE - it.ranks[3].block_bytes


def test_lowering_the_expert_capacity_frees_what_the_expert_specification_says():
    """moe-ep §7: 5.44 GiB, and 1.34 GiB of each received tensor, with rows of 3584; ours have 4096, and two tensors live."""
    wide, narrow = (decode(f"--low-latency-max-num-tokens-per-gpu {rows}").ranks[0].fixed for rows in (256, 32))
    freed = wide - narrow
    assert freed / GIB == pytest.approx((5.44 + 2 * 1.34) * 4096 / 3584, abs=0.5)  # NVSHMEM's heap grows by 512 MiB


def test_the_image_pool_follows_its_ratio():
    cache = decode().ranks[0].cache(decode().blocks, decode().slots)
    assert decode("--retraction-snapshot-ratio 0").image_bytes == 0
    block = decode().ranks[0].block_bytes
    assert 0 <= cache // 4 - decode("--retraction-snapshot-ratio 0.25").image_bytes < block
    assert 0.9 * cache < decode().image_bytes <= cache
    assert capacity_of(engines()[0], USABLE).image_bytes == 0


@pytest.mark.parametrize(
    ("flags", "memory", "refusal"),
    [
        ("--num-blocks 20000", USABLE, r"--num-blocks 20000: a rank has room for \d+ blocks .* give at most \d+"),
        ("", 70 * GIB, r"decode-0: a rank needs 79\.8 GiB before any cache \(weights 60\.8 GiB.* the GPU has 70\.0 GiB"),
        ("--max-num-seqs 4096 --max-cudagraph-capture-size 1", USABLE, r"--max-num-seqs 4096: .*slots fit"),
        ("--max-num-seqs 4", 80 * GIB, r"--max-model-len 131072: one such request needs 1025 blocks, beside .* lower it to at"),
        (
            "--num-blocks 500",
            USABLE,
            r"--max-model-len 131072: .*, --num-blocks 500 has 499 beside the null block; lower it to",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_value_rule_and_remedy(flags: str, memory: int, refusal: str):
    with pytest.raises(ConfigError, match=refusal):
        decode(flags, memory)


def test_what_a_refusal_names_as_fitting_does_fit():
    with pytest.raises(ConfigError) as refused:
        decode("--num-blocks 20000")
    most = int(refused.value.message.rpartition("at most ")[2].split(",")[0])
    assert decode(f"--num-blocks {most}").blocks == most
    with pytest.raises(ConfigError, match="give at most"):
        decode(f"--num-blocks {most + 1}")


def test_a_host_is_refused_what_its_ranks_together_do_not_fit_into():
    demo = str(K3_FOLDER.parent / "demo")
    found = [capacity_of(engine, None) for engine in MeshArguments.parse(["--model", demo]).engines()]
    need = sum(it.node_bytes(0) for it in found)
    check_host(found, 0, need)
    with pytest.raises(ConfigError, match=r"--max-num-seqs 16: the ranks of this node need .* prefill-0 .* decode-0 "):
        check_host(found, 0, need - 1)


def test_ranks_of_a_node_are_those_that_run_there():
    topology = Topology("prefill", 4, 1, 8, 8, 93, (24, 23, 23, 23))
    it = capacity_of(engines()[0], USABLE)
    assert it.topology == topology
    assert it.node_bytes(3) == 8 * it.total(it.ranks[3])


def test_plan_prints_each_part_and_the_same_bytes_as_json(capsys: pytest.CaptureFixture[str]):
    assert run(["plan"]) == 0
    text = capsys.readouterr().out
    assert "stage 3" in text and "expert buffers, low latency" in text and "a replica holds" in text
    assert run(["plan", "--json", "--gpu", "h100"]) == 2  # decode's weights and buffers alone need more
    capsys.readouterr()
    assert run(["plan", "--json", "--memory-gib", "200"]) == 0
    prefill, decode = json.loads(capsys.readouterr().out)
    assert [rank["stage"] for rank in prefill["ranks"]] == [0, 1, 2, 3]
    for engine in (prefill, decode):
        assert all(rank["total"] == sum(rank["parts"].values()) + rank["cache"] <= engine["memory"] for rank in engine["ranks"])
    assert GPUS["h200"] > USABLE


def test_what_a_rank_has_measured_takes_the_place_of_what_is_computed():
    _, a = engines()
    memory = 100 * GIB
    measured = Measured(decode().ranks[0].place, (Part("weights", 60 * GIB), Part("a largest batch", 3 * GIB)))
    found = capacity_of(a, memory, measured)
    (rank,) = found.ranks
    assert rank.fixed == 63 * GIB
    assert 0 <= memory - found.total(rank) < rank.block_bytes
    with pytest.raises(ConfigError, match=r"beside weights 60\.0 GiB, a largest batch 3\.0 GiB"):
        capacity_of(a, 66 * GIB, measured)
