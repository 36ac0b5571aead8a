"""One lockstep decode round of this rank's replica: every live place gets its next token, or with a drafter its next tokens.

A place is a row of the state tensors, which live on the device thread; plans carry changes only. One more row is the null
place (null block, slot 0, position 0): padding rows are copies of it, so a padded row cannot look alive. The buffers that
the model reads have fixed addresses and are filled for each round, so that a round can be captured and replayed.

A round evaluates each place's window, the anchor and what was drafted behind it: verify, commit of the rows that count, then
the drafter's own rows and the next window (spec speculation §7). The plan says how wide: how many rows of a window are
verified, and how many proposals the next one gets. At width 1 the window is the anchor alone, and nothing is left to verify or
to commit; a drafter still gets the rows that it needs to be asked again, but in its own time (Backlog).
"""

import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from k3mesh.errors import Internal
from services.contracts.geometry import blocks_for, rows_ahead, verify_widths
from services.contracts.ids import BLOCK_TOKENS, NULL_BLOCK, NULL_SLOT
from services.worker.cache.image import ImagePool
from services.worker.model.batch import ForwardBatch, cache_slots
from services.worker.model.decoder import DecoderStage
from services.worker.speculative.backlog import Backlog
from services.worker.speculative.capture import Capture
from services.worker.speculative.drafter import Drafter, Steps
from services.worker.speculative.sampling import Sampling
from services.worker.speculative.verify import accepted, choose
from services.worker.wire import (
    BlockDelta,
    Command,
    Mode,
    PlaceInstall,
    PlaceRestore,
    PlaceRetract,
    PlaceTokens,
    RoundPlan,
    RoundResult,
)

# A finishing round, one that lingers and its successor may write past a request's end (spec scheduling §3.1).
WIDTHS_PAST_END = 3


class DecodeReplica:
    """One rank of a decode replica with `places` sequence places of up to `max_model_len` tokens. A drafter fills windows of
    up to `verify_width`; without one it is 1."""

    def __init__(
        self,
        stage: DecoderStage,
        *,
        replica: int,
        places: int,
        max_model_len: int,
        verify_width: int,
        vocab_size: int,
        drafter: Drafter | None = None,
        images: ImagePool | None = None,
    ):
        assert (verify_width > 1) == (drafter is not None), "a window needs a drafter"
        self._stage, self._drafter, self._images = stage, drafter, images
        self._backlog = Backlog(drafter) if drafter is not None else None
        self._replica, self._places, self._width, self._vocab = replica, places, verify_width, vocab_size
        columns = blocks_for(max_model_len + WIDTHS_PAST_END * verify_width)
        self._state = _Rows(places + 1, columns, verify_width)
        self._counts = [0] * places  # blocks in each table
        self._windows = [0] * places  # tokens in each window
        self._sampling: list[Sampling | None] = [None] * places  # None: the place is empty
        self._buffers = _Rows(places, columns, verify_width)
        self._context = torch.zeros(places, dtype=torch.int32)
        self._fresh = torch.zeros(places, dtype=torch.bool)
        self._shapes = {width: _Shape(places, width) for width in verify_widths(verify_width)}
        self._rounds, self._tokens, self._drafted, self._accepted = 0, 0, 0, 0
        self._retracted, self._restored = 0, 0

    def counters(self) -> dict[str, int]:
        counters = {
            "places": sum(sampling is not None for sampling in self._sampling),
            "windows": sum(map(bool, self._windows)),
            "blocks_in_tables": sum(self._counts),
        }
        if self._backlog is not None:
            counters["draft_rows_kept"] = len(self._backlog)
        return counters

    def totals(self) -> dict[str, int]:
        totals = {
            "rounds": self._rounds,
            "tokens": self._tokens,
            "retractions": self._retracted,
            "restores": self._restored,
        }
        if self._drafter is not None:
            totals |= {"tokens_drafted": self._drafted, "tokens_accepted": self._accepted}
        return totals

    def execute(self, command: Command) -> RoundResult:
        if not isinstance(command, RoundPlan):
            raise Internal(f"a decode worker cannot do {type(command).__name__}; its scheduler drives the wrong engine")
        for place in command.clears:
            self._clear(place)
        for install in command.installs:
            self._install(install)
        for delta in command.deltas:
            self._append(delta)
        copied = self._copy(command)
        return replace(self._round(command), copied=copied)

    # ---- changes

    def _clear(self, place: int) -> None:
        self._check_place(place)
        if self._backlog is not None:
            self._backlog.forget(self._state.tables[place, : self._counts[place]])
        self._state.reset(place)
        self._counts[place] = self._windows[place] = 0
        self._sampling[place] = None

    def _install(self, it: PlaceInstall) -> None:
        if len(it.window) != self._width or not all(0 <= token < self._vocab for token in it.window):
            raise Internal(
                f"room {it.room}: window {list(it.window)} must have {self._width} ids below {self._vocab}", detail="PD_CAND"
            )
        self._seat(it)

    def _seat(self, it: PlaceInstall) -> None:
        self._check_place(it.place)
        if self._sampling[it.place] is not None:
            raise Internal(f"place {it.place} of replica {self._replica} is taken; clear it before room {it.room} gets it")
        if it.slot == NULL_SLOT:
            raise Internal(f"room {it.room}: slot 0 is the null slot and belongs to no request")
        self._state.slots[it.place] = it.slot
        self._state.positions[it.place] = it.position
        self._state.windows[it.place, : len(it.window)] = torch.tensor(it.window)
        self._windows[it.place] = len(it.window)
        self._sampling[it.place] = it.sampling
        self._append(BlockDelta(it.place, it.blocks))

    def _append(self, delta: BlockDelta) -> None:
        self._check_place(delta.place)
        start = self._counts[delta.place]
        stop = start + len(delta.blocks)
        if self._sampling[delta.place] is None or stop > self._state.tables.shape[1] or NULL_BLOCK in delta.blocks:
            raise Internal(
                f"place {delta.place} of replica {self._replica}: blocks {list(delta.blocks)} for columns {start}..{stop - 1} "
                f"belong to no request, exceed the {self._state.tables.shape[1]} that one may have, or name the null block"
            )
        self._state.tables[delta.place, start:stop] = torch.tensor(delta.blocks, dtype=torch.int32)
        self._counts[delta.place] = stop

    # ---- images

    def _copy(self, plan: RoundPlan) -> tuple[int, ...]:
        """Images out, then in -> their rooms, when every rank of the replica has done it."""
        if not plan.retracts and not plan.restores:
            return ()
        if self._images is None:
            raise Internal(f"round {plan.round_id} suspends requests, and replica {self._replica} has no memory for images")
        if plan.retracts and self._backlog is not None:
            self._backlog.settle()  # an image has all rows
        for retract in plan.retracts:
            self._retract(retract, self._images)
        for restore in plan.restores:
            self._restore(restore, self._images)
        self._images.acknowledge(plan.round_id, len(plan.retracts) + len(plan.restores))
        self._retracted += len(plan.retracts)
        self._restored += len(plan.restores)
        return (*(it.room for it in plan.retracts), *(it.install.room for it in plan.restores))

    def _retract(self, it: PlaceRetract, images: ImagePool) -> None:
        self._check_place(it.place)
        position = int(self._state.positions[it.place])
        if self._sampling[it.place] is None or position != it.position:
            raise Internal(
                f"room {it.room} at position {it.position} cannot leave place {it.place} of replica {self._replica}, which is "
                f"empty or at position {position}"
            )
        blocks = self._state.tables[it.place, : blocks_for(position)]
        images.save(blocks.long(), int(self._state.slots[it.place]), it.image)
        self._clear(it.place)

    def _restore(self, it: PlaceRestore, images: ImagePool) -> None:
        install = it.install
        if not 1 <= len(install.window) <= self._width:
            raise Internal(f"room {install.room}: window {list(install.window)} must have 1 to {self._width} ids")
        self._seat(install)
        blocks = torch.tensor(install.blocks[: blocks_for(install.position)], dtype=torch.long)
        images.load(it.image, blocks, install.slot, it.found)

    def _check_place(self, place: int) -> None:
        if not 0 <= place < self._places:
            raise Internal(f"replica {self._replica} has places 0..{self._places - 1}, the plan names {place}")

    # ---- the round

    def _round(self, plan: RoundPlan) -> RoundResult:
        live = plan.live
        positions = [self._check_live(place) for place in live]
        rules = [rule for place in live if (rule := self._sampling[place]) is not None]
        if not len(live) <= plan.bucket <= self._places:
            raise Internal(f"round {plan.round_id}: bucket {plan.bucket} must hold {len(live)} rows of {self._places} places")
        started = time.time()
        if plan.bucket == 0:  # nobody lives on any replica: the plan only cleared places
            return RoundResult(plan.round_id, self._replica, (), started, started)
        self._check_widths(plan)
        batch = self._fill(live, plan.bucket, plan.width, plan.mode)
        capture = self._capture(plan, len(batch.tokens))
        hidden = self._stage.forward(batch, None, _no_barrier, capture.take if capture is not None else None)
        assert isinstance(hidden, Tensor), "decode has one stage"
        rows = torch.tensor(live, dtype=torch.long)
        chosen = self._choose(hidden, positions, rules, plan.width)
        counts = accepted(self._state.windows[rows, : plan.width], chosen)
        windows = chosen.gather(1, counts.unsqueeze(1) - 1)  # the new anchors
        taken = F.pad(counts, (0, plan.bucket - len(live)), value=1)
        if batch.verify:
            self._stage.commit(batch, taken)
        if capture is not None and self._puts_off(plan):
            self._put_off(batch, hidden, capture, chosen, positions)
        elif capture is not None:
            windows = torch.cat([windows, self._draft(plan, batch, hidden, capture, chosen, taken)], 1)
        self._state.positions[rows] += counts
        self._state.windows[rows, : windows.shape[1]] = windows
        for place in live:
            self._windows[place] = windows.shape[1]
        return self._result(plan, chosen.tolist(), counts.tolist(), windows.tolist(), started)

    def _choose(self, hidden: Tensor, positions: list[int], rules: list[Sampling], width: int) -> Tensor:
        """The target's token after each row of the live places, [live, w]. Collective over TP, which has one batch."""
        if not rules:
            return torch.zeros(0, width, dtype=torch.long)
        logits = self._stage.logits(hidden[: len(rules) * width]).unflatten(0, (-1, width))
        return choose(logits, rules, positions)

    def _puts_off(self, plan: RoundPlan) -> bool:
        """Whether nobody drafts after this round with this replica, which verifies nothing either."""
        collective = self._drafter is not None and self._drafter.collective
        return plan.width == 1 and not (plan.most_proposals if collective else plan.proposals)

    def _capture(self, plan: RoundPlan, rows: int) -> Capture | None:
        if self._drafter is None:
            return None
        return self._drafter.watch() if self._puts_off(plan) else self._drafter.begin(rows, None)

    def _put_off(self, batch: ForwardBatch, hidden: Tensor, capture: Capture, chosen: Tensor, positions: list[int]) -> None:
        """The drafter's rows come later; chosen [live, 1]."""
        assert self._drafter is not None and self._backlog is not None
        if live := len(positions):
            inputs = self._drafter.inputs(capture, hidden, chosen.flatten())
            rows = tuple(it[:live] for it in inputs)
            self._backlog.add(rows, batch.positions[:live], batch.write_slots[:live])
        if any((position + 1) % BLOCK_TOKENS == 0 for position in positions):
            self._backlog.settle()  # another request may find the block that is full now

    def _draft(
        self, plan: RoundPlan, batch: ForwardBatch, hidden: Tensor, capture: Capture, chosen: Tensor, taken: Tensor
    ) -> Tensor:
        """Rows and proposals, [live, proposals]; chosen [live, w], taken [bucket] rows that count of each place."""
        assert self._drafter is not None and self._backlog is not None
        self._backlog.settle()
        live = len(chosen)
        following = F.pad(chosen, (0, 0, 0, len(taken) - live)).flatten()
        heads = batch.cu_seqlens[:-1].long() + taken - 1
        steps = Steps(plan.proposals, plan.most_proposals)
        return self._drafter.draft(batch, hidden, capture, following, heads, steps)[:live]

    def _result(
        self, plan: RoundPlan, chosen: list[list[int]], counts: list[int], windows: list[list[int]], started: float
    ) -> RoundResult:
        self._rounds += 1
        self._tokens += sum(counts)
        self._drafted += (plan.width - 1) * len(counts)
        self._accepted += sum(counts) - len(counts)
        results = tuple(
            PlaceTokens(place, tuple(tokens[:count]), tuple(window))
            for place, tokens, count, window in zip(plan.live, chosen, counts, windows, strict=True)
        )
        return RoundResult(plan.round_id, self._replica, results, started, time.time())

    def _check_live(self, place: int) -> int:
        """The position of its anchor."""
        self._check_place(place)
        sampling = self._sampling[place]
        position = int(self._state.positions[place])
        if sampling is None or self._counts[place] < blocks_for(position + rows_ahead(self._width)):
            raise Internal(
                f"place {place} of replica {self._replica} cannot decode position {position}: it is empty, or its table of "
                f"{self._counts[place]} blocks is too short"
            )
        return position

    def _check_widths(self, plan: RoundPlan) -> None:
        short = [place for place in plan.live if self._windows[place] < plan.width]
        known = plan.width in self._shapes and plan.proposals + 1 in self._shapes
        if not known or short or not plan.proposals <= plan.most_proposals < self._width:
            raise Internal(
                f"round {plan.round_id}: width {plan.width}, then {plan.proposals} proposals, at most {plan.most_proposals}; "
                f"replica {self._replica} has widths {list(self._shapes)}, and windows too short at places {short}"
            )

    def _fill(self, live: tuple[int, ...], bucket: int, width: int, mode: Mode) -> ForwardBatch:
        """The buffers' first `bucket` places, `width` rows each: the live ones in plan order, then padding."""
        null, shape = self._places, self._shapes[width]
        rows = torch.tensor([*live, *[null] * (bucket - len(live))])
        self._buffers.copy_from(self._state, rows)
        tables = self._buffers.tables[:bucket]
        positions = shape.positions[:bucket]
        torch.add(self._buffers.positions[:bucket].unsqueeze(1), shape.offsets, out=positions)
        shape.tokens[:bucket] = self._buffers.windows[:bucket, :width]
        shape.write_slots[:bucket] = cache_slots(tables, positions)
        self._context[:bucket] = self._buffers.positions[:bucket] + width
        return ForwardBatch(
            mode="extend" if mode is Mode.NORMAL_EAGER else "decode",
            tokens=shape.tokens[:bucket].flatten(),
            positions=positions.flatten(),
            cu_seqlens=shape.lengths[: bucket + 1],
            context_lens=self._context[:bucket],
            block_tables=tables,
            write_slots=shape.write_slots[:bucket].flatten(),
            slots=self._buffers.slots[:bucket],
            fresh=self._fresh[:bucket],
            verify=width > 1,
        )


class _Shape:
    """What a round of one width reads row by row, of n places: tokens, positions and write slots [n, w] int64."""

    def __init__(self, n: int, width: int):
        self.tokens = torch.zeros(n, width, dtype=torch.int64)
        self.positions = torch.zeros(n, width, dtype=torch.int64)
        self.write_slots = torch.zeros(n, width, dtype=torch.int64)
        self.lengths = torch.arange(n + 1, dtype=torch.int32) * width
        self.offsets = torch.arange(width)


class _Rows:
    """State of n places: block table [n, columns] int32, slot and anchor's position [n], window [n, w] int64; zero is the null
    place."""

    def __init__(self, n: int, columns: int, width: int):
        self.tables = torch.zeros((n, columns), dtype=torch.int32)
        self.slots = torch.zeros(n, dtype=torch.int64)
        self.positions = torch.zeros(n, dtype=torch.int64)
        self.windows = torch.zeros((n, width), dtype=torch.int64)

    def reset(self, row: int) -> None:
        for tensor in (self.tables, self.slots, self.positions, self.windows):
            tensor[row] = 0

    def copy_from(self, other: "_Rows", rows: Tensor) -> None:
        """This one's first len(rows) rows := rows of the other."""
        n = len(rows)
        torch.index_select(other.tables, 0, rows, out=self.tables[:n])
        torch.index_select(other.slots, 0, rows, out=self.slots[:n])
        torch.index_select(other.positions, 0, rows, out=self.positions[:n])
        torch.index_select(other.windows, 0, rows, out=self.windows[:n])


def _no_barrier(step: int) -> None:
    """A decode round produces for nobody: caches leave this engine never."""
