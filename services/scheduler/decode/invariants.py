"""What must hold between any two events; the planner's check()."""

from collections.abc import Mapping, Sequence

from services.contracts.geometry import blocks_for
from services.contracts.ids import Room
from services.scheduler.decode.capacity import Pool
from services.scheduler.decode.events import Client
from services.scheduler.decode.request import Decoding, Finishing, Installed, Request, Tombstones
from services.scheduler.decode.rounds import LaunchedRound


def check_pools(requests: Mapping[Room, Request], pools: Sequence[Pool]) -> None:
    """No place, slot or block is held twice or lost."""
    holdings = [request.state.holding for request in requests.values()]
    for pool in pools:
        pool.check([holding for holding in holdings if holding.replica == pool.replica])


def check_residents(
    requests: Mapping[Room, Request],
    residents: Sequence[Mapping[Room, Request]],
    launched: LaunchedRound | None,
    rows_ahead: int,
) -> None:
    """The residents are the installed requests that go on, each with the rows that its next round writes."""
    for replica, of_replica in enumerate(residents):
        orders: list[int] = []
        for room, request in of_replica.items():
            state = request.state
            assert requests.get(room) is request, f"{room} is resident and unknown"
            assert isinstance(state, Installed | Decoding) and state.holding.replica == replica, f"{room} is no resident"
            assert request.attached, f"{room} goes on for nobody"
            assert request.end is None and state.progress.completion < request.budget, f"{room} should have ended"
            rows = state.progress.position + rows_ahead
            assert launched is not None or len(state.holding.blocks) >= blocks_for(rows), f"{room} lacks a block"
            orders.append(state.progress.order)
        assert orders == sorted(orders), f"replica {replica}: residents are not in the order of their installation"
    count = sum(isinstance(request.state, Installed | Decoding) for request in requests.values())
    assert count == sum(map(len, residents)), "a resident is missing from its replica"


def check_round(requests: Mapping[Room, Request], launched: LaunchedRound | None) -> None:
    """Whoever is in the round that is out is still there, at its place; nobody finishes without a round to wait for."""
    out = {room: place for rows in launched.rows for place, room in rows} if launched is not None else {}
    for room, request in requests.items():
        state = request.state
        if launched is not None and isinstance(state, Decoding | Finishing) and state.round_id == launched.round_id:
            assert out.pop(room, None) == state.holding.place, f"{room} is not where its round runs"
        else:
            assert not isinstance(state, Finishing), f"{room} waits for a round that is not out"
    assert not out, f"rooms left while their round is out: {out}"


def check_clients(requests: Mapping[Room, Request], clients: Mapping[Client, Room], tombstones: Tombstones) -> None:
    """Streams follow living requests, one each; nobody is both alive and buried."""
    for client, room in clients.items():
        assert room in requests and requests[room].client == client, f"client {client} follows nobody"
    assert len(clients) == sum(request.client is not None for request in requests.values()), "a request's stream is unknown"
    for room in requests:
        assert room not in tombstones, f"{room} is buried alive"
