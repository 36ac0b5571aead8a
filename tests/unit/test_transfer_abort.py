"""The abort table (spec cache-and-handoff §11), whole: every state of a room on either side meets every event that can come.

Whatever was met, the room then ends: cancelled by its scheduler, answered by its peers, its effects finished. A scheduler may
reuse the memory at `Drained`, so that is when nothing may touch it; a peer may give up its receives at a peer's `Drained`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.contracts.barriers import ChunkStarted, FieldsReady, ForgetLocal, Handoff, HandoffReady, LocalRow
from services.contracts.events import DeadlinePassed
from services.kvtransfer import messages as m
from services.kvtransfer.session import Limits, Session
from services.kvtransfer.sink import SinkSession
from services.kvtransfer.source import SourceSession
from tests.lib.transfer import manifest, record

LIMITS = Limits(frame_bytes=40 << 10, frames=3, window=2)  # a block of 36 KiB fills a frame
ROOM = 7
MANIFEST = manifest(ROOM, 300)
HANDOFF = Handoff(3, (3,), 0)
FAILURE = m.transfer_failed("PD_TRANSFER", "test")


class Side:
    """One session, what it has asked for and not got, and what it has told; the promises are checked as it speaks."""

    effect: type  # that touches the pools and is on the wire
    session: Session

    def __init__(self) -> None:
        self.now = 0.0
        self.links: list[m.Link] = []
        self.running: list[Any] = []
        self.reports: list[Any] = []
        self.said: list[Any] = []

    def do(self, event: Any) -> None:
        for effect in self.session.apply(event, self.now):
            match effect:
                case m.ToScheduler(report):
                    self.hear(report)
                case m.ToPeer(link, message):
                    self.said.append((link, message))
                    busy = [it for it in self.running if it.link == link]
                    assert not (isinstance(message, m.Drained) and message.room == ROOM and busy), "drained, and on the wire"
                case m.CloseLink(link):
                    self.lose(link)
                case _:
                    self.running.append(effect)
                    assert isinstance(effect, self.effect)
                    assert not self.over, "memory is touched after the end"
        self.session.check()

    def hear(self, report: Any) -> None:
        match report:
            case m.RoomFailed():
                assert not [it for it in self.reports if isinstance(it, m.RoomFailed)] and not self.over, (
                    "failed twice, or late"
                )
            case m.Drained():
                assert not self.running, "drained, and its memory is touched"
            case m.SourceReleased() | m.RankReady():
                assert not self.failed and not self.over, "it ends well after it has ended"
        self.reports.append(report)

    @property
    def failed(self) -> bool:
        return any(isinstance(report, m.RoomFailed) for report in self.reports)

    @property
    def over(self) -> bool:
        return any(isinstance(report, m.Drained | m.SourceReleased | m.RankReady) for report in self.reports)

    def finish(self) -> None:
        """Everything that runs ends as it should, and what follows from it."""
        while self.running:
            self.end(self.running.pop(0))

    def end(self, effect: Any, **how: Any) -> None:
        dead = {} if effect.link in self.links else dict(error="dead", peer_gone=True)
        match effect:
            case m.Send():
                self.do(m.Sent(effect.link, effect.seq, **(dead | how)))
            case m.Receive():
                self.do(m.Received(effect.frame, **(dead | how)))

    def stop_running(self, **how: Any) -> None:
        """What is on the wire ends, in a certain way."""
        for effect in list(self.running):
            self.running.remove(effect)
            self.end(effect, **how)

    def from_peer(self, message: Any, link: int = 0) -> None:
        if self.links:
            self.do(m.FromPeer(self.links[link], message))

    def deadline(self) -> None:
        """The next thing that must have happened has not."""
        if (at := self.session.next_deadline()) is not None:
            self.now = max(self.now, at)
            self.do(DeadlinePassed())

    def lose(self, link: m.Link, gone: bool = False) -> None:
        raise NotImplementedError

    def link_up(self, life: int = 0) -> None:
        raise NotImplementedError


class P(Side):
    """The last stage; its field 4 is paged, the others are slots."""

    effect = m.Send

    def __init__(self) -> None:
        super().__init__()
        self.session = SourceSession(record("prefill", 1), LIMITS)
        self.number = 0
        self.link_up()

    def link_up(self, life: int = 0) -> None:
        self.number += 1
        self.links = [m.Link(self.number)]
        self.do(m.LinkUp(self.links[0], record("decode", engine_epoch=22 + life)))

    def lose(self, link: m.Link, gone: bool = False) -> None:
        self.links = [it for it in self.links if it != link]
        self.do(m.LinkLost(link, "test", gone))

    def lose_all(self, gone: bool = False) -> None:
        for link in list(self.links):
            self.lose(link, gone)

    def offer(self) -> None:
        self.from_peer(m.Offer(MANIFEST))

    def chunk(self, start: int = 0, end: int = 256, last: bool = False, barriers: bool = True) -> None:
        blocks = tuple(range(10 + -(-start // 128), 10 + -(-end // 128)))
        self.do(ChunkStarted(start + 1, (LocalRow(ROOM, start, end, last, 4, blocks),)))
        if barriers:
            self.do(FieldsReady(start + 1, 0, len(self.session.placement.producer_steps)))

    def grant(self) -> None:
        offered = [it.seq for link, batch in self.said if isinstance(batch, m.FrameBatch) and link in self.links
                   for it in batch.frames]  # fmt: skip
        self.from_peer(m.Grant(ROOM, tuple(offered)))

    def all_sent(self) -> None:
        self.chunk(0, 300, last=True)
        for _ in range(12):
            self.finish()
            self.grant()
        self.do(HandoffReady(ROOM, HANDOFF))

    def wind_down(self) -> None:
        self.do(m.CancelRoom(ROOM, "the end"))
        self.from_peer(m.Drained(ROOM))
        self.finish()


P_STATES: dict[str, Callable[[P], Any]] = {
    "unknown": lambda it: None,
    "refused beforehand": lambda it: it.do(m.CancelRoom(ROOM, "early")),
    "accepted": lambda it: it.offer(),
    "waiting for input": lambda it: (it.offer(), it.chunk(barriers=False)),
    "offered": lambda it: (it.offer(), it.chunk()),
    "sending": lambda it: (it.offer(), it.chunk(), it.grant()),
    "all but the token": lambda it: (it.offer(), it.chunk(0, 300, last=True), it.grant(), it.finish()),
    "done": lambda it: (it.offer(), it.all_sent()),
    "released": lambda it: (it.offer(), it.all_sent(), it.from_peer(m.StageAck(ROOM, 1))),
    "cancelled, D not heard": lambda it: (it.offer(), it.chunk(), it.do(m.CancelRoom(ROOM, "x"))),
    "cancelled by D while sending": lambda it: (it.offer(), it.chunk(), it.grant(), it.from_peer(m.CancelRoom(ROOM, "x"))),
    "cancelled while sending": lambda it: (
        it.offer(), it.chunk(), it.grant(), it.do(m.CancelRoom(ROOM, "x")), it.from_peer(m.Drained(ROOM))
    ),
    "without a link": lambda it: (it.offer(), it.chunk(), it.lose_all()),
    "without a link, done": lambda it: (it.offer(), it.all_sent(), it.lose_all()),
    "without a link, still sending": lambda it: (it.offer(), it.chunk(), it.grant(), it.lose_all()),
    "ended": lambda it: (it.offer(), it.from_peer(m.CancelRoom(ROOM, "x"))),
}  # fmt: skip

P_EVENTS: dict[str, Callable[[P], Any]] = {
    "cancel by the scheduler": lambda it: it.do(m.CancelRoom(ROOM, "test")),
    "cancel by D": lambda it: it.from_peer(m.CancelRoom(ROOM, "test", FAILURE)),
    "D has drained": lambda it: it.from_peer(m.Drained(ROOM)),
    "link lost": lambda it: it.lose_all(),
    "D is gone": lambda it: it.lose_all(gone=True),
    "D links again": lambda it: it.link_up(),
    "D links and offers again": lambda it: (it.link_up(), it.offer()),
    "D links again in another life": lambda it: it.link_up(life=1),
    "time": lambda it: it.deadline(),
    "time, twice": lambda it: (it.deadline(), it.deadline()),
    "offer": lambda it: it.offer(),
    "grant": lambda it: it.grant(),
    "grant of nothing": lambda it: it.from_peer(m.Grant(ROOM, (99,))),
    "acknowledgement": lambda it: it.from_peer(m.StageAck(ROOM, 1)),
    "acknowledgement of another attempt": lambda it: it.from_peer(m.StageAck(ROOM, 2)),
    "next chunk": lambda it: it.chunk(256, 300, last=True),
    "first token": lambda it: it.do(HandoffReady(ROOM, HANDOFF)),
    "forget": lambda it: it.do(ForgetLocal((ROOM,))),
    "sends end": lambda it: it.stop_running(),
    "sends fail": lambda it: it.stop_running(error="no"),
    "sends find the peer dead": lambda it: it.stop_running(error="no", peer_gone=True),
}


@pytest.mark.parametrize("event", P_EVENTS)
@pytest.mark.parametrize("state", P_STATES)
def test_whatever_meets_a_room_of_p_it_ends_and_leaves_nothing(state: str, event: str):
    it = P()
    P_STATES[state](it)
    P_EVENTS[event](it)
    P_EVENTS[event](it)  # nothing changes by hearing it again
    it.wind_down()
    assert it.over, "the scheduler waits for ever"
    rest = {key: value for key, value in it.session.counters().items() if value and key not in ("links", "steps")}
    assert not rest
    before = len(it.reports)
    it.chunk(256, 300, last=True)
    it.offer()
    assert not [report for report in it.reports[before:] if isinstance(report, m.RoomReady)], "an ended room is revived"


@pytest.mark.parametrize(
    "state", ["unknown", "refused beforehand", "accepted", "waiting for input", "offered", "done", "ended"]
)
def test_p_answers_a_cancel_of_d_at_once_when_nothing_of_the_room_is_under_way(state: str):
    it = P()
    P_STATES[state](it)
    it.from_peer(m.CancelRoom(ROOM, "test"))
    assert it.said[-1] == (it.links[0], m.Drained(ROOM))
    assert not it.session.counters()["rooms"]


class D(Side):
    """Two stages; field 4 of each is paged."""

    effect = m.Receive

    def __init__(self) -> None:
        super().__init__()
        self.session = SinkSession(record("decode"), LIMITS)
        self.stages = (record("prefill", 0), record("prefill", 1))
        self.lives = 0
        self.link_up()

    def link_up(self, life: int = 0) -> None:
        if not self.links:
            self.lives += 1
            self.links = [m.Link(10 * self.lives + stage) for stage in range(2)]
            self.do(m.Paired(tuple(self.links), tuple(replace(it, engine_epoch=11 + life) for it in self.stages)))

    def lose(self, link: m.Link, gone: bool = False) -> None:
        if link in self.links:
            self.links = []
            self.do(m.LinkLost(link, "test", gone))

    def lose_first(self, gone: bool = False) -> None:
        if self.links:
            self.lose(self.links[0], gone)

    def expect(self) -> None:
        self.do(MANIFEST)

    def accept(self, stages: int = 2) -> None:
        for stage in range(stages):
            self.from_peer(m.OfferReply(ROOM, 1), stage)

    def announce(self, stage: int = 0, positions: int = 3) -> None:
        payload = self.stages[stage].fields[4].payload
        for n in range(positions):
            self.from_peer(m.FrameBatch(ROOM, 1, (m.Frame(n, payload, (m.Extent((4,), n, 1),)),)), stage)

    def rest_of(self, stage: int) -> None:
        """Its state and, on the last stage, the first token."""
        slots = (m.Extent(tuple(range(4)), 0, 1),)
        length = sum(field.payload for field in self.stages[stage].fields[:4])
        self.from_peer(m.FrameBatch(ROOM, 1, (m.Frame(3, length, slots),)), stage)
        done = m.StageDone(ROOM, 1, stage, self.stages[stage].expected_bytes(3), 4, 5, HANDOFF if stage else None)
        self.from_peer(done, stage)
        self.finish()

    def whole(self, stage: int) -> None:
        self.announce(stage)
        self.finish()
        self.rest_of(stage)

    def wind_down(self) -> None:
        self.do(m.CancelRoom(ROOM, "the end"))
        for stage in range(2):
            self.from_peer(m.Drained(ROOM), stage)
        self.finish()


def _receiving(it: D) -> None:
    it.expect()
    it.accept()
    it.announce()


D_STATES: dict[str, Callable[[D], Any]] = {
    "unknown": lambda it: None,
    "refused beforehand": lambda it: it.do(m.CancelRoom(ROOM, "early")),
    "expected": lambda it: it.expect(),
    "half accepted": lambda it: (it.expect(), it.accept(1)),
    "accepted": lambda it: (it.expect(), it.accept()),
    "receiving": _receiving,
    "one stage complete": lambda it: (it.expect(), it.accept(), it.whole(0)),
    "all but the token": lambda it: (it.expect(), it.accept(), it.whole(0), it.announce(1), it.finish()),
    "installed": lambda it: (it.expect(), it.accept(), it.whole(0), it.whole(1)),
    "cancelled, P not heard": lambda it: (it.expect(), it.accept(), it.do(m.CancelRoom(ROOM, "x"))),
    "cancelled while receiving": lambda it: (_receiving(it), it.do(m.CancelRoom(ROOM, "x"))),
    "cancelled by P while receiving": lambda it: (_receiving(it), it.from_peer(m.CancelRoom(ROOM, "x"))),
    "without a link": lambda it: (it.expect(), it.accept(), it.lose_first()),
    "without a link, receiving": lambda it: (_receiving(it), it.lose_first()),
    "without a link, some of it received": lambda it: (_receiving(it), it.stop_running(), it.lose_first()),
    "without a link, one stage complete": lambda it: (it.expect(), it.accept(), it.whole(0), it.lose_first()),
    "expected without a link": lambda it: (it.lose_first(), it.expect()),
    "ended": lambda it: (it.expect(), it.accept(), it.do(m.CancelRoom(ROOM, "x")), it.wind_down()),
}  # fmt: skip

D_EVENTS: dict[str, Callable[[D], Any]] = {
    "cancel by the scheduler": lambda it: it.do(m.CancelRoom(ROOM, "test")),
    "cancel by the stage that sends": lambda it: it.from_peer(m.CancelRoom(ROOM, "test", FAILURE)),
    "cancel by another stage": lambda it: it.from_peer(m.CancelRoom(ROOM, "test", FAILURE), 1),
    "P has drained": lambda it: it.from_peer(m.Drained(ROOM)),
    "link lost": lambda it: it.lose_first(),
    "P is gone": lambda it: it.lose_first(gone=True),
    "P cannot be linked again": lambda it: (it.lose_first(), it.do(m.PeerGone("test"))),
    "linked again": lambda it: (it.lose_first(), it.link_up()),
    "linked to another life": lambda it: (it.lose_first(), it.link_up(life=1)),
    "time": lambda it: it.deadline(),
    "time, twice": lambda it: (it.deadline(), it.deadline()),
    "expected again": lambda it: it.expect(),
    "expected otherwise": lambda it: it.do(replace(MANIFEST, prompt_hash=b"x")),
    "accepted": lambda it: it.accept(),
    "refused": lambda it: it.from_peer(m.OfferReply(ROOM, 1, FAILURE), 1),
    "frames": lambda it: it.announce(),
    "a frame of nothing": lambda it: it.from_peer(m.FrameBatch(ROOM, 1, (m.Frame(9, 5, ()),))),
    "frames of another attempt": lambda it: it.from_peer(m.FrameBatch(ROOM, 2, ())),
    "a wrong end": lambda it: it.from_peer(m.StageDone(ROOM, 1, 0, 1, 1, 5, None)),
    "an end of another generation": lambda it: it.from_peer(m.StageDone(ROOM, 1, 0, 1, 1, 4, None)),
    "receives end": lambda it: it.stop_running(),
    "receives fail": lambda it: it.stop_running(error="no"),
    "receives find the peer dead": lambda it: it.stop_running(error="no", peer_gone=True),
    "checksums are wrong": lambda it: it.stop_running(intact=False),
}


@pytest.mark.parametrize("event", D_EVENTS)
@pytest.mark.parametrize("state", D_STATES)
def test_whatever_meets_a_room_of_d_it_ends_and_leaves_nothing(state: str, event: str):
    it = D()
    D_STATES[state](it)
    D_EVENTS[event](it)
    D_EVENTS[event](it)  # nothing changes by hearing it again
    it.wind_down()
    assert it.over, "the scheduler waits for ever"
    assert not {key: value for key, value in it.session.counters().items() if value and key != "links"}
    before = len(it.reports)
    it.expect()
    it.accept()
    it.announce()
    assert not it.running and not it.reports[before:], "an ended room is revived"


@pytest.mark.parametrize(
    "state", ["unknown", "refused beforehand", "expected", "accepted", "all but the token", "installed", "ended"]
)
def test_d_answers_a_cancel_of_p_at_once_when_nothing_of_the_room_is_under_way(state: str):
    it = D()
    D_STATES[state](it)
    it.from_peer(m.CancelRoom(ROOM, "test"), 1)
    assert it.said[-1] == (it.links[1], m.Drained(ROOM))


@pytest.mark.parametrize(
    "state", [state for state in D_STATES if state not in ("unknown", "refused beforehand", "installed", "ended")]
)
def test_a_room_that_was_stopped_is_never_ready(state: str):
    """Whatever P still sends for it."""
    it = D()
    D_STATES[state](it)
    it.do(m.CancelRoom(ROOM, "test"))
    it.link_up()
    for stage in range(2):
        it.whole(stage)
    assert not [report for report in it.reports if isinstance(report, m.RankReady)]
