"""What a prefill worker is told of a chunk."""

from dataclasses import replace

from services.contracts.ids import BlockId, RequestId, Room, SlotId
from services.scheduler.prefill.events import ChunkRow, PrefillStep, Sampling
from services.scheduler.prefill.wire import step_command


def test_a_chunk_carries_its_tokens_and_the_one_behind_it():
    prompt = [11, 12, 13, 70_000, 15]
    row = ChunkRow(RequestId("r"), Room(5), 0, 3, False, (BlockId(4),), SlotId(2), Sampling(), 0, 3)
    last = replace(row, start=3, end=5, last=True)
    packed = b"".join(token.to_bytes(4, "little") for token in prompt)
    first, second = step_command(PrefillStep(1, (row, last)), lambda request_id: packed, fence=1).prefill.rows
    assert (first.tokens, first.next_token) == (packed[:12], 70_000)
    assert (second.tokens, second.next_token) == (packed[12:], 0)
    assert (first.proposals, second.proposals) == (0, 3)
    assert second.HasField("sampling") and not first.HasField("sampling")
