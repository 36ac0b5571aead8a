"""Orders and events as bytes, however the socket cuts them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.messages import Failure
from services.kvtransfer.credits import FrameId
from services.kvtransfer.messages import Link, Receive, Received, Send, Sent
from services.kvtransfer.mover_line import (
    KINDS,
    Abort,
    Aborted,
    Connect,
    Connected,
    Event,
    Open,
    Opened,
    Order,
    Refused,
    Troubled,
    Unpacker,
    pack,
)
from services.kvtransfer.pieces import Piece, Units

PIECES = (
    Piece((Units((0, 5, 166), (1 << 31, 7)), Units((3,), (0,))), (1 << 32) - 1),
    Piece((Units((2,), (4,)),), 1),
)
ALL: list[Order | Event] = [
    Open(b"export", 1 << 40, 6, 112 << 20),
    Connect(Link(1), 0xFFFF_FFFF << 32, b"address"),
    Abort(Link(1 << 63)),
    Send(Link(3), (1 << 32) - 1, PIECES),
    Receive(FrameId(0), Link(4), 0, PIECES),
    Opened(b"\x00address", "xxh3_64", False),
    Refused(Failure("config_error", "48 bytes", "PD_CONTRACT")),
    Connected(Link(5)),
    Connected(Link(6), ""),
    Aborted(Link(7)),
    Sent(Link(8), 9),
    Sent(Link(8), 9, "UCXXConnectionResetError: gone", peer_gone=True),
    Received(FrameId(2)),
    Received(FrameId(2), intact=False, error="schlimm: ü", peer_gone=False),
    Troubled("ValueError()"),
]


def test_every_kind_is_tried():
    assert {type(it) for it in ALL} == set(KINDS)


@pytest.mark.parametrize("it", ALL, ids=lambda it: type(it).__name__)
def test_what_is_packed_is_read(it: Order | Event):
    assert Unpacker().feed(pack(it)) == [it]


@given(st.lists(st.sampled_from(ALL), max_size=6), st.lists(st.integers(1, 40)))
def test_messages_come_whole_and_in_order_however_they_are_cut(messages: list[Order | Event], cuts: list[int]):
    data, unpacker, found = b"".join(map(pack, messages)), Unpacker(), list[Order | Event]()
    for length in cuts:
        found += unpacker.feed(data[:length])
        data = data[length:]
    assert found + unpacker.feed(data) == messages
