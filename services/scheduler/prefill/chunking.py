"""How a batch of prompt chunks is filled (spec scheduling §2.1 step 4, §2.2, §3.6)."""

from dataclasses import dataclass
from math import inf

from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS, NULL_SLOT, SlotId
from services.contracts.lifecycle import State
from services.scheduler.prefill import report
from services.scheduler.prefill.events import ChunkRow
from services.scheduler.prefill.pool import Holding
from services.scheduler.prefill.request import Prefilling, Ready, Request
from services.scheduler.prefill.roster import Roster

SHORT_PROMPT = 2048  # tokens; shorter prompts must not wait behind long ones for ever
SHORT_WAIT = 1.0  # seconds that a short prompt waits before it may claim its share


@dataclass(slots=True)
class Budget:
    """What one batch may still take. Made for one pass over the prompts and thrown away after it."""

    tokens: int  # new tokens of the batch
    sequences: int
    long_tokens: int  # the part of `tokens` that long prompts may have

    @classmethod
    def of_batch(cls, tokens: int, sequences: int, short_demand: int) -> "Budget":
        """`short_demand`: tokens of short prompts that have waited for SHORT_WAIT. Long prompts leave them room, yet keep
        half of the batch (at least one block, so that a small budget still moves them)."""
        half = max(BLOCK_TOKENS, align_down(tokens // 2))
        return cls(tokens, sequences, long_tokens=max(half, tokens - short_demand))

    @property
    def spent(self) -> bool:
        return self.tokens == 0 or self.sequences == 0

    def chunk_end(self, start: int, prompt_tokens: int) -> int:
        """Where the chunk that begins at `start` ends: at the prompt's end or at a multiple of 128; `start` if none fits."""
        if self.sequences == 0:
            return start
        room = min(self.tokens, self.long_tokens) if is_long(prompt_tokens) else self.tokens
        if start + room >= prompt_tokens:
            return prompt_tokens
        return max(start, align_down(start + room))

    def take(self, tokens: int, prompt_tokens: int) -> None:
        self.tokens -= tokens
        self.sequences -= 1
        if is_long(prompt_tokens):
            self.long_tokens -= tokens


def fill(roster: Roster) -> tuple[ChunkRow, ...]:
    """The next batch, possibly empty. Running prompts go on first, the oldest before all; then new ones start, FIFO."""
    budget = Budget.of_batch(roster.limits.chunk_tokens, roster.limits.max_num_seqs, _short_demand(roster))
    rows = [row for request in list(roster.incomplete) if (row := _chunk(request, budget, roster)) is not None]
    for request in list(roster.ready):
        cached = roster.pool.cached_tokens(request.keys)
        if budget.chunk_end(cached, request.prompt_tokens) == cached:
            if is_long(request.prompt_tokens) and not budget.spent:
                continue  # a short prompt may use what is left
            break
        if roster.lacks_blocks(request):
            break
        _start(request, roster)
        row = _chunk(request, budget, roster)
        assert row is not None
        rows.append(row)
    _hold_places(roster)
    return tuple(rows)


def _hold_places(roster: Roster) -> None:
    """Who has a decode place and waits for its turn keeps it; if the first in line finds no blocks here, for a while only."""
    blocked = bool(roster.ready) and roster.lacks_blocks(roster.ready[0])
    for request in roster.ready:
        assert isinstance(request.state, Ready)
        until = roster.now + roster.limits.hold_timeout
        request.state.hold_until = min(request.state.hold_until, until) if blocked else inf
        roster.timers.arm(request)


def _short_demand(roster: Roster) -> int:
    """Tokens that short prompts have waited for too long."""
    return sum(
        request.prompt_tokens - (request.state.next if isinstance(request.state, Prefilling) else 0)
        for line in (roster.incomplete, roster.ready)
        for request in line
        if not is_long(request.prompt_tokens) and roster.now - request.arrived > SHORT_WAIT
    )


def _start(request: Request, roster: Roster) -> None:
    """Give the prompt its slot, what the cache has of it, and the promise of the other blocks."""
    request.timeline.started = roster.now
    roster.wanting.discard(request)
    holding = roster.pool.start(roster.limits.prompt_blocks(request.prompt_tokens), request.keys)
    request.cached_tokens = holding.found
    roster.totals["prefix_cache_queries"] += request.prompt_tokens
    roster.totals["prefix_cache_hits"] += holding.found
    roster.totals["prefix_cache_hit_requests"] += holding.found > 0
    roster.write(request, State.PREFILLING, report.started(request))
    roster.enter(request, Prefilling(holding, set(roster.ranks), next=holding.found))


def _chunk(request: Request, budget: Budget, roster: Roster) -> ChunkRow | None:
    """The prompt's next chunk within the budget, with the blocks that it writes."""
    state = request.state
    assert isinstance(state, Prefilling)
    start, end = state.next, budget.chunk_end(state.next, request.prompt_tokens)
    if end == start:
        return None
    end, save = _checkpoint(request, state.holding, start, end, roster)
    budget.take(end - start, request.prompt_tokens)
    last = end == request.prompt_tokens
    known = 0 if start == state.holding.found else len(state.holding.blocks)
    roster.pool.grow(state.holding, roster.limits.prompt_blocks(end) if last else blocks_for(end))
    if last:
        roster.incomplete.remove(request)
    state.next = end
    state.in_flight += 1
    roster.totals["computed_tokens"] += end - start
    load = state.holding.checkpoint if start == state.holding.found else None
    return ChunkRow(
        request.request_id, request.room, start, end, last, tuple(state.holding.blocks[known:]), state.holding.slot,
        request.sampling, request.prefix_tokens, request.proposals, load or NULL_SLOT, save or NULL_SLOT,
    )  # fmt: skip


def _checkpoint(request: Request, holding: Holding, start: int, end: int, roster: Roster) -> tuple[int, SlotId | None]:
    """Where the chunk from `start`, at most to `end`, ends so that its state is worth keeping, and where to keep it.

    That is at the last full block's end, behind which another turn of the same conversation goes on, and where another
    prompt's cached blocks end: a third one will likely part from them there too. For a state at any other chunk end no older
    one has to make way, and none takes a slot that somebody waits for.
    """
    pool = roster.pool
    if pool.cache.slots_available <= len(roster.ready):
        return end, None
    wanted = [stop for stop in (holding.branch, request.last_boundary) if start < stop <= end]
    if wanted:
        stop = min(wanted)
        slot = pool.slot_for_checkpoint(holding, request.keys[stop // BLOCK_TOKENS - 1], evict=True)
        return (stop, slot) if slot is not None else (end, None)
    if end < request.last_boundary:
        return end, pool.slot_for_checkpoint(holding, request.keys[end // BLOCK_TOKENS - 1], evict=False)
    return end, None


def align_down(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def is_long(prompt_tokens: int) -> bool:
    return prompt_tokens >= SHORT_PROMPT
