"""Rounds, and the requests that live in them until they end (spec scheduling §3.1, §3.5)."""

from collections.abc import Sequence

import services.scheduler.decode.events as ev
from services.contracts.ids import BLOCK_TOKENS, Replica, Token
from services.contracts.lifecycle import State
from services.scheduler.block_keys import token_bytes
from services.scheduler.decode.acceptance import Verdict
from services.scheduler.decode.capacity import Holding, Pool
from services.scheduler.decode.request import Decoding, Finishing, Installed, Progress, Request, Retracted
from services.scheduler.decode.retraction import data_blocks, newest_that_helps, victims
from services.scheduler.decode.rooms import Rooms
from services.scheduler.decode.rounds import blocks_next, mismatch
from services.scheduler.decode.suspended import Suspensions


class Residents:
    """Handlers of rooms that are INSTALLED, DECODING or FINISHING, and of the rounds that they take part in."""

    def __init__(self, rooms: Rooms, suspensions: Suspensions):
        self._rooms, self._suspensions = rooms, suspensions

    def plan(self, now: float) -> ev.RoundPlan | None:
        """The next round, also while one runs; None while one waits behind that, or when there is nothing to do."""
        rooms = self._rooms
        out = rooms.rounds[-1] if rooms.rounds else None
        if out is not None and (len(rooms.rounds) > 1 or not rooms.lineup.secure(out, rooms.pools)):
            return None
        for replica in sorted(rooms.joined):
            new = sum(isinstance(request.state, Installed) for request in rooms.residents[replica].values())
            if new:
                rooms.widths.joined(replica, new / len(rooms.residents[replica]))
        rooms.joined.clear()
        launched = rooms.lineup.launch(out, rooms.pools, rooms.residents, rooms.suspended, rooms.widths, now)
        if launched is None:
            return None
        plan, it = launched
        rooms.rounds.append(it)
        return plan

    def round_done(self, done: ev.RoundDone) -> str | None:
        """Count and publish what a round brought -> why the answer cannot be, if so; the engine is lost then."""
        launched = self._rooms.rounds[0] if self._rooms.rounds else None
        problem = mismatch(launched, done)
        if problem is not None or launched is None:
            return problem
        seconds = self._rooms.now - self._rooms.round_since
        self._rooms.rounds.popleft()
        self._rooms.landed_at = self._rooms.now
        self._rooms.totals["rounds"] += 1
        verdicts: list[list[Verdict]] = []
        said: list[tuple[Request, tuple[Token, ...]]] = []
        ended: list[tuple[Request, ev.Finished]] = []
        near: list[Request] = []
        is_near = self._rooms.lineup.is_near
        for rows, width, entries in zip(launched.rows, launched.widths, done.replicas, strict=True):
            verdicts.append([])
            right: list[int] = []  # proposals, of each request
            self._count_width(width.width if rows else 0)
            for (_, room), entry in zip(rows, entries, strict=True):
                request = self._rooms.requests[room]
                match request.state:
                    case Decoding(holding=holding, progress=progress):
                        verdicts[-1] += progress.guesses.compare(entry.tokens)
                        right.append(len(entry.tokens) - 1)
                        tokens, end = self._advance(request, progress, entry, width.width)
                        said.append((request, tokens))
                        if end is not None:
                            ended.append((request, end))
                        elif is_near(request, holding, progress.position, progress.completion):
                            near.append(request)
                    case Finishing(holding=holding, progress=progress, round_id=last):
                        if last == done.round_id:
                            self._rooms.leave(request, progress, holding)
                    case state:
                        raise RuntimeError(f"room {room} was in round {done.round_id} and is {state.phase.name} now")
            self._count_acceptance(width.width - 1, right)
        self._rooms.publish(said)
        for request, end in ended:
            self._finish(request, end)
        self._rooms.lineup.landed(near, self._rooms.pools)
        for room in done.copied:
            self._suspensions.copied(self._rooms.requests[room])
        if any(launched.rows):
            self._rooms.widths.done(seconds, verdicts)
        return None

    def _advance(
        self, request: Request, progress: Progress, entry: ev.PlaceTokens, width: int
    ) -> tuple[tuple[Token, ...], ev.Finished | None]:
        """Count what the round gave one request -> what its client gets of it, and the end if that is all."""
        if progress.rounds == 0:
            self._rooms.write(request, State.DECODING)
        if width > 1:
            self._count_window(progress, width - 1, len(entry.tokens) - 1)
        progress.rounds += 1
        progress.unmoved = False
        tokens, end = request.accept(progress, entry.tokens)
        progress.position += len(entry.tokens)
        progress.window, progress.usable = entry.window, len(entry.window)
        progress.guesses.propose(entry.window[1:])
        progress.last_token_at = self._rooms.now
        self._cache_full_blocks(request, progress, entry.tokens)
        return tokens, end

    def _cache_full_blocks(self, request: Request, progress: Progress, tokens: tuple[Token, ...]) -> None:
        """Rows before the anchor's position are final. Of the newest one that is true for the target alone: a NextN layer may
        write its row once more. So a block is full when there is one row behind it."""
        state, keys = request.state, self._rooms.shape.keys
        assert isinstance(state, Decoding)
        if keys is None or not progress.unnamed:
            return
        holding, unnamed = state.holding, progress.unnamed
        unnamed += tokens
        while (len(holding.cached) + 1) * BLOCK_TOKENS < progress.position:
            before = holding.cached[-1].key if holding.cached else keys.root
            (key,) = keys.after(before, token_bytes(unnamed[: BLOCK_TOKENS + 1]), 1)
            self._rooms.pools[holding.replica].final(holding, key)
            del unnamed[:BLOCK_TOKENS]

    def _count_width(self, width: int) -> None:
        """A replica had a round of this width; 0: nobody was there."""
        if width and self._rooms.shape.verify_width > 1:
            self._rooms.totals[f"rounds_of_width_{width}"] += 1

    def _count_window(self, progress: Progress, drafted: int, right: int) -> None:
        progress.count_window(drafted, right)
        if progress.rounds == 0:
            self._rooms.totals["handoff_windows"] += 1
            self._rooms.totals["handoff_accepted"] += right

    def _count_acceptance(self, drafted: int, right: Sequence[int]) -> None:
        """Of `drafted` proposals each that were verified so many were right, whether or not a request ends before the last of
        them."""
        totals, windows = self._rooms.totals, len(right)
        if not drafted or not windows:
            return
        totals["windows"] += windows
        totals["tokens_drafted"] += drafted * windows
        totals["tokens_accepted"] += sum(right)
        for k in range(1, drafted + 1):
            totals[f"drafted_at_{k}"] += windows
            totals[f"accepted_at_{k}"] += sum(it >= k for it in right)

    # ---- capacity
    def secure_next_rows(self) -> None:
        """Give every resident the blocks of its next round, the oldest first. Who gets none waits while others can go on."""
        if self._rooms.rounds:
            return  # nobody's position is known, and nobody may be suspended or aborted
        for pool in self._rooms.pools:
            while (blocked := self._grow_all(pool)) is not None and not self._moves(pool.replica):
                self._make_room(pool, blocked, standstill=True)

    def _grow_all(self, pool: Pool) -> Request | None:
        """-> the oldest that has to wait, if it still has to when the others have what they need."""
        residents, blocked = self._rooms.residents[pool.replica], None
        for room in list(residents):
            while (request := residents.get(room)) is not None and not self._grow(pool, request):
                if not self._make_room(pool, request):
                    blocked = blocked or request
                    break
        waits = blocked is not None and blocked.room in residents and not self._grow(pool, blocked)
        return blocked if waits else None

    def _grow(self, pool: Pool, request: Request) -> bool:
        state = request.state
        assert isinstance(state, Installed | Decoding)
        return self._rooms.lineup.grow(pool, state, self._next_blocks(request)[1])

    def _next_blocks(self, request: Request) -> tuple[Holding, int]:
        """What it holds, and how many blocks its next round takes."""
        state = request.state
        assert isinstance(state, Installed | Decoding)
        return state.holding, blocks_next(request, self._rooms.shape, out=None)

    def _make_room(self, pool: Pool, request: Request, standstill: bool = False) -> bool:
        """Free the blocks that a resident lacks, at somebody's cost; False if it had better wait."""
        rooms = self._rooms
        residents, images = list(rooms.residents[pool.replica].values()), rooms.images[pool.replica]
        if any([pool.merge(self._next_blocks(resident)[0]) for resident in residents]):
            return True
        lacking = pool.lacking(*self._next_blocks(request))
        if self._suspensions.cede(pool, lacking):
            return True
        candidates = victims(residents, request, lacking, standstill) if images.capacity else []
        shortfalls: list[str] = []
        for victim in candidates:
            assert isinstance(victim.state, Decoding)
            shortfall = images.shortfall(data_blocks(victim.state.progress))
            if not shortfall:
                self._suspensions.retract(pool, victim, lacking)
                return True
            shortfalls.append(shortfall)
        if images.capacity and not candidates and not standstill:
            return False
        self._abort(pool, newest_that_helps(residents, request, lacking), shortfalls)
        return True

    def _moves(self, replica: Replica) -> bool:
        """Whether somebody who holds blocks there goes on by itself."""
        for request in self._rooms.requests.values():
            if request.replica == replica and not isinstance(request.state, Retracted):
                if not isinstance(request.state, Installed | Decoding):
                    return True
                holding, blocks = self._next_blocks(request)
                if len(holding.blocks) >= blocks:
                    return True
        return False

    def _abort(self, pool: Pool, newest: Request, shortfalls: Sequence[str]) -> None:
        self._rooms.totals["capacity_aborts"] += 1
        images = self._rooms.images[pool.replica]
        if not images.capacity:
            why = "none can be suspended (give --retraction-snapshot-ratio above 0)"
        elif shortfalls:
            why = f"none can be suspended: {shortfalls[-1]}"
        else:
            why = "none that may be suspended would help"
        message = (
            f"decode replica {pool.replica} has no free block left of {pool.blocks.capacity}, this request is the newest of "
            f"those that grow there, and {why}; try again, or give the decode engine more blocks or a lower --max-num-seqs"
        )
        self._finish(newest, ev.Failure("capacity_aborted", message))

    # ---- the end
    def end(self, request: Request, event: ev.EndAsked) -> None:
        self._finish(request, event.failure or ev.Failure("cancelled", f"{request.asked.request_id} was cancelled"))

    def _finish(self, request: Request, end: ev.Finished | ev.Failure) -> None:
        """No new rounds; what it holds stays while a launched round may write to it."""
        state = request.state
        assert isinstance(state, Installed | Decoding)
        self._rooms.unseat(request)
        self._rooms.write(request, State.FINISHING)
        self._rooms.end(request, end)
        if isinstance(state, Decoding):
            self._rooms.pools[state.holding.replica].clears.add(state.holding.place)
            last = self._rooms.last_round(state)
            if last is not None:
                request.state = Finishing(state.holding, state.progress, last)
                return
        self._rooms.leave(request, state.progress, state.holding)

    def lose(self, request: Request, failure: ev.Failure) -> None:
        """The engine is gone: no round is out any more."""
        match request.state:
            case Finishing(holding=holding, progress=progress):
                self._rooms.leave(request, progress, holding)
            case _:
                self._finish(request, failure)
