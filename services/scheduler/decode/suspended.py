"""Requests that make way and come back: RETRACTING, RETRACTED and RESTORING (spec scheduling §3.5). The rules are in
retraction.py.

Workers copy in the order of plans. So blocks that a retraction frees may go to residents at once: the copy reads them before
the round writes to them. Nobody else may have them yet, since a transfer agent's writes are not in that order: what residents
do not take stays with the request until all ranks have its image.
"""

import services.scheduler.decode.events as ev
from services.contracts.lifecycle import State
from services.scheduler.decode.capacity import GROWTH_TOKENS, Pool
from services.scheduler.decode.request import Decoding, Finishing, Request, Restoring, Retracted, Retracting
from services.scheduler.decode.retraction import data_blocks, fits
from services.scheduler.decode.rooms import Rooms


class Suspensions:
    """Handlers of rooms that are suspended, and of their way there and back."""

    def __init__(self, rooms: Rooms):
        self._rooms = rooms

    # ---- away
    def cede(self, pool: Pool, lacking: int) -> bool:
        """Take the blocks that a resident lacks from somebody who is on the way out anyway; False if nobody has them."""
        for request in self._rooms.suspended[pool.replica].values():
            state = request.state
            if isinstance(state, Retracting) and state.holding.released >= lacking:
                pool.cede(state.holding, lacking)
                return True
        return False

    def retract(self, pool: Pool, request: Request, lacking: int) -> None:
        """Suspend a resident none of whose rounds is out, and make available what another one lacks. There is room for its
        image."""
        rooms, state = self._rooms, request.state
        assert isinstance(state, Decoding)
        holding, progress = state.holding, state.progress
        image = rooms.images[pool.replica].take(data_blocks(progress), [entry.key for entry in holding.cached])
        table = frozenset(holding.blocks)
        pool.cede(holding, lacking)
        rooms.unseat(request)
        request.state = Retracting(holding, progress, image, table)
        request.retractions += 1
        rooms.suspended[pool.replica][request.room] = request
        rooms.totals["retractions"] += 1
        rooms.write(request, State.RETRACTING, (("image_blocks", len(image.blocks)), ("retractions", request.retractions)))

    # ---- back
    def restore(self) -> None:
        """Start bringing back the request of each replica that has waited longest, if it fits and no other is on its way."""
        for pool, suspended in zip(self._rooms.pools, self._rooms.suspended, strict=True):
            oldest = next(iter(suspended.values()), None)
            if oldest is not None and isinstance(oldest.state, Retracted):
                self._restore(pool, oldest, oldest.state)

    def _restore(self, pool: Pool, request: Request, state: Retracted) -> None:
        rooms, progress, keys = self._rooms, state.progress, state.image.keys
        if pool.cache.blocks_available < data_blocks(progress) - len(keys):
            return  # as mostly; the rest counts all requests
        remaining = request.budget - progress.completion
        blocks = fits(pool, rooms.promised(pool.replica), progress, remaining, keys, rooms.shape.rows_ahead)
        if blocks is None:
            return
        holding = pool.take(blocks, keys)
        assert holding is not None, f"{request.room} fits and does not"
        request.state = Restoring(holding, progress, state.image)
        rooms.lineup.touch(pool.replica)
        request.covered = remaining <= GROWTH_TOKENS
        rooms.capacity_freed = True  # newcomers waited behind it
        rooms.write(request, State.RESTORING, (("away_seconds", round(rooms.now - state.since, 6)),))

    # ---- copied
    def copied(self, request: Request) -> None:
        """All ranks of the replica have done what the round that landed asked of this request's image."""
        match request.state:
            case Retracting(holding=holding, progress=progress, image=image):
                self._rooms.give_back(holding)
                request.state = Retracted(progress, image, self._rooms.now)
                self._rooms.write(request, State.RETRACTED)
            case Restoring() as state:
                self._come_back(request, state)
            case Finishing(holding=holding, progress=progress):
                self._rooms.leave(request, progress, holding)
            case state:
                raise RuntimeError(f"the image of room {request.room} was copied, and it is {state.phase.name}")

    def _come_back(self, request: Request, state: Restoring) -> None:
        rooms, holding = self._rooms, state.holding
        assert state.round_id is not None
        rooms.images[holding.replica].free(state.image)
        del rooms.suspended[holding.replica][request.room]
        for key in state.image.keys[len(holding.cached) :]:
            rooms.pools[holding.replica].final(holding, key)
        state.progress.unmoved = True
        request.state = Decoding(holding, state.progress, known_blocks=len(holding.blocks), until=state.round_id)
        rooms.seat(request)
        rooms.totals["restores"] += 1
        rooms.write(request, State.DECODING)

    # ---- the end
    def end(self, request: Request, event: ev.EndAsked) -> None:
        self._finish(request, event.failure or ev.Failure("cancelled", f"{request.asked.request_id} was cancelled"))

    def lose(self, request: Request, failure: ev.Failure) -> None:
        """The engine is gone: no copy is under way any more."""
        if not isinstance(request.state, Retracted):
            assert isinstance(request.state, Retracting | Restoring)
            request.state.round_id = None
        self._finish(request, failure)

    def _finish(self, request: Request, failure: ev.Failure) -> None:
        """Its image is free at once; cache blocks that a copy under way reads or writes are not."""
        rooms, state, replica = self._rooms, request.state, request.replica
        assert isinstance(state, Retracting | Retracted | Restoring)
        rooms.images[replica].free(state.image)
        del rooms.suspended[replica][request.room]
        rooms.write(request, State.FINISHING)
        rooms.end(request, failure)
        rooms.capacity_freed = True  # newcomers may have waited behind it
        if isinstance(state, Retracted):
            rooms.leave(request, state.progress, None)
            return
        planned = state.round_id is not None
        if planned == isinstance(state, Restoring):
            rooms.pools[replica].clears.add(state.holding.place)  # the workers have it there, or will have
            rooms.lineup.touch(replica)
        if state.round_id is None:
            rooms.leave(request, state.progress, state.holding)
        else:
            request.state = Finishing(state.holding, state.progress, state.round_id)
