"""Both sides' sessions against each other, over links that deliver in order, with effects that finish in any order.

The world plays schedulers, prefill workers, wire and memory, and checks what no order of events may break: every unit of a
room is written at most once and only while the room is armed, a rank is ready with exactly P's bytes or not at all, every
room ends, and every staging frame comes back.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.contracts.barriers import ChunkStarted, FieldsReady, Handoff, HandoffReady, LocalRow
from services.contracts.events import DeadlinePassed
from services.contracts.geometry import PAGED, blocks_for
from services.contracts.ids import BLOCK_TOKENS
from services.contracts.placement import Manifest
from services.kvtransfer import messages as m
from services.kvtransfer.pieces import Piece
from services.kvtransfer.session import Limits
from services.kvtransfer.sink import SinkSession
from services.kvtransfer.source import SourceSession
from tests.lib.transfer import manifest, record

STAGES = 2
LIMITS = Limits(frame_bytes=80 << 10, frames=3, window=2, piece_bytes=40 << 10)  # two blocks of 36 KiB and some slots
PLACES = [record("prefill", stage) for stage in range(STAGES)]
DECODE = record("decode", num_blocks=4000, num_slots=600)  # no unit is used twice: contents tell where they come from
EFFECTS = (m.Send, m.Receive)
D = STAGES  # index of the decode session


@dataclass
class Job:
    """A request as its schedulers and workers see it."""

    manifest: Manifest
    end: int = 0  # prompt tokens of running and finished chunks
    steps: dict[int, deque[tuple[int, int, int]]] = field(default_factory=dict)  # stage -> barriers to pass: step, lo, hi
    started: bool = False
    handoff: bool = False
    ready: set[int] = field(default_factory=set)
    over: dict[int, str] = field(default_factory=dict)  # session -> how it ended there
    failed: dict[int, str] = field(default_factory=dict)  # session -> why
    disturbed: bool = False  # by anything but the order of events
    cancelled: set[int] = field(default_factory=set)


class Transfers(RuleBasedStateMachine):
    @initialize(calm=st.booleans())
    def start(self, calm: bool) -> None:
        self.calm = calm  # nothing but the order of events varies
        self.now = 0.0
        self.damaged = False
        self.sessions: list[Any] = [SourceSession(place, LIMITS) for place in PLACES]
        self.sessions.append(SinkSession(DECODE, LIMITS))
        self.jobs: dict[int, Job] = {}
        self.links: list[int] = []  # of the live pairing, by stage
        self.lives = 0
        self.step_id = 0
        self.streams: dict[tuple[int, int], deque[Any]] = {}  # (link, receiving session) -> messages under way
        self.effects: list[tuple[int, Any]] = []  # under way: session, effect
        self.wire: dict[tuple[int, int], Any] = {}  # (link, number of the piece) -> what was sent
        self.written: Counter[tuple[int, int, int, int]] = Counter()  # life, room, field, unit
        self.unseen: list[tuple[int, m.LinkLost]] = []  # ends of links that a prefill agent has not noticed yet
        self.pool: dict[tuple[int, int, int], Any] = {}  # D: (room, field, unit) -> content
        self.versions: Counter[tuple[int, int]] = Counter()  # (room, stage): how often P has written the slot
        self.pair()

    # ---- the driver
    def apply(self, who: int, event: Any) -> None:
        for effect in self.sessions[who].apply(event, self.now):
            match effect:
                case m.ToScheduler(report):
                    self.told(who, report)
                case m.ToPeer(link, message):
                    if isinstance(message, m.Drained):
                        assert not self.in_flight(who, message.room, link), "drained, yet its frames are under way"
                    if link in self.links:
                        to = D if who != D else self.links.index(link)
                        self.streams[link, to].append(message)
                case m.CloseLink():
                    self.effects.append((who, effect))
                case _:
                    self.effects.append((who, effect))

    def told(self, who: int, report: Any) -> None:
        job = self.jobs[report.room]
        match report:
            case m.RoomReady():
                job.ready.add(who)
            case m.RoomFailed(failure=failure):
                assert who not in job.over and who not in job.failed, "a room fails once, and before it ends"
                job.failed[who] = failure.message
            case m.Drained():
                assert job.over.get(who) in (None, "drained", "ok") and (who not in job.over or who in job.cancelled)
                assert not self.touching(who, report.room), "drained, yet its memory is in use"
                job.over.setdefault(who, "drained")
            case m.SourceReleased():
                assert who not in job.over and who != D
                job.over[who] = "ok"
            case m.RankReady():
                assert who == D and D not in job.over
                job.over[D] = "ok"
                self.complete(job, report)

    def touching(self, who: int, room: int) -> bool:
        return any(s == who and isinstance(e, EFFECTS) and self.room_of(s, e) == room for s, e in self.effects)

    def in_flight(self, who: int, room: int, link: int) -> bool:
        return any(
            s == who and isinstance(e, EFFECTS) and e.link == link and self.room_of(s, e) == room for s, e in self.effects
        )

    def room_of(self, who: int, effect: Any) -> int:
        frame = effect.frame if isinstance(effect, m.Receive) else (effect.link, effect.seq)
        return self.sessions[who]._frames[frame].room

    def complete(self, job: Job, report: m.RankReady) -> None:
        """Exactly P's bytes, in the manifest's units."""
        wanted = job.manifest
        room = wanted.room
        total = 0
        for index, it in enumerate(self.sessions[D].placement.fields):
            stage = next(s for s, place in enumerate(PLACES) if any(f.field_id == it.field_id for f in place.fields))
            units = enumerate(wanted.blocks) if it.kind == PAGED else [(0, wanted.slot)]
            for position, unit in units:
                version = self.versions[room, stage] if it.kind != PAGED else 0
                assert self.pool[room, index, unit] == (room, it.field_id, position, version), (
                    f"{it.field_id}, position {position}"
                )
                total += it.payload
        assert (report.bytes, report.token, report.window) == (total, room % 1000, (room % 1000,))

    # ---- rules
    @rule(prompt=st.integers(1, 6 * BLOCK_TOKENS), data=st.data())
    def expect(self, prompt: int, data: Any) -> None:
        room = 1000 + len(self.jobs)
        prefix = data.draw(st.integers(0, blocks_for(prompt) - 1)) * BLOCK_TOKENS
        count = blocks_for(prompt) - prefix // BLOCK_TOKENS
        units = dict(blocks=tuple(range(1 + 6 * len(self.jobs), 1 + 6 * len(self.jobs) + count)), slot=1 + len(self.jobs))
        self.jobs[room] = Job(
            manifest(room, prompt, prefix, **units), disturbed=not self.links and self.sessions[D]._lost is None
        )
        self.apply(D, self.jobs[room].manifest)

    @rule(seed=st.integers(0, 1 << 32), count=st.integers(1, 80))
    def advance(self, seed: int, count: int) -> None:
        """Messages arrive, effects finish, workers go on: whichever comes first; some effects and streams not at all."""
        random = Random(seed)
        deaf = random.sample(sorted(self.streams), random.randint(0, len(self.streams) // 2))
        slow = tuple(random.sample(EFFECTS, random.randint(0, 2)))
        for _ in range(count):
            moves: list[Callable[[], None]] = []
            moves += [
                partial(self.perform, number) for number in self.finishable() if not isinstance(self.effects[number][1], slow)
            ]
            moves += [partial(self.deliver, key) for key, queue in sorted(self.streams.items()) if queue and key not in deaf]
            moves += [partial(self.pass_barrier, *it) for it in self.barriers()]
            moves += [partial(self.run_chunk, room, random.randint(1, 3)) for room in self.runnable()]
            moves += [partial(self.notice, number) for number in range(len(self.unseen))]
            if not moves:
                return
            random.choice(moves)()
            self.holds()

    @precondition(lambda self: self.jobs and not self.calm)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        room = data.draw(st.sampled_from(sorted(self.jobs)))
        who = data.draw(st.integers(0, D))
        self.jobs[room].cancelled.add(who)
        self.jobs[room].disturbed = True
        self.apply(who, m.CancelRoom(room, "test"))

    @precondition(lambda self: not self.calm)
    @rule()
    def damage(self) -> None:
        """The next frame that is sent."""
        self.damaged = True

    @precondition(lambda self: self.links)
    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        """A link breaks between agents that live on: no room may fail by that."""
        self.lose_link(data.draw(st.sampled_from(self.links)))

    @precondition(lambda self: self.links and not self.calm)
    @rule(data=st.data())
    def go_silent(self, data: Any) -> None:
        """A peer does not answer any more, or cannot be linked again: rooms end at once."""
        self.disturb()
        self.lose_link(link := data.draw(st.sampled_from(self.links)), gone=link % 2 == 0)
        self.apply(D, m.PeerGone("test"))

    @precondition(lambda self: not self.links)
    @rule()
    def pair(self) -> None:
        """The next life of the links. A prefill agent may not have seen the end of the last one."""
        self.lives += 1
        self.links = [m.Link(10 * self.lives + stage) for stage in range(STAGES)]
        for stage, link in enumerate(self.links):
            self.streams[link, D] = deque()
            self.streams[link, stage] = deque()
            self.apply(stage, m.LinkUp(link, self.sessions[D].placement))
        self.apply(D, m.Paired(tuple(self.links), tuple(PLACES)))

    @precondition(lambda self: not self.calm)
    @rule(seconds=st.sampled_from([1.0, 5.0, 11.0, 31.0]))
    def sleep(self, seconds: float) -> None:
        self.disturb()
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for who, session in enumerate(self.sessions):
            deadline = session.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.apply(who, DeadlinePassed())

    @invariant()
    def holds(self) -> None:
        for session in getattr(self, "sessions", ()):
            session.check()

    # ---- how the world works
    def disturb(self) -> bool:
        for job in self.jobs.values():
            job.disturbed = True
        return False

    def deliver(self, key: tuple[int, int]) -> None:
        link, to = key
        message = self.streams[key].popleft()
        stale = self.sessions[to].totals["stale_messages"]
        self.apply(to, m.FromPeer(m.Link(link), message))
        assert not isinstance(message, m.Grant) or self.sessions[to].totals["stale_messages"] == stale, "granted in vain"

    def finishable(self) -> list[int]:
        """Effects that can end now: a receive does when its frame was sent, or when its link is dead."""
        return [
            n for n, (_, effect) in enumerate(self.effects)
            if not isinstance(effect, m.Receive) or effect.link not in self.links
            or all(number in self.wire for number, _ in numbered(effect))
        ]  # fmt: skip

    def perform(self, number: int) -> None:
        who, effect = self.effects.pop(number)
        match effect:
            case m.Send() if effect.link not in self.links:
                self.apply(who, m.Sent(effect.link, effect.seq, "dead", peer_gone=True))
            case m.Send():
                room = self.room_of(who, effect)
                assert who not in self.jobs[room].over, "P's memory is read after the room ended"
                for piece_number, piece in numbered(effect):
                    assert piece_number not in self.wire, "two pieces have one number"
                    self.wire[piece_number] = "damaged" if self.damaged else self.source(who, room, piece)
                    self.damaged = self.damaged and self.disturb()
                self.apply(who, m.Sent(effect.link, effect.seq))
            case m.Receive() if effect.link not in self.links:
                self.apply(who, m.Received(effect.frame, error="dead", peer_gone=True))
            case m.Receive():
                intact = True
                for piece_number, piece in numbered(effect):
                    content = self.wire.pop(piece_number)
                    intact &= content != "damaged"
                    if content != "damaged":
                        self.scatter(self.room_of(who, effect), piece, content)
                self.apply(who, m.Received(effect.frame, intact))
            case m.CloseLink(link):
                if link in self.links:
                    self.lose_link(link)

    def source(self, stage: int, room: int, piece: Piece) -> list[Any]:
        first = self.jobs[room].manifest.first_block + 100 * (room % 100)
        return [
            (room, it.field_id, unit - first, 0) if it.kind == PAGED else (room, it.field_id, 0, self.versions[room, stage])
            for units in piece.units
            for it in (PLACES[stage].fields[field] for field in units.fields)
            for unit in units.ids
        ]

    def scatter(self, room: int, piece: Piece, contents: list[Any]) -> None:
        assert D not in self.jobs[room].over, "D's memory is written after the room ended"
        places = [(index, unit) for units in piece.units for index in units.fields for unit in units.ids]
        for (index, unit), content in zip(places, contents, strict=True):
            self.written[self.lives, room, index, unit] += 1
            assert self.written[self.lives, room, index, unit] <= 1, "a unit was written twice"
            self.pool[room, index, unit] = content

    def runnable(self) -> list[int]:
        return sorted(
            room for room, job in self.jobs.items()
            if len(job.ready) == STAGES and job.end < job.manifest.prompt_tokens and not any(job.steps.values())
            and not any(stage in job.over or stage in job.failed or stage in job.cancelled for stage in range(STAGES))
        )  # fmt: skip

    def run_chunk(self, room: int, blocks: int) -> None:
        """P's blocks are 100 * room + logical block, so that contents tell where they come from."""
        job = self.jobs[room]
        self.step_id += 1
        start, job.end = job.end, min(job.end + blocks * BLOCK_TOKENS, job.manifest.prompt_tokens)
        last = job.end == job.manifest.prompt_tokens
        new = tuple(100 * (room % 100) + block for block in range(blocks_for(start), blocks_for(job.end)))
        for stage, place in enumerate(PLACES):
            count = len(place.producer_steps)
            job.steps[stage] = deque((self.step_id, lo, lo + 1) for lo in range(count))
            self.versions[room, stage] += 1
            row = LocalRow(room, start, job.end, last, 3, new)
            self.apply(stage, ChunkStarted(self.step_id, (row,)))

    def barriers(self) -> list[tuple[int, int]]:
        return sorted((room, stage) for room, job in self.jobs.items() for stage, left in job.steps.items() if left)

    def pass_barrier(self, room: int, stage: int) -> None:
        job = self.jobs[room]
        step, lo, hi = job.steps[stage].popleft()
        self.apply(stage, FieldsReady(step, lo, hi))
        over = not job.steps[stage] and job.end == job.manifest.prompt_tokens
        if over and stage == STAGES - 1 and not job.handoff:
            job.handoff = True
            self.apply(stage, HandoffReady(room, Handoff(room % 1000, (room % 1000,), 0)))

    def lose_link(self, link: int, gone: bool = False) -> None:
        """One link breaks; D gives up the whole pairing, and every prefill agent sees its link end, sooner or later."""
        links, self.links = self.links, []
        self.streams.clear()
        self.wire.clear()
        self.unseen += [(stage, m.LinkLost(m.Link(it), "test", gone)) for stage, it in enumerate(links)]
        self.apply(D, m.LinkLost(m.Link(link), "test", gone))

    def notice(self, number: int) -> None:
        stage, lost = self.unseen.pop(number)
        self.apply(stage, lost)

    def teardown(self) -> None:
        """Whatever has happened, everything ends by itself once messages arrive and effects finish."""
        if not hasattr(self, "sessions"):
            return
        self.settle()
        while not self.links:  # settling may cut a link
            self.pair()
            self.settle()
        if any(job.disturbed for job in self.jobs.values()):  # a room that D gave up while there was no link
            self.wait(LIMITS.resume)
            self.settle()
        for room, job in self.jobs.items():
            assert D in job.over and all(stage in job.over for stage in job.ready), f"room {room} waits for time to pass"
            assert job.over[D] == "ok" or job.disturbed, f"room {room} failed: {job.failed}"
            assert job.over[D] == "ok" or D in job.failed or D in job.cancelled
        for who, session in enumerate(self.sessions):
            counters = {key: value for key, value in session.counters().items() if key != "links"}
            assert not any(counters.values()), f"session {who} does not come to rest: {counters}"

    def settle(self) -> None:
        while True:
            if self.finishable():
                self.perform(self.finishable()[0])
            elif waiting := [key for key, queue in self.streams.items() if queue]:
                self.deliver(waiting[0])
            elif self.barriers():
                self.pass_barrier(*self.barriers()[0])
            elif self.runnable():
                self.run_chunk(self.runnable()[0], 2)
            elif self.unseen:
                self.notice(0)
            else:
                return
            self.holds()


def numbered(effect: m.Send | m.Receive) -> Iterator[tuple[tuple[int, int], Piece]]:
    """The pieces of a frame by the numbers that their tags hold."""
    for number, piece in enumerate(effect.pieces):
        yield (effect.link, effect.seq + number), piece


Transfers.TestCase.settings = settings(
    max_examples=300, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_order_of_events_breaks_a_handoff = Transfers.TestCase
