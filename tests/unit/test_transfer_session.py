"""Each side's session by itself: what it refuses and with which code, what ends by time, and what it drops."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.barriers import ChunkStarted, FieldsReady, ForgetLocal, Handoff, HandoffReady, LocalRow
from services.contracts.events import DeadlinePassed
from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS
from services.kvtransfer import messages as m
from services.kvtransfer.pieces import Piece, Units
from services.kvtransfer.session import Limits, Session, Tombstones
from services.kvtransfer.sink import SinkSession
from services.kvtransfer.source import SourceSession
from tests.lib.transfer import manifest, record

LIMITS = Limits(frame_bytes=80 << 10, frames=4, window=2)
ROOM = 7
LINKS = (m.Link(1), m.Link(2))


def reports(effects: list[Any]) -> list[Any]:
    return [effect.report for effect in effects if isinstance(effect, m.ToScheduler)]


def said(effects: list[Any], link: int) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, m.ToPeer) and effect.link == link]


def code(effects: list[Any]) -> str:
    """Of the room that has just failed."""
    return next(report.failure.detail for report in reports(effects) if isinstance(report, m.RoomFailed))


def pass_deadline(session: Session) -> tuple[float, list[Any]]:
    at = session.next_deadline()
    assert at is not None
    return at, session.apply(DeadlinePassed(), at)


# ---- D
class Receiving:
    """A decode session whose room both stages have accepted. Stage 0 owns layers 0 to 2, its field 4 is `t.2.mla`."""

    def __init__(self, **changes: Any):
        self.session = SinkSession(record("decode"), LIMITS)
        self.stages = (record("prefill", 0), record("prefill", 1))
        self.session.apply(m.Paired(LINKS, self.stages), 0)
        self.manifest = manifest(ROOM, **changes)
        self.offers = self.session.apply(self.manifest, 0)
        for link in LINKS:
            self.hear(link, m.OfferReply(ROOM, 1))

    def hear(self, link: int, message: Any, now: float = 1.0) -> list[Any]:
        effects = self.session.apply(m.FromPeer(m.Link(link), message), now)
        self.session.check()
        return effects

    def frame(self, seq: int, *extents: tuple[int, int, int], stage: int = 0, **changes: Any) -> m.FrameBatch:
        parts = tuple(m.Extent((field,), first, count) for field, first, count in extents)
        length = sum(self.stages[stage].fields[min(it.fields[0], 4)].payload * it.count for it in parts)
        return m.FrameBatch(ROOM, 1, (replace(m.Frame(seq, length, parts), **changes),))

    def install(self, effects: list[Any]) -> list[Any]:
        """Carry every granted frame through to the pools."""
        out: list[Any] = []
        for receive in [effect for effect in effects if isinstance(effect, m.Receive)]:
            out += self.session.apply(m.Received(receive.frame), 2)
        return out

    def whole_stage(self, link: int, stage: int | None = None) -> tuple[list[Any], m.StageDone]:
        """All of a stage's frames, installed, and the end that belongs to them."""
        stage = link - 1 if stage is None else stage
        out: list[Any] = []
        extents = [(n, 3 if field.kind == "paged" else 1) for n, field in enumerate(self.stages[stage].fields)]
        seq = 0
        for field, count in extents:
            for first in range(count):
                out += self.install(self.hear(link, self.frame(seq, (field, first, 1), stage=stage)))
                seq += 1
        handoff = Handoff(3, (3,), 0) if stage else None
        return out, m.StageDone(ROOM, 1, stage, self.stages[stage].expected_bytes(3), seq, 5, handoff)


def test_a_room_is_ready_only_when_every_stage_has_brought_every_unit_and_the_first_token():
    it = Receiving()
    effects: list[Any] = []
    for link in LINKS:
        out, done = it.whole_stage(link)
        assert not reports(effects) and not reports(out)
        effects = it.hear(link, done)
        assert said(effects, link) == [m.StageAck(ROOM, 1)]
    ready = reports(effects)[0]
    expected = sum(stage.expected_bytes(3) for stage in it.stages)
    assert (ready.token, ready.window, ready.bytes, ready.first_byte, ready.last_byte) == (3, (3,), expected, 1, 2)
    assert it.session.counters() == {"rooms": 0, "pins": 0, "staging_frames_used": 0, "quarantined": 0, "links": 2}


def test_the_end_may_come_before_the_last_frames_are_installed():
    it = Receiving()
    granted: list[Any] = []
    fields = it.stages[0].fields
    seq = 0
    for field, place in enumerate(fields):
        for first in range(3 if place.kind == "paged" else 1):
            granted += it.hear(1, it.frame(seq, (field, first, 1)))
            seq += 1
    effects = it.hear(1, m.StageDone(ROOM, 1, 0, it.stages[0].expected_bytes(3), seq, 5, None))
    while receives := [effect for effect in granted if isinstance(effect, m.Receive)]:
        assert not said(effects, 1)
        effects = it.session.apply(m.Received(receives[0].frame), 2)
        granted = [*receives[1:], *effects]
        effects = [effect for effect in effects if isinstance(effect, m.ToPeer) and isinstance(effect.message, m.StageAck)]
    assert said(effects, 1) == [m.StageAck(ROOM, 1)]


def test_frames_of_a_stage_may_come_before_another_stage_s_answer_but_not_before_its_own():
    it = Receiving()
    it.session.apply(manifest(8, blocks=(10, 11, 12), slot=3), 0)
    it.hear(1, m.OfferReply(8, 1))
    effects = it.hear(1, replace(it.frame(0, (4, 0, 1)), room=8))
    assert m.Grant(8, (0,)) in said(effects, 1)
    effects = it.hear(2, replace(it.frame(0, (4, 0, 1), stage=1), room=8))
    assert code(effects) == "PD_BYTES"


def test_grants_are_bounded_by_the_window_and_go_on_as_frames_come_back():
    it = Receiving()
    effects: list[Any] = []
    for seq in range(3):
        effects += it.hear(1, it.frame(seq, (4, seq, 1)))
    receives = [effect for effect in effects if isinstance(effect, m.Receive)]
    assert [receive.seq for receive in receives] == [0, 1], "a window of two"
    assert said(it.session.apply(m.Received(receives[0].frame), 2), 1) == [m.Grant(ROOM, (2,))]


@pytest.mark.parametrize(
    ("make", "detail"),
    [
        (lambda it: it.frame(0, (9, 0, 1)), "PD_BYTES"),  # no such field
        (lambda it: it.frame(0, (4, 2, 2)), "PD_BYTES"),  # a position behind the manifest
        (lambda it: it.frame(0, (0, 0, 2)), "PD_BYTES"),  # two slots
        (lambda it: it.frame(0, (4, 0, 1), (4, 0, 1)), "PD_BYTES"),  # a unit twice
        (lambda it: it.frame(0, (4, 0, 0)), "PD_BYTES"),  # nothing
        (lambda it: it.frame(0, (4, 0, 1), length=5), "PD_BYTES"),  # a length that is not the units'
        (lambda it: it.frame(0, (4, 0, 3)), "PD_BYTES"),  # larger than a frame
        (lambda it: m.StageDone(ROOM, 1, 1, 0, 0, 5, None), "PD_ROUTE"),  # another stage's end
        (lambda it: m.StageDone(ROOM, 1, 0, 0, 0, 4, None), "PD_STALE"),  # an older generation of the slot
        (lambda it: m.StageDone(ROOM, 1, 0, 0, 0, 5, None), "PD_BYTES"),  # nothing was sent
        (lambda it: m.OfferReply(ROOM, 1, m.Failure("transfer_failed", "no", "PD_MANIFEST")), "PD_MANIFEST"),
        (lambda it: m.CancelRoom(ROOM, "why", m.Failure("engine_lost", "gone", "PD_PEER_DEAD")), "PD_PEER_DEAD"),
    ],
)
def test_a_message_against_the_contract_fails_the_room_on_both_sides(make: Any, detail: str):
    it = Receiving()
    message = make(it)
    effects = it.hear(1, message)
    assert code(effects) == detail
    assert isinstance(said(effects, 2)[0], m.CancelRoom), "the other stage is told"
    assert isinstance(said(effects, 1)[0], m.Drained if isinstance(message, m.CancelRoom) else m.CancelRoom)
    assert not [effect for effect in effects if isinstance(effect, m.Receive)]


@pytest.mark.parametrize("handoff", [None, Handoff(3, (), 0), Handoff(3, (4,), 0), Handoff(3, (3, 4), 0)])
def test_a_last_stage_without_the_right_window_fails_the_room(handoff: Handoff | None):
    it = Receiving()
    _, done = it.whole_stage(2)
    assert code(it.hear(2, replace(done, handoff=handoff))) == "PD_CAND"


def test_a_first_token_from_another_stage_fails_the_room():
    it = Receiving()
    _, done = it.whole_stage(1)
    assert code(it.hear(1, replace(done, handoff=Handoff(3, (3,), 0)))) == "PD_CAND"


def test_a_second_end_of_a_stage_is_dropped_if_it_is_the_same_and_fails_the_room_if_not():
    it = Receiving()
    _, done = it.whole_stage(1)
    it.hear(1, done)
    assert not reports(it.hear(1, done))
    assert it.session.totals["stale_messages"] == 1
    assert code(it.hear(1, replace(done, bytes=1))) == "PD_ROUTE"


def test_a_damaged_frame_fails_its_room():
    it = Receiving()
    (receive,) = [effect for effect in it.hear(1, it.frame(0, (4, 0, 1))) if isinstance(effect, m.Receive)]
    assert receive == m.Receive(receive.frame, LINKS[0], 0, (Piece((Units((4,), (3,)),), 36 << 10),))
    effects = it.session.apply(m.Received(receive.frame, intact=False), 2)
    assert code(effects) == "PD_BYTES" and not it.session.totals["rooms_ok"]


def test_a_stopped_room_is_drained_when_frames_and_peers_are():
    it = Receiving()
    (receive,) = [effect for effect in it.hear(1, it.frame(0, (4, 0, 1))) if isinstance(effect, m.Receive)]
    it.session.apply(m.CancelRoom(ROOM, "test"), 2)
    assert it.session.counters()["quarantined"] == 1
    assert not reports(it.hear(2, m.Drained(ROOM)))
    assert not reports(it.hear(1, m.Drained(ROOM)))
    effects = it.session.apply(m.Received(receive.frame), 3)
    assert effects == [m.ToScheduler(m.Drained(ROOM))]


def test_what_comes_for_an_ended_room_is_dropped_and_counted():
    it = Receiving()
    it.session.apply(m.CancelRoom(ROOM, "test"), 2)
    for link in LINKS:
        it.hear(link, m.Drained(ROOM))
    late = (it.frame(0, (4, 0, 1)), m.StageDone(ROOM, 1, 0, 0, 0, 5, None), m.OfferReply(ROOM, 1))
    for number, message in enumerate(late, start=1):
        assert it.hear(1, message) == []
        assert it.session.totals["stale_messages"] == number
    assert it.session.apply(it.manifest, 3) == [], "nor can it be expected again"
    assert it.session.apply(m.CancelRoom(ROOM, "again"), 3) == [m.ToScheduler(m.Drained(ROOM))]
    assert it.hear(1, m.CancelRoom(ROOM, "late")) == [m.ToPeer(LINKS[0], m.Drained(ROOM))]


def test_messages_of_another_attempt_or_an_older_link_are_dropped():
    it = Receiving()
    assert it.hear(1, replace(it.frame(0, (4, 0, 1)), attempt=2)) == []
    assert it.hear(9, it.frame(0, (4, 0, 1))) == []
    assert it.session.totals["stale_messages"] == 2


def test_without_a_pairing_or_with_a_wrong_manifest_an_expected_room_fails_at_once():
    session = SinkSession(record("decode"), LIMITS)
    effects = session.apply(manifest(ROOM), 0)
    assert code(effects) == "PD_PEER_DEAD" and reports(effects)[1] == m.Drained(ROOM)
    assert code(session.apply(manifest(8, slot=77), 0)) == "PD_MANIFEST"
    assert code(session.apply(manifest(9, decode_epoch=1), 0)) == "PD_STALE"


def test_a_peer_that_is_gone_fails_every_room_and_frames_come_back_as_their_receives_end():
    it = Receiving()
    (receive,) = [effect for effect in it.hear(1, it.frame(0, (4, 0, 1))) if isinstance(effect, m.Receive)]
    effects = it.session.apply(m.LinkLost(LINKS[1], "2 heartbeats missed", gone=True), 2)
    assert code(effects) == "PD_PEER_DEAD" and m.Drained(ROOM) not in reports(effects)
    assert "prefill-0 rank 1 is lost: 2 heartbeats missed" in reports(effects)[0].failure.message
    assert reports(it.session.apply(m.Received(receive.frame, error="reset"), 2)) == [m.Drained(ROOM)]
    assert not any(it.session.counters().values())


def test_a_lost_link_fails_nothing_and_the_next_one_is_offered_what_was_not_acknowledged():
    """Stage 0 was acknowledged, a frame of stage 1 was under way: only stage 1 sends again, and all of it."""
    it = Receiving()
    _, done = it.whole_stage(1)
    it.hear(1, done)
    (receive,) = [effect for effect in it.hear(2, it.frame(0, (4, 0, 1), stage=1)) if isinstance(effect, m.Receive)]
    assert not it.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    assert it.session.counters()["quarantined"] == 1
    again = (m.Link(3), m.Link(4))
    offers = it.session.apply(m.Paired(again, it.stages), 3)
    assert offers == [m.ToPeer(again[1], m.Offer(it.manifest))]
    assert it.session.apply(m.Received(receive.frame), 3) == [], "of the old link: thrown away, whatever it holds"
    it.hear(4, m.OfferReply(ROOM, 1))
    assert said(it.hear(3, done), 3) == [m.StageAck(ROOM, 1)], "asked about again: it was acknowledged"
    _, done = it.whole_stage(4, stage=1)
    assert isinstance(reports(it.hear(4, done))[0], m.RankReady)
    assert said(it.hear(4, done), 4) == [m.StageAck(ROOM, 1)], "nor does the end of the room make it forget"


@pytest.mark.parametrize("how", ["restarted", "not linked again", "time"])
def test_rooms_whose_link_does_not_come_back_fail_naming_the_peer(how: str):
    it = Receiving()
    it.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    if how == "restarted":
        effects = it.session.apply(m.Paired((m.Link(3), m.Link(4)), tuple(replace(s, engine_epoch=5) for s in it.stages)), 3)
    elif how == "not linked again":
        effects = it.session.apply(m.PeerGone("connection refused"), 3)
    else:
        at, effects = pass_deadline(it.session)
        assert at == 2 + LIMITS.resume
    assert code(effects) == "PD_PEER_DEAD" and "prefill-0 rank 0 is lost: reset" in reports(effects)[0].failure.message
    assert reports(effects)[1] == m.Drained(ROOM)


def test_a_room_that_is_expected_while_the_link_is_away_waits_for_it():
    it = Receiving()
    it.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    late = manifest(8, blocks=(10, 11, 12), slot=3)
    assert it.session.apply(late, 3) == []
    offers = it.session.apply(m.Paired((m.Link(3), m.Link(4)), it.stages), 4)
    assert m.ToPeer(m.Link(3), m.Offer(late)) in offers and m.ToPeer(m.Link(4), m.Offer(late)) in offers


def test_a_manifest_of_an_older_generation_or_of_units_that_are_another_room_s_is_refused():
    it = Receiving()
    other = manifest(8, blocks=(10, 11, 3), block_gens=(1, 1, 2), slot=3)
    effects = it.session.apply(other, 2)
    assert code(effects) == "PD_MANIFEST" and "block 3 is still room 7's" in reports(effects)[0].failure.message
    it.session.apply(m.CancelRoom(ROOM, "test"), 2)
    for link in LINKS:
        it.hear(link, m.Drained(ROOM))
    late = it.session.apply(manifest(9, slot_gen=4), 3)
    assert code(late) == "PD_STALE" and "slot 2 is in generation 5" in reports(late)[0].failure.message
    assert not reports(it.session.apply(manifest(10, slot_gen=6), 3))


def test_a_room_expected_twice_with_different_manifests_fails_and_with_the_same_does_not():
    it = Receiving()
    assert it.session.apply(it.manifest, 2) == []
    assert code(it.session.apply(replace(it.manifest, prompt_hash=b"other"), 2)) == "PD_MANIFEST"


def test_times_of_d():
    it = Receiving()
    session = SinkSession(record("decode"), LIMITS)
    session.apply(m.Paired(LINKS, it.stages), 0)
    session.apply(manifest(8, timeout=500.0), 0)
    at, effects = pass_deadline(session)
    assert (at, code(effects)) == (120.0, "PD_TIMEOUT_BOOT")
    it.hear(1, it.frame(0, (4, 0, 1)), now=5.0)
    at, effects = pass_deadline(it.session)
    assert (at, code(effects)) == (35.0, "PD_TIMEOUT_WAIT"), "a granted frame that does not come"
    at, effects = pass_deadline(it.session)
    assert at == 45.0 and isinstance(effects[0], m.CloseLink), "and a room that does not drain"
    assert it.session.next_deadline() is None
    other = Receiving()
    at, effects = pass_deadline(other.session)
    assert (at, code(effects)) == (60.0, "PD_TIMEOUT_WAIT"), "the request's own time"


# ---- P
class Sending:
    """A last stage that has accepted a room of 300 tokens. Its fields: rec and conv of layers 3 and 4, mla of layer 5."""

    def __init__(self, **changes: Any):
        self.session = SourceSession(record("prefill", 1), LIMITS)
        self.session.apply(m.LinkUp(LINKS[0], record("decode")), 0)
        self.offer = m.Offer(manifest(ROOM, **changes))
        self.answers = self.hear(self.offer)
        self.steps = len(self.session.placement.producer_steps)

    def hear(self, message: Any, now: float = 1.0) -> list[Any]:
        effects = self.session.apply(m.FromPeer(LINKS[0], message), now)
        self.session.check()
        return effects

    def chunk(self, start: int, end: int, blocks: tuple[int, ...], last: bool = False, step: int = 1) -> list[m.Frame]:
        """All barriers of one chunk -> the frames that are offered by them."""
        row = LocalRow(ROOM, start, end, last, 4, blocks)
        effects = self.session.apply(ChunkStarted(step, (row,)), 1)
        for lo in range(self.steps):
            effects += self.session.apply(FieldsReady(step, lo, lo + 1), 1)
        self.session.check()
        return offered(effects)

    def units(self, frames: list[m.Frame]) -> list[tuple[int, int]]:
        """Field and number of every unit that a grant of these frames sends."""
        sends = self.hear(m.Grant(ROOM, tuple(frame.seq for frame in frames)))
        return units_of(sends)


def offered(effects: list[Any], link: int = 1) -> list[m.Frame]:
    return [frame for message in said(effects, link) if isinstance(message, m.FrameBatch) for frame in message.frames]


def units_of(sends: list[Any]) -> list[tuple[int, int]]:
    return [
        (field, number)
        for send in sends
        for piece in send.pieces
        for units in piece.units
        for field in units.fields
        for number in units.ids
    ]


def test_an_accepted_offer_is_answered_to_d_and_told_to_the_scheduler():
    it = Sending()
    assert it.answers == [
        m.ToPeer(LINKS[0], m.OfferReply(ROOM, 1)),
        m.ToScheduler(m.RoomReady(ROOM, 1, 300)),
    ]
    again = said(it.hear(it.offer), 1)[0]
    assert again.failure.detail == "PD_MANIFEST" and it.session.counters()["rooms"] == 1


def test_an_offer_of_a_room_that_the_scheduler_has_cancelled_is_refused():
    session = SourceSession(record("prefill", 1), LIMITS)
    session.apply(m.LinkUp(LINKS[0], record("decode")), 0)
    assert reports(session.apply(m.CancelRoom(ROOM, "early"), 0)) == [m.Drained(ROOM)]
    (answer,) = session.apply(m.FromPeer(LINKS[0], m.Offer(manifest(ROOM))), 0)
    assert answer.message.failure.code == "cancelled"


def test_an_offer_longer_than_p_s_pool_is_refused():
    session = SourceSession(record("prefill", 1, num_blocks=3), LIMITS)
    session.apply(m.LinkUp(LINKS[0], record("decode")), 0)
    (answer,) = session.apply(m.FromPeer(LINKS[0], m.Offer(manifest(ROOM))), 0)
    assert answer.message.failure.detail == "PD_MANIFEST" and "3 blocks" in answer.message.failure.message


def test_state_is_offered_after_the_last_chunk_only_and_a_partial_block_waits_for_it():
    it = Sending()
    assert it.units(it.chunk(0, 200, (10, 11))) == [(4, 10)]
    late = it.chunk(200, 300, (12,), last=True, step=2)
    assert sorted(it.units(late)) == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 11), (4, 12)]


def test_a_prefix_that_d_has_is_not_sent_and_what_p_had_cached_is():
    it = Sending(prefix=128)
    units = it.units(it.chunk(256, 300, (20, 21, 22), last=True))  # 256 tokens were in P's prefix cache
    assert sorted(number for field, number in units if field == 4) == [21, 22]


def test_a_frame_holds_whole_units_of_one_room_up_to_its_size_and_frames_are_numbered_by_their_pieces():
    it = Sending()
    it.session.limits = replace(LIMITS, piece_bytes=40 << 10)  # a block of 36 KiB, or some slots
    it.session.apply(ChunkStarted(1, (LocalRow(ROOM, 0, 300, True, 4, (10, 11, 12)),)), 1)
    frames = offered(it.session.apply(FieldsReady(1, 0, it.steps), 1))
    assert all(frame.length <= LIMITS.frame_bytes for frame in frames) and len(frames) == 2
    sends = it.hear(m.Grant(ROOM, tuple(frame.seq for frame in frames)))
    assert [send.seq for send in sends] == [0, len(sends[0].pieces)], "the second follows the pieces of the first"
    assert len(sends[0].pieces) > 1 and all(piece.length <= 40 << 10 for send in sends for piece in send.pieces)
    assert it.session.counters()["frames_offered"] == 2


@given(st.data(), st.integers(1, 8 * BLOCK_TOKENS), st.integers(0, 9), st.sampled_from([0, 2]))
def test_any_interval_offers_every_unit_once_behind_its_own_barrier(data: Any, prompt: int, interval: int, draft_layers: int):
    """Whatever the chunks, D's prefix and what P had cached: blocks when they are full, or at the end of the prompt; state with
    the last chunk alone; the drafter's rows behind everything else of a chunk."""
    place = record("prefill", 1, draft_layers=draft_layers)
    session = SourceSession(place, replace(LIMITS, frames=999, window=999))
    session.apply(m.LinkUp(LINKS[0], record("decode")), 0)
    prefix, cached = (data.draw(st.integers(0, blocks_for(prompt) - 1)) * BLOCK_TOKENS for _ in range(2))
    wanted = manifest(ROOM, prompt, prefix)
    session.apply(m.FromPeer(LINKS[0], m.Offer(wanted)), 0)
    count, start, known, seen = len(place.producer_steps), cached, 0, Counter[tuple[int, int]]()
    for step, end in enumerate(sorted(data.draw(st.sets(st.integers(cached + 1, prompt), max_size=4)) | {prompt})):
        last, blocks = end == prompt, tuple(range(10 + known, 10 + blocks_for(end)))
        known = blocks_for(end)
        session.apply(ChunkStarted(step, (LocalRow(ROOM, start, end, last, 4, blocks),)), 1)
        for lo in range(0, count, interval or count):
            hi = min(lo + (interval or count), count)
            passed = {index for fields in place.producer_steps[lo:hi] for index in fields}
            for frame in offered(session.apply(FieldsReady(step, lo, hi), 1)):
                for field, unit in units_of(session.apply(m.FromPeer(LINKS[0], m.Grant(ROOM, (frame.seq,))), 1)):
                    full = place.fields[field].kind == "paged" and (unit - 10 + 1) * BLOCK_TOKENS <= end
                    assert field in passed and (last or full)
                    seen[field, unit] += 1
        start = end
    first = prefix // BLOCK_TOKENS
    blocks, slot = range(10 + first, 10 + blocks_for(prompt)), [4]
    expected = [(n, u) for n, it in enumerate(place.fields) for u in (blocks if it.kind == "paged" else slot)]
    assert seen == Counter(expected)
    assert all(place.fields[index].layer >= place.layer_hi for index in place.producer_steps[-1]) is (draft_layers > 0)


def complete(it: Sending) -> list[Any]:
    """Everything is written, granted and sent -> what was said after the handoff."""
    for frame in it.chunk(0, 300, (10, 11, 12), last=True):
        (send,) = it.hear(m.Grant(ROOM, (frame.seq,)))
        it.session.apply(m.Sent(send.link, send.seq), 1)
    return it.session.apply(HandoffReady(ROOM, Handoff(3, (3,), 128)), 1)


def test_the_end_of_the_last_stage_waits_for_the_first_token_and_release_for_the_acknowledgement():
    it = Sending()
    (done,) = said(complete(it), 1)
    assert done.handoff == Handoff(3, (3,), 128) and done.bytes == it.session.placement.expected_bytes(3) and done.slot_gen == 5
    assert it.hear(m.StageAck(ROOM, 2)) == [], "another attempt's"
    assert reports(it.hear(m.StageAck(ROOM, 1))) == [m.SourceReleased(ROOM, done.bytes)]
    assert it.hear(m.StageAck(ROOM, 1)) == [] and it.session.totals["stale_messages"] == 2
    assert reports(it.session.apply(m.CancelRoom(ROOM, "late"), 2)) == [m.Drained(ROOM)]


def test_an_early_acknowledgement_releases_nothing():
    it = Sending()
    assert it.hear(m.StageAck(ROOM, 1)) == [] and it.session.counters()["pins"] == 1


def test_barriers_that_do_not_cover_the_stage_fail_the_room():
    it = Sending()
    row = LocalRow(ROOM, 0, 300, True, 4, (10, 11, 12))
    it.session.apply(ChunkStarted(1, (row,)), 1)
    effects = it.session.apply(FieldsReady(1, 1, it.steps), 1)
    assert code(effects) == "PD_BYTES"


def test_p_keeps_what_it_has_offered_until_d_will_grant_no_more_and_honours_a_grant_that_crosses_its_cancel():
    it = Sending()
    first, *_ = it.chunk(0, 256, (10, 11))
    it.chunk(256, 300, (12,), last=True, step=2)
    effects = it.session.apply(m.CancelRoom(ROOM, "test"), 2)
    assert isinstance(said(effects, 1)[0], m.CancelRoom) and not reports(effects)
    (send,) = it.hear(m.Grant(ROOM, (first.seq,)))
    assert (send.link, send.seq, units_of([send])) == (LINKS[0], first.seq, [(4, 10), (4, 11)])
    assert not reports(it.hear(m.Drained(ROOM))), "one frame is still being sent"
    assert it.session.counters()["frames_offered"] == 1
    assert reports(it.session.apply(m.Sent(send.link, send.seq), 3)) == [m.Drained(ROOM)]
    assert it.session.counters() == {
        "rooms": 0, "pins": 0, "frames_offered": 0, "quarantined": 0, "steps": 0, "links": 1,
    }  # fmt: skip


def test_a_cancel_from_d_is_answered_when_what_is_being_sent_is_out():
    it = Sending()
    (frame,) = it.chunk(0, 128, (10,))
    (send,) = it.hear(m.Grant(ROOM, (frame.seq,)))
    effects = it.hear(m.CancelRoom(ROOM, "test"))
    assert code(effects) == "" and not said(effects, 1)
    effects = it.session.apply(m.Sent(send.link, send.seq), 2)
    assert effects == [m.ToPeer(LINKS[0], m.Drained(ROOM)), m.ToScheduler(m.Drained(ROOM))]
    assert it.hear(m.CancelRoom(99, "unknown")) == [m.ToPeer(LINKS[0], m.Drained(99))]


def test_a_frame_that_is_granted_twice_is_sent_once():
    it = Sending()
    (frame,) = it.chunk(0, 128, (10,))
    assert len(it.hear(m.Grant(ROOM, (frame.seq, frame.seq)))) == 1 and it.session.totals["stale_messages"] == 1


def test_rows_of_a_stopped_room_go_by_and_cost_nothing():
    it = Sending()
    it.hear(m.CancelRoom(ROOM, "test"))
    assert it.chunk(0, 300, (10, 11, 12), last=True) == []
    assert it.session.apply(HandoffReady(ROOM, Handoff(3, (3,), 0)), 2) == []
    it.session.apply(ForgetLocal((ROOM,)), 2)
    assert not any(value for key, value in it.session.counters().items() if key != "links")


def resend(it: Sending, link: m.Link) -> list[tuple[int, int]]:
    """The units that P sends over a link that comes in the place of the last one."""
    it.session.apply(m.LinkUp(link, record("decode")), 3)
    effects = it.session.apply(m.FromPeer(link, it.offer), 3)
    it.session.check()
    assert said(effects, link)[0] == m.OfferReply(ROOM, 1) and not reports(effects), "the scheduler has had its answer"
    seqs = tuple(frame.seq for frame in offered(effects, link))
    return units_of(it.session.apply(m.FromPeer(link, m.Grant(ROOM, seqs)), 3))


@pytest.mark.parametrize("noticed", [True, False])
def test_p_sends_a_room_whole_again_over_the_next_link_even_if_it_has_not_seen_the_end_of_the_last(noticed: bool):
    it = Sending()
    it.chunk(0, 256, (10, 11))
    if noticed:
        assert not it.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    assert resend(it, m.Link(2)) == [(4, 10), (4, 11)]
    assert it.session.apply(m.FromPeer(LINKS[0], m.Grant(ROOM, (0,))), 3) == [], "of the old link"
    assert it.session.totals["stale_messages"] == 1


def test_frames_under_way_when_a_link_is_lost_come_back_and_count_for_nothing():
    it = Sending()
    sent, _ = *it.chunk(0, 128, (10,)), *it.chunk(128, 256, (11,), step=2)
    (send,) = it.hear(m.Grant(ROOM, (sent.seq,)))
    assert it.session.counters()["frames_offered"] == 2
    it.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    assert it.session.counters()["frames_offered"] == 1, "nobody asks for the other any more"
    assert it.session.apply(m.Sent(send.link, send.seq, "reset", peer_gone=True), 2) == []
    assert it.session.counters()["frames_offered"] == 0 and it.session.counters()["rooms"] == 1


def test_an_acknowledgement_that_was_lost_with_its_link_is_asked_for_again():
    it = Sending()
    (done,) = said(complete(it), 1)
    it.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    assert said(it.session.apply(m.LinkUp(m.Link(2), record("decode")), 3), 2) == [done]
    assert reports(it.session.apply(m.FromPeer(m.Link(2), m.StageAck(ROOM, 1)), 3)) == [m.SourceReleased(ROOM, done.bytes)]


def test_barriers_that_pass_while_there_is_no_link_are_sent_over_the_next():
    it = Sending()
    it.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    assert it.chunk(0, 300, (10, 11, 12), last=True) == []
    assert sorted(resend(it, m.Link(2))) == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 10), (4, 11), (4, 12)]


@pytest.mark.parametrize("how", ["gone", "restarted", "time"])
def test_rooms_of_a_decode_agent_that_does_not_come_back_fail_on_p(how: str):
    it = Sending()
    effects = it.session.apply(m.LinkLost(LINKS[0], "reset", gone=how == "gone"), 2)
    if how == "restarted":
        effects = it.session.apply(m.LinkUp(m.Link(2), record("decode", engine_epoch=5)), 3)
    elif how == "time":
        at, effects = pass_deadline(it.session)
        assert at == 2 + LIMITS.resume
    assert code(effects) == "PD_PEER_DEAD" and "decode-0 rank 0" in reports(effects)[0].failure.message
    assert reports(effects)[1] == m.Drained(ROOM)


def test_a_cancel_while_there_is_no_link_ends_the_room_on_either_side():
    p, d = Sending(), Receiving()
    p.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    d.session.apply(m.LinkLost(LINKS[0], "reset"), 2)
    for session in (p.session, d.session):
        assert reports(session.apply(m.CancelRoom(ROOM, "test"), 2)) == [m.Drained(ROOM)]
    answer = p.session.apply(m.LinkUp(m.Link(2), record("decode")), 3) + p.session.apply(m.FromPeer(m.Link(2), p.offer), 3)
    assert said(answer, 2)[0].failure.code == "cancelled", "D learns it by its offer"


def test_times_of_p():
    it = Sending()
    at, effects = pass_deadline(it.session)
    assert (at, code(effects)) == (71.0, "PD_TIMEOUT_WAIT"), "accepted at 1 s with 60 s to go: D is the first to give up"
    at, effects = pass_deadline(it.session)
    assert at == 81.0 and isinstance(effects[0], m.CloseLink)
    waiting = Sending(timeout=500.0)
    waiting.chunk(0, 128, (10,))
    at, effects = pass_deadline(waiting.session)
    assert (at, code(effects)) == (31.0, "PD_TIMEOUT_WAIT"), "an offer without an answer"


def test_tombstones_keep_the_rooms_that_ended_last():
    tombs = Tombstones(2)
    for room in (1, 2, 1, 3):
        tombs.add(room)
    assert [room in tombs for room in (1, 2, 3)] == [True, False, True]
