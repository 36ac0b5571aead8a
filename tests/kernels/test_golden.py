"""The whole forward pass against the golden checkpoints (spec k3-model §16)."""

from functools import cache

import pytest
import torch
from torch import Tensor

from services.worker.model.batch import ForwardBatch, LayerCaches, Mode
from tests.lib.golden import (
    FIXED_ROUTING,
    TINY,
    Engine,
    expected,
    golden_model,
    make_batch,
    needs_golden,
    prompts,
    relative_error,
    request,
    topology_of,
)

pytestmark = needs_golden

EXACT = 1e-4  # relative error of float32 logits
BFLOAT16 = 0.13  # of bfloat16 logits where the routing is fixed
LONGEST = 3


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@cache
def engine(
    name: str = TINY,
    dtype: torch.dtype = torch.float32,
    partition: tuple[int, ...] = (),
    stages: int = 1,
    tp: int = 1,
    dp: int = 1,
) -> Engine:
    return Engine(name, topology_of(golden_model(name), stages=stages, tp=tp, dp=dp, partition=partition), dtype)


def chunks_of(length: int, sizes: list[int]) -> list[int]:
    """`sizes` over and over until `length` rows are named."""
    chunks: list[int] = []
    while length:
        chunks.append(min(sizes[len(chunks) % len(sizes)], length))
        length -= chunks[-1]
    return chunks


@pytest.mark.parametrize("name", [TINY, FIXED_ROUTING])
@pytest.mark.parametrize("prompt", range(4))
def test_one_pass_gives_the_golden_logits(name: str, prompt: int):
    tokens = prompts(name)[prompt]
    logits = engine(name).step([(request(tokens), len(tokens))], "extend")
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected(name, "logits", prompt)) < EXACT


@pytest.mark.parametrize("prompt", range(4))
def test_the_last_stage_returns_the_golden_hidden_rows(prompt: int):
    tokens = prompts(TINY)[prompt]
    ((hidden, _),) = engine().forward(make_batch([(request(tokens), len(tokens))], "extend"))
    assert relative_error(hidden, expected(TINY, "final_hidden", prompt)) < EXACT


def test_the_router_chooses_the_golden_experts():
    tokens = prompts(TINY)[LONGEST]
    calls = engine().dispatchers[0].calls
    calls.clear()
    engine().step([(request(tokens), len(tokens))], "extend")
    chosen = torch.stack([ids for ids, _ in calls]).sort(-1).values
    assert torch.equal(chosen, expected(TINY, "topk", LONGEST).sort(-1).values)


def test_all_prompts_in_one_batch_give_the_golden_logits():
    rows = [(request(tokens, slot=1 + n, first_block=1 + n), len(tokens)) for n, tokens in enumerate(prompts(TINY))]
    logits = engine().step(rows, "extend").split([count for _, count in rows])
    for prompt, part in enumerate(logits):
        assert relative_error(part, expected(TINY, "logits", prompt)) < EXACT


@pytest.mark.parametrize("sizes", [[1], [79, 1], [1, 79], [33], [1, 2, 3, 5, 8]], ids=str)
def test_chunked_prefill_equals_one_pass(sizes: list[int]):
    tokens = prompts(TINY)[LONGEST]
    sequence = request(tokens)
    parts = [engine().step([(sequence, count)], "extend") for count in chunks_of(len(tokens), sizes)]
    assert relative_error(torch.cat(parts), expected(TINY, "logits", LONGEST)) < EXACT


@pytest.mark.parametrize("prefilled", [1, 40, 79])
def test_decode_from_the_carried_state_equals_prefill(prefilled: int):
    tokens = prompts(TINY)[LONGEST]
    sequence = request(tokens)
    parts = [engine().step([(sequence, prefilled)], "extend")]
    parts += [engine().step([(sequence, 1)], "decode") for _ in tokens[prefilled:]]
    assert relative_error(torch.cat(parts), expected(TINY, "logits", LONGEST)) < EXACT


def test_a_batch_of_chunks_and_starts_equals_each_alone():
    long, short = request(prompts(TINY)[3], slot=5, first_block=5), request(prompts(TINY)[2], slot=2, first_block=2)
    first = engine().step([(long, 50)], "extend")
    both = engine().step([(short, 33), (long, 30)], "extend")
    assert relative_error(both[:33], expected(TINY, "logits", 2)) < EXACT
    assert relative_error(torch.cat([first, both[33:]]), expected(TINY, "logits", 3)) < EXACT


def test_a_request_in_slot_3_equals_the_same_request_in_slot_1():
    tokens = prompts(TINY)[LONGEST]
    alone, other = request(tokens, slot=1, first_block=1), request(tokens, slot=3, first_block=3)
    assert torch.equal(
        engine().step([(alone, len(tokens))], "extend"),
        engine().step([(other, len(tokens))], "extend"),
    )
    for kind in ("kda_rec", "kda_conv"):
        for pool in getattr(engine().caches[0], kind).values():
            assert torch.equal(pool[1], pool[3])


def test_a_slot_that_another_request_left_behind_starts_from_zero():
    first, second = request(prompts(TINY)[3]), request(prompts(TINY)[2])
    engine().step([(first, 80)], "extend")
    assert relative_error(engine().step([(second, 33)], "extend"), expected(TINY, "logits", 2)) < EXACT


def test_rows_cross_blocks_that_are_not_in_order():
    tokens = [(7 * n + n // 11) % 512 for n in range(300)]
    whole, parts = request(tokens), request(tokens, slot=2, first_block=4)
    assert whole.blocks == [3, 2, 1]
    one_pass = engine().step([(whole, 300)], "extend")
    chunked = [engine().step([(parts, count)], "extend") for count in (128, 127)]
    chunked += [engine().step([(parts, 1)], "decode") for _ in range(45)]  # 255..299, over the edge at 256
    assert relative_error(torch.cat(chunked), one_pass) < EXACT


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_padding_rows_change_no_live_row_and_no_live_cache(mode: Mode):
    def run(padding: int, token: int) -> tuple[Tensor, LayerCaches]:
        target = Engine(TINY, topology_of(golden_model(TINY)), torch.float32, num_blocks=4, num_slots=4)
        sequence = request(prompts(TINY)[LONGEST][:41], slot=2, first_block=2)
        target.step([(sequence, 40)], "extend")
        batch = make_batch([(sequence, 1)], mode, padding)
        batch.tokens[1:] = token
        ((_, logits),) = target.forward(batch)
        assert logits.isfinite().all()
        return logits[:1], target.caches[0]

    alone, plain = run(0, 0)
    padded, caches = run(3, 0)
    other, other_caches = run(3, 77)
    assert torch.equal(padded, other)  # what stands in a padding row is never seen
    assert relative_error(padded, alone) < EXACT
    for kind in ("mla", "kda_rec", "kda_conv"):
        for layer, pool in getattr(caches, kind).items():
            torch.testing.assert_close(getattr(other_caches, kind)[layer][1:], pool[1:], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(getattr(plain, kind)[layer][1:], pool[1:], rtol=1e-3, atol=1e-4, equal_nan=True)
            assert pool[0].isfinite().all()


def test_a_batch_of_padding_alone_runs_and_routes_nothing():
    dispatcher = engine().dispatchers[0]
    dispatcher.calls.clear()
    logits = engine().step([], "decode", padding=2)
    assert logits.isfinite().all()
    assert all((ids == -1).all() and (weights == 0).all() for ids, weights in dispatcher.calls)


@pytest.mark.parametrize(
    "partition",
    [(4, 9), (3, 10), (5, 8), (1, 12), (12, 1), (4, 4, 4, 1), (1,) * 13],
    ids=lambda partition: "-".join(map(str, partition)),
)
def test_a_pipeline_split_at_before_or_after_a_closing_layer_equals_one_stage(partition: tuple[int, ...]):
    tokens = prompts(TINY)[LONGEST]
    sequence = request(tokens)
    target = engine(partition=partition)
    parts = [target.step([(sequence, count)], "extend") for count in (50, 29)]
    parts.append(target.step([(sequence, 1)], "decode"))
    assert relative_error(torch.cat(parts), expected(TINY, "logits", LONGEST)) < EXACT


def test_every_hop_carries_the_golden_prefix_and_closed_blocks():
    tokens = prompts(TINY)[LONGEST]
    target = engine(partition=(1,) * 13)
    target.step([(request(tokens), len(tokens))], "extend")
    prefix, blocks = expected(TINY, "prefix", LONGEST), expected(TINY, "blocks", LONGEST)
    assert len(target.hops) == 12
    for layer, hop in enumerate(target.hops):
        assert hop.blocks.shape[0] == golden_model(TINY).closed_blocks_before(layer + 1)
        assert relative_error(hop.prefix, prefix[layer]) < EXACT
        assert relative_error(hop.blocks, blocks[: hop.blocks.shape[0]]) < EXACT


@pytest.mark.parametrize(("stages", "tp"), [(1, 2), (1, 4), (2, 2)])
def test_tensor_parallel_ranks_give_the_golden_logits_and_agree_bit_for_bit(stages: int, tp: int):
    tokens = prompts(TINY)[LONGEST]
    target, sequence = engine(stages=stages, tp=tp), request(tokens)
    first = [logits for _, logits in target.forward(make_batch([(sequence, 78)], "extend"))]
    sequence.done = 78
    second = [logits for _, logits in target.forward(make_batch([(sequence, 2)], "decode"))]
    for rank in range(tp):
        assert torch.equal(first[rank], first[0]) and torch.equal(second[rank], second[0])
    assert relative_error(torch.cat([first[0], second[0]]), expected(TINY, "logits", LONGEST)) < EXACT
    owned = [caches.mla for caches in target.caches[-tp:]]
    for layer, pool in owned[0].items():  # cached rows are replicated
        assert all(torch.equal(other[layer][1, : len(tokens)], pool[1, : len(tokens)]) for other in owned)


def test_fewer_rows_than_ranks_leaves_ranks_with_padding_slices():
    tokens = prompts(TINY)[1]
    target, sequence = engine(tp=4), request(tokens)
    parts = [target.step([(sequence, 1)], mode) for mode in ("extend", "decode") for _ in range(3)]
    assert relative_error(torch.cat(parts), expected(TINY, "logits", 1)[:6]) < EXACT


def test_two_replicas_that_share_experts_give_the_golden_logits():
    tokens = prompts(TINY)[2]
    target, sequence = engine(dp=2, tp=2), request(tokens)
    parts = [target.step([(sequence, 20)], "extend")]
    parts += [target.step([(sequence, 1)], "decode") for _ in range(13)]
    assert relative_error(torch.cat(parts), expected(TINY, "logits", 2)) < EXACT


@pytest.mark.parametrize("prompt", range(4))
def test_bfloat16_stays_close_where_the_routing_is_fixed(prompt: int):
    tokens = prompts(FIXED_ROUTING)[prompt]
    logits = engine(FIXED_ROUTING, torch.bfloat16).step([(request(tokens), len(tokens))], "extend")
    assert relative_error(logits, expected(FIXED_ROUTING, "logits", prompt)) < BFLOAT16


def test_bfloat16_after_the_first_layer_is_within_a_percent():
    tokens = prompts(FIXED_ROUTING)[LONGEST]
    target = engine(FIXED_ROUTING, torch.bfloat16, partition=(1, 12))
    target.step([(request(tokens), len(tokens))], "extend")
    assert relative_error(target.hops[0].prefix, expected(FIXED_ROUTING, "prefix", LONGEST)[0]) < 0.01


def test_bfloat16_decode_from_the_carried_state_stays_close():
    tokens = prompts(FIXED_ROUTING)[LONGEST]
    target, sequence = engine(FIXED_ROUTING, torch.bfloat16), request(tokens)
    parts = [target.step([(sequence, 50)], "extend")]
    parts += [target.step([(sequence, 1)], "decode") for _ in range(30)]
    assert relative_error(torch.cat(parts), expected(FIXED_ROUTING, "logits", LONGEST)) < BFLOAT16


def test_each_step_is_announced_in_order_when_its_layer_has_written_its_caches():
    tokens = prompts(TINY)[1]
    target = Engine(TINY, topology_of(golden_model(TINY), partition=(5, 8)), torch.float32, num_blocks=2, num_slots=2)
    caches, written = target.caches[1], []

    def on_step(step: int) -> None:
        layer = 5 + step
        if layer in caches.mla:
            ready = caches.mla[layer][1, : len(tokens)].isfinite().all()
        else:
            ready = caches.kda_rec[layer][1].isfinite().all() and caches.kda_conv[layer][1].isfinite().all()
        later = [pool[1].isnan().all() for kind in (caches.mla, caches.kda_rec) for n, pool in kind.items() if n > layer]
        written.append((step, bool(ready) and all(later)))

    batch = make_batch([(request(tokens), len(tokens))], "extend")
    hop = target.stages[0].forward(batch, None, lambda _: None)
    target.stages[1].forward(batch, hop, on_step)
    assert written == [(step, True) for step in range(8)]


def test_an_empty_batch_runs_through_every_layer():
    batch = ForwardBatch(
        mode="extend",
        tokens=torch.zeros(0, dtype=torch.long),
        positions=torch.zeros(0, dtype=torch.long),
        cu_seqlens=torch.zeros(1, dtype=torch.int32),
        context_lens=torch.zeros(0, dtype=torch.int32),
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        write_slots=torch.zeros(0, dtype=torch.long),
        slots=torch.zeros(0, dtype=torch.long),
        fresh=torch.zeros(0, dtype=torch.bool),
    )
    ((_, logits),) = engine().forward(batch)
    assert logits.shape == (0, 512)
