"""Everything around the prefill planner, played by the rules of the contracts: a decode scheduler, agents, workers, clients.

Each peer may answer in any order that its streams allow; the test chooses. Whatever the planner emits is checked here.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import services.scheduler.prefill.events as ev
from services.contracts.events import DeadlinePassed
from services.contracts.ids import BLOCK_TOKENS, BlockKey, GlobalRank, Replica, RequestId, Room, Token
from services.contracts.lifecycle import TERMINAL, State
from services.scheduler.prefill.admission import Limits
from services.scheduler.prefill.planner import PrefillPlanner

END = Token(7)  # the model's end token
OTHER = Token(8)
PROPOSALS = 5  # that D asks for


def limits(**changes: Any) -> Limits:
    given: dict[str, Any] = dict(
        engine_id="prefill-0", stages=2, tp_size=1, num_blocks=41, num_slots=5, max_num_seqs=3, chunk_tokens=512,
        max_model_len=4096, vocab_size=100, end_tokens=frozenset({END}), max_queued=6,
    )  # fmt: skip
    return Limits(**(given | changes))


@dataclass
class Client:
    """What one request's client has seen."""

    request: ev.RequestArrived
    deadline: float
    last: Any = None
    attached: int = 0
    tokens: int = 0
    gone: bool = False
    version: tuple[int, int] = (0, 0)
    states: list[State] = field(default_factory=list)


class World:
    def __init__(self, limits: Limits, places: int = 3, seed: int = 0):
        self.limits = limits
        self.planner = PrefillPlanner(limits, Random(seed))
        self.now = 0.0
        self.places = places  # of D
        self.clients: dict[RequestId, Client] = {}
        self.reserve_order: list[int] = []  # arrival numbers, as D was asked for the first time
        self.steps: list[ev.PrefillStep] = []
        self.answered = [0] * limits.stages
        self.effects: list[Any] = []  # of the last event
        # D
        self.questions: deque[ev.Reserve] = deque()
        self.from_decode: deque[Any] = deque()  # the Pair stream
        self.on_decode: dict[Room, str] = {}  # "reserved" | "installed" | "ending"
        self.accepted: set[Room] = set()
        self.owes_capacity = False
        # agents, by room and rank
        self.offers: set[tuple[Room, GlobalRank]] = set()  # on their way
        self.armed: set[tuple[Room, GlobalRank]] = set()
        self.acked: set[tuple[Room, GlobalRank]] = set()  # D has it all, which the planner has not heard yet
        self.done: set[tuple[Room, GlobalRank]] = set()  # and it has
        self.draining: set[tuple[Room, GlobalRank]] = set()
        self.buried: set[tuple[Room, GlobalRank]] = set()
        self.ready_told: Counter[Room] = Counter()
        # workers
        self.tables: dict[Room, list[int]] = defaultdict(list)
        self.slots: dict[Room, int] = {}
        self.chunk_ends: dict[Room, int] = {}
        self.rows: dict[int, Any] = {}  # what a block holds: its key, once it is full
        self.states: dict[int, Any] = {}  # what a slot holds: the key of the block that its state is behind
        self.tokens: dict[Room, Token] = {}  # first tokens, known once the last chunk was launched
        self.stopped = False  # the engine is lost

    # ---- driving
    def post(self, event: Any) -> None:
        self.effects = self.planner.apply(event, self.now)
        for effect in self.effects:
            self.perform(effect)
        self.planner.check()
        self.plan()

    def plan(self) -> None:
        while (step := self.planner.plan(self.now)) is not None:
            self.launch(step)
            self.planner.check()

    def advance(self, seconds: float) -> None:
        """Move the clock; every deadline on the way is kept, as the shell does."""
        until = self.now + seconds
        while (due := self.planner.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.post(DeadlinePassed())
        self.now = until
        self.plan()
        if not self.stopped:
            late = [rid for rid, client in self.clients.items() if client.last is None and client.deadline < self.now]
            assert not late, f"{late} should have been told that their time is up"

    def connect(self) -> None:
        self.post(ev.DecodeConnected("decode-0", 1, 4000))

    def arrive(
        self,
        prompt_tokens: int,
        *,
        max_tokens: int = 4,
        timeout: float = 60.0,
        family: str = "",
        like: int = 0,
        **sampling: Any,
    ) -> RequestId:
        """`like`: how many of its first blocks are those of its `family`; without a family there is no prefix cache."""
        request_id = RequestId(f"r{len(self.clients)}")
        names = [f"{family}{n}" if n < like else f"{request_id}.{n}" for n in range((prompt_tokens - 1) // BLOCK_TOKENS)]
        keys = tuple(BlockKey(name.encode()) for name in names) if family else ()
        request = ev.RequestArrived(request_id, prompt_tokens, ev.Sampling(max_tokens=max_tokens, **sampling), timeout, keys)
        self.clients[request_id] = Client(request, self.now + timeout)
        self.post(request)
        return request_id

    # ---- what the planner wants
    def perform(self, effect: Any) -> None:
        match effect:
            case ev.Reserve():
                self.questions.append(effect)
                if (number := int(effect.request_id[1:])) not in self.reserve_order:
                    self.reserve_order.append(number)
                assert 0 < effect.timeout <= self.clients[effect.request_id].request.timeout + 1e-6
            case ev.CancelOnDecode(room=room):
                if room not in self.on_decode:
                    self.from_decode.append(ev.RoomEnded(room))
                else:
                    self.on_decode[room] = "ending"
            case ev.CancelOnAgents(ranks=ranks, room=room):
                pairs = {(room, rank) for rank in ranks}
                assert not pairs & self.done
                self.armed -= pairs
                self.draining |= pairs - self.acked
            case ev.ForgetRooms(rooms=rooms):
                for room in rooms:
                    self.forget(room)
            case ev.WriteTransition():
                self.note(effect)
            case ev.RequestGone(request_id=request_id):
                client = self.clients[request_id]
                assert client.last is not None and not client.gone
                client.gone = True
            case ev.LoseEngine():
                self.stopped = True
                assert all(client.gone for client in self.clients.values())
            case ev.DropDecode():
                self.lose_decode()
            case ev.Emptied():
                assert all(client.gone for client in self.clients.values())
            case _:
                self.publish(effect)

    def publish(self, effect: Any) -> None:
        client = self.clients[effect.request_id]
        assert client.last is None, f"{effect} after {client.last}"
        match effect:
            case ev.PublishAttached():
                client.attached += 1
            case ev.PublishTokens(tokens=tokens):
                client.tokens += len(tokens)
            case ev.PublishFinished():
                assert client.tokens == 1
                client.last = effect
            case ev.PublishHandedOver():
                assert client.attached and not client.tokens
                client.last = effect
            case ev.PublishFailure():
                client.last = effect
            case ev.PublishQueued():
                assert not client.attached
            case _:
                raise AssertionError(effect)

    def note(self, effect: ev.WriteTransition) -> None:
        client = self.clients[effect.request_id]
        version = (effect.attempt, effect.step)
        assert version > client.version, f"{effect}: the ledger would take it for an old one"
        assert not client.states or client.states[-1] not in TERMINAL
        client.version = version
        client.states.append(effect.state)

    def launch(self, step: ev.PrefillStep) -> None:
        assert self.limits.stages + 1 >= step.step_id - min(self.answered), "too many batches in flight"
        assert step.step_id == len(self.steps) + 1
        assert 0 < len(step.rows) <= self.limits.max_num_seqs
        assert sum(row.end - row.start for row in step.rows) <= self.limits.chunk_tokens
        assert len({row.room for row in step.rows}) == len(step.rows)
        self.steps.append(step)
        for transition in step.transitions:
            self.perform(transition)
        for row in step.rows:  # as the workers do it: first what all rows start from
            if row.room not in self.chunk_ends:
                self.load(row)
        for row in step.rows:
            self.launch_row(row)

    def launch_row(self, row: ev.ChunkRow) -> None:
        client = self.clients[row.request_id]
        assert client.last is None, "no new chunk for a request that is over"
        assert row.start == self.chunk_ends[row.room] < row.end
        assert row.last == (row.end == client.request.prompt_tokens)
        assert row.last or row.end % 128 == 0
        assert self.ready_told[row.room] == self.limits.ranks, "not every rank is ready"
        assert row.room in self.accepted, "no place on D"
        assert 0 not in row.new_blocks
        assert row.slot != 0 and self.slots.setdefault(row.room, row.slot) == row.slot
        assert sum(slot == row.slot for slot in self.slots.values()) == 1
        self.tables[row.room] += row.new_blocks
        width = self.limits.verify_width if row.last else 0
        assert len(self.tables[row.room]) == -(-(row.end + width) // 128), "blocks for the chunk, no more"
        self.write(row, client.request.keys)
        self.chunk_ends[row.room] = row.end
        assert row.proposals == PROPOSALS, "not what D asked for"
        if row.last:
            stops = client.request.sampling.stop_token_ids
            self.tokens[row.room] = stops[0] if stops else END if client.request.prompt_tokens % 3 == 0 else OTHER

    def load(self, row: ev.ChunkRow) -> None:
        """What the prompt starts from is there, and its own. Steps run in order, so what was launched has been written."""
        keys, found = self.clients[row.request_id].request.keys, row.start // BLOCK_TOKENS
        assert row.start % BLOCK_TOKENS == 0
        assert [self.rows.get(block) for block in row.new_blocks[:found]] == list(keys[:found]), "not this prompt's rows"
        assert (row.load_slot != 0) == (found > 0) and (not found or self.states[row.load_slot] == keys[found - 1]), (
            "not its state"
        )
        self.chunk_ends[row.room] = row.start

    def write(self, row: ev.ChunkRow, keys: tuple[BlockKey, ...]) -> None:
        """The chunk's blocks are nobody else's."""
        written = self.tables[row.room][row.start // BLOCK_TOKENS :]
        others = {block for room, table in self.tables.items() for block in table if room != row.room}
        assert not others & set(written), "a block that somebody else reads is written to"
        for place in range(row.start // BLOCK_TOKENS, len(self.tables[row.room])):
            full = row.end >= (place + 1) * BLOCK_TOKENS
            self.rows[self.tables[row.room][place]] = keys[place] if full and place < len(keys) else None
        end = row.end // BLOCK_TOKENS
        self.states[row.slot] = keys[end - 1] if row.end % BLOCK_TOKENS == 0 and end <= len(keys) else None
        if row.save_slot:
            assert row.save_slot not in self.slots.values(), "a checkpoint in a slot that somebody uses"
            self.states[row.save_slot] = self.states[row.slot]
            assert self.states[row.save_slot] is not None

    def forget(self, room: Room) -> None:
        """From now on the room's blocks and slot may be given to another one: nobody may still use them."""
        if not self.stopped:
            in_flight = [
                s.step_id for s in self.steps if s.step_id > min(self.answered) and any(r.room == room for r in s.rows)
            ]
            assert not in_flight, f"steps {in_flight} may still write to the blocks of room {room}"
            busy = [pair for pair in self.armed | self.draining if pair[0] == room]
            assert not busy, f"agents may still read the blocks of {busy}"
        del self.tables[room], self.slots[room]

    # ---- moves of the peers; each returns whether there was anything to do
    def decide(self, *, refuse: ev.Failure | None = None) -> bool:
        """D answers the oldest question."""
        if not self.questions:
            return False
        question = self.questions.popleft()
        room = question.room
        if refuse is not None:
            self.from_decode.append(ev.ReserveAnswered(room, False, Replica(0), 0, 0, refuse))
        elif len(self.on_decode) >= self.places:
            self.owes_capacity = True
            self.from_decode.append(ev.ReserveAnswered(room, False, Replica(0), 0, 0))
        else:
            self.on_decode[room] = "reserved"
            self.accepted.add(room)
            self.offers |= {(room, GlobalRank(rank)) for rank in range(self.limits.ranks)}
            self.from_decode.append(ev.ReserveAnswered(room, True, Replica(0), 0, proposals=PROPOSALS))
        return True

    def hear_decode(self) -> bool:
        if not self.from_decode:
            return False
        self.post(self.from_decode.popleft())
        return True

    def offer(self, pair: tuple[Room, GlobalRank]) -> None:
        """A manifest arrives at an agent, which accepts it unless the room was cancelled there."""
        self.offers.discard(pair)
        if pair in self.draining or pair in self.buried:
            return
        self.armed.add(pair)
        self.ready_told[pair[0]] += 1
        self.post(ev.RoomReady(pair[1], pair[0]))

    def agent_fails(self, pair: tuple[Room, GlobalRank], failure: ev.Failure) -> None:
        """An agent gives up by itself; it drains like one that was told to."""
        self.armed.discard(pair)
        self.draining.add(pair)
        self.post(ev.RoomFailed(pair[1], pair[0], failure))

    def drain(self, pair: tuple[Room, GlobalRank]) -> None:
        self.draining.discard(pair)
        self.buried.add(pair)
        self.post(ev.Drained(pair[1], pair[0]))

    def sendable(self) -> list[tuple[Room, GlobalRank]]:
        """Agents that may have sent everything: the last chunk was launched, and its report may be on its way."""
        return sorted(pair for pair in self.armed if pair[0] in self.tokens)

    def ack(self, pair: tuple[Room, GlobalRank]) -> None:
        """D has everything of this rank."""
        self.armed.discard(pair)
        self.acked.add(pair)

    def release(self, pair: tuple[Room, GlobalRank]) -> None:
        self.acked.discard(pair)
        self.done.add(pair)
        self.post(ev.SourceReleased(pair[1], pair[0], 1000))

    def installable(self) -> list[Room]:
        """D may install what all agents have sent, if the first token does not end the request."""
        sent = self.acked | self.done
        return sorted(
            room
            for room, state in self.on_decode.items()
            if state == "reserved"
            and room in self.tokens
            and not self.ends(room)
            and all((room, GlobalRank(rank)) in sent for rank in range(self.limits.ranks))
        )

    def ends(self, room: Room) -> bool:
        row = next(row for step in self.steps for row in step.rows if row.room == room)
        sampling = row.sampling
        token = self.tokens[room]
        return sampling.max_tokens == 1 or token in sampling.stop_token_ids or (token == END and not sampling.ignore_eos)

    def install(self, room: Room) -> None:
        self.on_decode[room] = "installed"
        self.from_decode.append(ev.RoomInstalled(room))

    def leave_decode(self, room: Room, failure: ev.Failure | None = None) -> None:
        """D is rid of the room: after a cancel, at its end, or because it failed there."""
        state = self.on_decode.pop(room)
        if state != "installed":
            self.from_decode.append(ev.RoomEnded(room, failure))
        if self.owes_capacity:
            self.owes_capacity = False
            self.from_decode.append(ev.CapacityFreed())

    def lose_decode(self) -> None:
        if self.planner.decode is None:
            return
        self.questions.clear()
        self.from_decode.clear()
        self.on_decode.clear()
        self.offers.clear()
        self.owes_capacity = False
        self.post(ev.DecodeLost("its process died"))

    def answer_step(self, stage: int) -> bool:
        """A stage's report of its next step arrives, maybe before that of the stage which ran it earlier."""
        step_id = self.answered[stage] + 1
        if step_id > len(self.steps):
            return False
        first = ()
        if stage == self.limits.stages - 1:
            first = tuple(ev.FirstToken(r.room, self.tokens[r.room]) for r in self.steps[step_id - 1].rows if r.last)
        self.answered[stage] = step_id
        self.post(ev.StepDone(step_id, stage, 1.0, 2.0, first))
        return True

    def settle(self) -> None:
        """Everybody does what is left to do, until nothing is."""
        for _ in range(10_000):
            moved = self.decide() or self.hear_decode()
            moved = any([self.answer_step(stage) for stage in range(self.limits.stages)]) or moved
            for pair in sorted(self.offers):
                self.offer(pair)
                moved = True
            for pair in self.sendable():
                self.ack(pair)
                moved = True
            for pair in sorted(self.acked):
                self.release(pair)
                moved = True
            for room in self.installable():
                self.install(room)
                moved = True
            for pair in sorted(self.draining):
                self.drain(pair)
                moved = True
            for room in [room for room, state in self.on_decode.items() if state in ("ending", "installed")]:
                self.leave_decode(room)
                moved = True
            if not moved:
                if self.stopped or not self.planner.roster.requests:
                    return
                self.advance(1.0)
        raise AssertionError(f"never at rest: {self.planner.counters()}")

    def check_at_rest(self) -> None:
        assert not any(self.planner.counters().values()), self.planner.counters()
        assert self.planner.roster.pool.cache.blocks_available == self.limits.num_blocks - 1
        assert self.planner.roster.pool.cache.slots_available == self.limits.num_slots - 1
        assert not self.planner.roster.rooms and not self.planner.roster.requests
        assert self.stopped or (not self.tables and not self.slots)
        for request_id, client in self.clients.items():
            assert client.last is not None and client.gone, f"{request_id} never ended"
        assert self.reserve_order == sorted(self.reserve_order), "D was not asked in the order of arrival"
        totals = self.planner.totals
        ends = ("refused", "finished", "failed", "cancelled", "handed_over")
        assert totals["requests_received"] == sum(totals[f"requests_{end}"] for end in ends) == len(self.clients)
