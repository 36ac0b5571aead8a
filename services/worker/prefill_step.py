"""One batch of prompt chunks through this rank's stage: rows in, caches written, barriers posted, first tokens out.

Block tables live here, on the device thread; steps carry changes only. Barriers follow spec cache-and-handoff §7 and §8:
producer steps are the stage's own layers in order, then the drafter where there is one. It comes after sampling, because
it drafts behind the token that was sampled (spec speculation §10).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from k3mesh.errors import Internal
from services.contracts.barriers import ChunkStarted, FieldsReady, ForgetLocal, Handoff, HandoffReady, LocalRow, Notice
from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS, NULL_BLOCK, NULL_SLOT, TOKEN_BYTES
from services.worker.cache.slots import SlotStates
from services.worker.device import CPU, synchronize, upload
from services.worker.hop import StageBoundary
from services.worker.model.batch import ForwardBatch, Hop
from services.worker.model.decoder import DecoderStage
from services.worker.speculative.capture import Capture
from services.worker.speculative.drafter import Drafter, Steps
from services.worker.speculative.sampling import sample
from services.worker.wire import (
    ChunkRow,
    Command,
    FirstToken,
    ForgetRooms,
    PrefillStep,
    StepDone,
)

PADDING = 0  # in a window, behind the proposals that were asked for


@dataclass(slots=True)
class RoomState:
    """A request's place in this rank's caches."""

    slot: int
    cached_tokens: int  # what this engine's prefix cache held: the first chunk starts after it
    end: int  # rows that chunks have written so far, those cached included
    blocks: list[int] = field(default_factory=list[int])


class PrefillStage:
    """One rank of a prefill engine. `producer_steps` counts the stage's steps (geometry.producer_steps), `post` tells the
    agent, `interval` is how many producer steps share a barrier, 0 for one barrier at the end. `drafter` is this rank's part
    of one, None without; the windows that leave with a prompt have `verify_width` tokens. `states` copies KDA states from slot
    to slot of this stage. `post` is called when the notice is true on the device's order of work (device.in_device_order)."""

    def __init__(
        self,
        stage: DecoderStage,
        boundary: StageBoundary,
        post: Callable[[Notice], None],
        *,
        index: int,
        states: SlotStates,
        producer_steps: int,
        interval: int,
        verify_width: int = 1,
        drafter: Drafter | None = None,
        device: torch.device = CPU,
    ):
        self._device = device
        self._stage, self._boundary, self._post, self._drafter = stage, boundary, post, drafter
        self._states = states
        self._index, self._producer_steps, self._interval = index, producer_steps, interval
        self._verify_width = verify_width
        self._rooms: dict[int, RoomState] = {}
        self._blocks, self._steps, self._tokens = 0, 0, 0

    def counters(self) -> dict[str, int]:
        return {"rooms": len(self._rooms), "blocks_in_tables": self._blocks}

    def totals(self) -> dict[str, int]:
        return {"steps": self._steps, "tokens": self._tokens}

    def execute(self, command: Command) -> StepDone | None:
        match command:
            case PrefillStep():
                return self._run(command)
            case ForgetRooms():
                self._forget(command.rooms)
                return None
            case _:
                raise Internal(f"a prefill worker cannot do {type(command).__name__}; its scheduler drives the wrong engine")

    def _run(self, step: PrefillStep) -> StepDone:
        for row in step.rows:
            self._extend(row)
        batch = self._batch(step.rows)
        self._post(ChunkStarted(step.step_id, tuple(_local_row(row) for row in step.rows)))
        hop = self._boundary.receive(len(batch.tokens))
        started = time.time()
        for row in step.rows:
            if row.load_slot != NULL_SLOT:  # in row order: a later row's own slot may be the one that this row starts from
                self._states.copy(row.load_slot, row.slot)
        barriers = _Barriers(step.step_id, self._producer_steps, self._interval, self._post)
        capture = self._drafter.begin(len(batch.tokens), hop) if self._drafter is not None else None
        out = self._stage.forward(batch, hop, barriers.passed, capture.take if capture is not None else None)
        first_tokens = () if isinstance(out, Hop) else self._first_tokens(step.rows, batch, out, capture, barriers)
        for row in step.rows:
            if row.save_slot != NULL_SLOT:
                self._states.copy(row.slot, row.save_slot)
        synchronize(self._device)
        ended = time.time()
        if isinstance(out, Hop):
            self._boundary.send(capture.onto(out) if capture is not None else out)
        self._steps += 1
        self._tokens += len(batch.tokens)
        return StepDone(step.step_id, self._index, started, ended, first_tokens)

    def _extend(self, row: ChunkRow) -> None:
        """Apply a row's changes to its room. Internal if the chunk does not continue the prompt or lacks a block."""
        room = self._rooms.get(row.room)
        if room is None:
            if (row.start == 0) != (row.load_slot == NULL_SLOT):
                raise Internal(
                    f"request {row.request_id}: its first chunk begins at {row.start} with the state of slot {row.load_slot}; "
                    "it begins at 0 without one, or behind what the prefix cache has with it"
                )
            room = self._rooms[row.room] = RoomState(row.slot, cached_tokens=row.start, end=row.start)
        if row.start != room.end or row.end <= row.start or row.slot != room.slot or row.slot == NULL_SLOT:
            raise Internal(
                f"request {row.request_id}: chunk [{row.start}, {row.end}) in slot {row.slot} does not continue its prompt, "
                f"which stands at {room.end} in slot {room.slot}"
            )
        if len(row.tokens) != TOKEN_BYTES * (row.end - row.start):
            raise Internal(f"request {row.request_id}: chunk [{row.start}, {row.end}) has {len(row.tokens)} bytes of tokens")
        room.blocks += row.new_blocks
        self._blocks += len(row.new_blocks)
        if blocks_for(row.end) > len(room.blocks) or NULL_BLOCK in row.new_blocks:
            raise Internal(
                f"request {row.request_id}: chunk [{row.start}, {row.end}) needs {blocks_for(row.end)} blocks, none of them "
                f"the null block; its table has {len(room.blocks)}, just appended {list(row.new_blocks)}"
            )
        room.end = row.end

    def _batch(self, rows: tuple[ChunkRow, ...]) -> ForwardBatch:
        lengths = [row.end - row.start for row in rows]
        tables = torch.zeros((len(rows), max(len(self._rooms[row.room].blocks) for row in rows)), dtype=torch.int32)
        for table, row in zip(tables, rows, strict=True):
            blocks = self._rooms[row.room].blocks  # on the last chunk with room for a drafter's rows behind the prompt
            table[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        positions = torch.cat([torch.arange(row.start, row.end) for row in rows])
        sequence = torch.repeat_interleave(torch.tensor(lengths))
        blocks = tables[sequence, positions // BLOCK_TOKENS].long()

        def there(values: Tensor) -> Tensor:
            return upload(values, self._device)

        return ForwardBatch(
            mode="extend",
            tokens=there(_tokens(rows)),
            positions=there(positions),
            cu_seqlens=there(torch.tensor([0, *lengths]).cumsum(0).int()),
            context_lens=there(torch.tensor([row.end for row in rows], dtype=torch.int32)),
            block_tables=there(tables),
            write_slots=there(blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS),
            slots=there(torch.tensor([row.slot for row in rows])),
            fresh=there(torch.tensor([row.start == 0 for row in rows])),
        )

    def _first_tokens(
        self,
        rows: tuple[ChunkRow, ...],
        batch: ForwardBatch,
        hidden: Tensor,
        capture: Capture | None,
        barriers: "_Barriers",
    ) -> tuple[FirstToken, ...]:
        """Last stage: sample where a prompt ends, draft behind it, and hand it over. Every tensor-parallel rank computes the
        same. Chunks that end no prompt go to the drafter too: it keeps a cache of its own."""
        ends = [index for index, row in enumerate(rows) if row.last]
        bounds = list(accumulate(row.end - row.start for row in rows))
        heads = upload(torch.tensor([bounds[index] - 1 for index in ends], dtype=torch.long), self._device)
        tokens = self._sample(rows, hidden, ends, heads)
        windows = [(token,) for token in tokens]
        if self._drafter is not None:
            assert capture is not None
            most = max((rows[index].proposals for index in ends), default=0)
            following = self._following(rows, batch, bounds, tokens)
            proposals = self._drafter.draft(batch, hidden, capture, following, heads, Steps(most, most)).tolist()
            padding = [PADDING] * (self._verify_width - 1 - most)
            windows = [(token, *drafted, *padding) for token, drafted in zip(tokens, proposals, strict=True)]
            barriers.passed(self._producer_steps - 1)
        done: list[FirstToken] = []
        for index, token, window in zip(ends, tokens, windows, strict=True):
            room = rows[index].room
            self._post(HandoffReady(room, Handoff(token, window, self._rooms[room].cached_tokens)))
            done.append(FirstToken(room, token, window))
        return tuple(done)

    def _sample(self, rows: tuple[ChunkRow, ...], hidden: Tensor, ends: list[int], heads: Tensor) -> list[int]:
        if not ends:
            return []
        rules = [rows[index].sampling for index in ends]
        if None in rules:
            raise Internal("the last chunk of a prompt came without sampling parameters")
        logits = self._stage.logits(hidden[heads])
        return sample(logits, [rule for rule in rules if rule is not None], [rows[index].end for index in ends])

    def _following(self, rows: tuple[ChunkRow, ...], batch: ForwardBatch, bounds: list[int], sampled: list[int]) -> Tensor:
        """[T] the token after each row: the prompt's, and at its end the one that was sampled."""
        ends = iter(sampled)
        last = torch.tensor([next(ends) if row.last else row.next_token for row in rows])
        following = batch.tokens.roll(-1)
        following[upload(torch.tensor(bounds) - 1, self._device)] = upload(last, self._device)
        return following

    def _forget(self, rooms: tuple[int, ...]) -> None:
        for room in rooms:
            state = self._rooms.pop(room, None)
            self._blocks -= len(state.blocks) if state else 0
        self._post(ForgetLocal(rooms))


class _Barriers:
    """Tells the agent which producer steps of one engine step have written their fields."""

    def __init__(self, step_id: int, steps: int, interval: int, post: Callable[[Notice], None]):
        self._step_id, self._steps, self._interval, self._post = step_id, steps, interval or steps, post
        self._posted = 0

    def passed(self, step: int) -> None:
        """Producer step `step` is complete, in the device's order."""
        done = step + 1
        if done - self._posted == self._interval or done == self._steps:
            self._post(FieldsReady(self._step_id, self._posted, done))
            self._posted = done


def _tokens(rows: tuple[ChunkRow, ...]) -> Tensor:
    """[T] int64 of the rows' ids, little-endian uint32 each."""
    ids = torch.frombuffer(bytearray(b"".join(row.tokens for row in rows)), dtype=torch.uint32)
    return ids.long()


def _local_row(row: ChunkRow) -> LocalRow:
    return LocalRow(row.room, row.start, row.end, row.last, row.slot, row.new_blocks)
