"""What must hold between any two events; the planner's check()."""

from collections.abc import Mapping, Sequence

from services.contracts.geometry import blocks_for
from services.contracts.ids import Room
from services.scheduler.decode.capacity import Pool
from services.scheduler.decode.events import Client
from services.scheduler.decode.images import Image, ImagePool
from services.scheduler.decode.lineup import Lineup
from services.scheduler.decode.request import (
    Decoding,
    Finishing,
    Installed,
    Request,
    Restoring,
    Retracted,
    Retracting,
    Tombstones,
)
from services.scheduler.decode.rounds import LaunchedRound, blocks_next, part_in, surely_ends
from services.scheduler.decode.shape import EngineShape


def check_pools(requests: Mapping[Room, Request], pools: Sequence[Pool]) -> None:
    """No place, slot or block is held twice or lost."""
    holdings = [request.state.holding for request in requests.values() if not isinstance(request.state, Retracted)]
    for pool in pools:
        pool.check([holding for holding in holdings if holding.replica == pool.replica])


def check_suspended(
    requests: Mapping[Room, Request], suspended: Sequence[Mapping[Room, Request]], pools: Sequence[ImagePool]
) -> None:
    """Every suspended request has an image and nobody else has one; at most one of a replica is on its way back, the one that
    has waited longest."""
    for pool, of_replica in zip(pools, suspended, strict=True):
        images: list[Image] = []
        for place, (room, request) in enumerate(of_replica.items()):
            state = request.state
            assert requests.get(room) is request, f"{room} is suspended and unknown"
            assert isinstance(state, Retracting | Retracted | Restoring) and state.image.replica == pool.replica
            assert request.end is None and not (place and isinstance(state, Restoring)), f"{room} comes back out of turn"
            images.append(state.image)
        pool.check(images)
    count = sum(isinstance(request.state, Retracting | Retracted | Restoring) for request in requests.values())
    assert count == sum(map(len, suspended)), "a suspended request is missing from its replica"


def check_residents(
    requests: Mapping[Room, Request],
    residents: Sequence[Mapping[Room, Request]],
    rounds: Sequence[LaunchedRound],
    rows_ahead: int,
) -> None:
    """The residents are the installed requests that go on. Somebody has the rows that the next round writes, or something else
    on the replica moves: nobody waits for ever."""
    for replica, of_replica in enumerate(residents):
        orders: list[int] = []
        ready: list[bool] = []
        for room, request in of_replica.items():
            state = request.state
            assert requests.get(room) is request, f"{room} is resident and unknown"
            assert isinstance(state, Installed | Decoding) and state.holding.replica == replica, f"{room} is no resident"
            assert request.attached, f"{room} goes on for nobody"
            assert request.end is None and state.progress.completion < request.budget, f"{room} should have ended"
            rows = state.progress.position + rows_ahead
            ready.append(len(state.holding.blocks) >= blocks_for(rows))
            orders.append(state.progress.order)
        assert orders == sorted(orders), f"replica {replica}: residents are not in the order of their installation"
        still = (Installed, Decoding, Retracted)
        moves = any(it.replica == replica and not isinstance(it.state, still) for it in requests.values())
        assert rounds or not ready or any(ready) or moves, f"replica {replica} stands still"
    count = sum(isinstance(request.state, Installed | Decoding) for request in requests.values())
    assert count == sum(map(len, residents)), "a resident is missing from its replica"


def check_rounds(requests: Mapping[Room, Request], rounds: Sequence[LaunchedRound], last: int) -> None:
    """Rounds are out in order, one that runs and one behind it at most. Whoever is in one of them is still there, at its
    place; nobody finishes without a round to wait for. `last`: of all launched."""
    ids = [launched.round_id for launched in rounds]
    assert len(ids) <= 2 and ids == list(range(ids[0], ids[0] + len(ids)) if ids else ()), f"rounds {ids} are out"
    out = {room: (place, launched.round_id) for launched in rounds for rows in launched.rows for place, room in rows}
    copied = {room: launched.round_id for launched in rounds for room in launched.copied}
    for room, request in requests.items():
        state = request.state
        if room in out:
            assert isinstance(state, Decoding | Finishing), f"{room} is in a round that is out"
            of_state = state.round_id if isinstance(state, Finishing) else state.until or last
            assert out.pop(room) == (state.holding.place, of_state), f"{room} is not where its last round runs"
        elif room in copied:
            assert isinstance(state, Retracting | Restoring | Finishing), f"{room} is not copied any more"
            assert copied.pop(room) == state.round_id, f"{room} is copied by another round"
        else:
            assert not isinstance(state, Finishing), f"{room} waits for a round that is not out"
    assert not out and not copied, f"rooms left while their round is out: {out}, {copied}"


def check_lineup(
    lineup: Lineup, residents: Sequence[Mapping[Room, Request]], rounds: Sequence[LaunchedRound], shape: EngineShape
) -> None:
    """Every resident is in line or beside it, or its last token is under way. Whoever is in line and not near its
    end has the blocks for the next round and reaches it."""
    out = rounds[-1] if rounds else None
    for line, of_replica in zip(lineup.lines, residents, strict=True):
        for place, request in line.members.items():
            state = request.state
            assert of_replica.get(request.room) is request and isinstance(state, Decoding), f"{request.room} is in line"
            assert state.holding.place == place and state.until is None, f"{request.room} is in line at another's place"
            enough = len(state.holding.blocks) >= blocks_next(request, shape, out) and not surely_ends(request, out)
            assert enough or lineup.near.get(request.room) is request, f"{request.room} is not looked at in time"
        for room, request in of_replica.items():
            state = request.state
            assert isinstance(state, Installed | Decoding)
            member, beside = line.members.get(state.holding.place) is request, lineup.beside.get(room) is request
            if not member and not beside:
                assert any(part_in(request, it) and surely_ends(request, it) for it in rounds), f"{room} is forgotten"
            assert not (member and beside), f"{room} is in line and beside it"
    known = {request.room for line in lineup.lines for request in line.members.values()}
    assert lineup.near.keys() <= known, "somebody who is in no line is near its end there"
    assert all(room in residents[it.replica] for room, it in lineup.beside.items()), "somebody who is gone waits beside a line"


def check_clients(requests: Mapping[Room, Request], clients: Mapping[Client, Room], tombstones: Tombstones) -> None:
    """Streams follow living requests, one each; nobody is both alive and buried."""
    for client, room in clients.items():
        assert room in requests and requests[room].client == client, f"client {client} follows nobody"
    assert len(clients) == sum(request.client is not None for request in requests.values()), "a request's stream is unknown"
    for room in requests:
        assert room not in tombstones, f"{room} is buried alive"
