"""One lockstep decode round of this rank's replica: every live place gets its next token, or with a drafter its next tokens.

A place is a row of the state tensors, which live on the device thread; plans carry changes only. One more row is the null
place (null block, slot 0, position 0): padding rows are copies of it, so a padded row cannot look alive. State is kept on the
host; the rows of a round go to the device by one copy, and its results come back by one. What lies between is round_part.

A round evaluates each place's window, the anchor and what was drafted behind it: verify, commit of the rows that count, then
the drafter's own rows and the next window (spec speculation §7). The plan says how wide: how many rows of a window are
verified, and how many proposals the next one gets. At width 1 the window is the anchor alone, and nothing is left to verify or
to commit; a drafter still gets the rows that it needs to be asked again, but in its own time (Backlog).
"""

import time
from dataclasses import replace

import torch
from torch import Tensor

from k3mesh.errors import Internal
from services.contracts.geometry import blocks_for, rows_ahead, verify_widths
from services.contracts.ids import BLOCK_TOKENS, NULL_BLOCK, NULL_SLOT
from services.worker.cache.image import ImagePool
from services.worker.device import CPU
from services.worker.model.batch import cache_slots
from services.worker.model.decoder import DecoderStage
from services.worker.round_part import CapturedRounds, EagerRounds, RoundPart, Rounds, RoundShape
from services.worker.round_rows import RoundRows, Rows
from services.worker.speculative.backlog import Backlog
from services.worker.speculative.drafter import Drafter, Steps
from services.worker.speculative.sampling import Sampling, check_finite
from services.worker.speculative.verify import choose
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
        device: torch.device = CPU,
    ):
        assert (verify_width > 1) == (drafter is not None), "a window needs a drafter"
        self._drafter, self._images = drafter, images
        self._backlog = Backlog(drafter) if drafter is not None else None
        self._replica, self._places, self._width, self._vocab = replica, places, verify_width, vocab_size
        columns = blocks_for(max_model_len + WIDTHS_PAST_END * verify_width)
        self._state = Rows(places + 1, columns, verify_width)
        self._counts = [0] * places  # blocks in each table
        self._windows = [0] * places  # tokens in each window
        self._sampling: list[Sampling | None] = [None] * places  # None: the place is empty
        self._rows = RoundRows(places, columns, verify_width, device)
        self._widths = verify_widths(verify_width)
        self.part = RoundPart(stage, drafter, self._rows, verify_width, device)
        self._eager: Rounds = EagerRounds(self.part)
        self._graphs: CapturedRounds | None = None
        self._rounds, self._tokens, self._drafted, self._accepted = 0, 0, 0, 0
        self._retracted, self._restored = 0, 0

    def replay(self, graphs: CapturedRounds) -> None:
        """From now on rounds that they cover are run by them, where the plan lets them."""
        self._graphs = graphs

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
        if self._graphs is not None:
            totals |= self._graphs.totals()
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
        rows = torch.tensor([*live, *[self._places] * (plan.bucket - len(live))])
        self._rows.fill(self._state, rows)
        shape = self._shape_of(plan)
        if self._backlog is not None and not shape.puts_off:
            self._backlog.settle()  # before the rows that come behind those that it has
        rounds = self._eager
        if plan.mode is Mode.LOW_LATENCY_GRAPH and self._graphs is not None and self._graphs.covers(shape):
            rounds = self._graphs
        logits = rounds.evaluate(shape).unflatten(0, (-1, plan.width))
        settled = rounds.settle(shape, choose(logits, rules, positions))
        if shape.puts_off:
            self._put_off(live, settled.inputs, positions)
        return self._read(plan, settled.results, started)

    def _shape_of(self, plan: RoundPlan) -> RoundShape:
        proposals = plan.proposals if plan.live else 0  # nobody waits for this replica's
        most = plan.most_proposals if self._drafter is not None and self._drafter.collective else proposals
        puts_off = self._drafter is not None and plan.width == 1 and not most
        mode = "extend" if plan.mode is Mode.NORMAL_EAGER else "decode"
        return RoundShape(plan.bucket, plan.width, Steps(proposals, most), puts_off, mode)

    def _put_off(self, live: tuple[int, ...], inputs: tuple[Tensor, ...], positions: list[int]) -> None:
        """The drafter's rows of a round in which nobody drafts are written later."""
        assert self._backlog is not None
        if live:
            at = torch.tensor(positions)
            slots = cache_slots(self._state.tables[list(live)], at.unsqueeze(1)).squeeze(1)
            self._backlog.add(tuple(it[: len(live)].clone() for it in inputs), at, slots)
        if any((position + 1) % BLOCK_TOKENS == 0 for position in positions):
            self._backlog.settle()  # another request may find the block that is full now

    def _read(self, plan: RoundPlan, results: Tensor, started: float) -> RoundResult:
        """The one wait for the device. Places move on by what counted."""
        read, places = results[: len(plan.live)].cpu(), list(plan.live)
        chosen, counts, windows = read.split([plan.width, 1, read.shape[1] - plan.width - 1], dim=1)
        check_finite(chosen.flatten().tolist())
        self._state.positions[places] += counts.squeeze(1)
        self._state.windows[places, : windows.shape[1]] = windows
        for place in places:
            self._windows[place] = windows.shape[1]
        moved = int(counts.sum())
        self._rounds += 1
        self._tokens += moved
        self._drafted += (plan.width - 1) * len(places)
        self._accepted += moved - len(places)
        rows = zip(places, chosen.tolist(), counts.flatten().tolist(), windows.tolist(), strict=True)
        tokens = tuple(PlaceTokens(place, tuple(it[:count]), tuple(window)) for place, it, count, window in rows)
        return RoundResult(plan.round_id, self._replica, tokens, started, time.time())

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
        known = plan.width in self._widths and plan.proposals + 1 in self._widths
        if not known or short or not plan.proposals <= plan.most_proposals < self._width:
            raise Internal(
                f"round {plan.round_id}: width {plan.width}, then {plan.proposals} proposals, at most {plan.most_proposals}; "
                f"replica {self._replica} has widths {list(self._widths)}, and windows too short at places {short}"
            )
