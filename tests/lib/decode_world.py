"""Everything around a decode planner, as a model that checks it: a prefill scheduler, agents, workers, clients, a ledger.

Each verb is one thing that may happen; the model applies it, performs the effects, and asserts what must hold of them.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from services.contracts.events import DeadlinePassed
from services.contracts.geometry import blocks_for, verify_widths
from services.contracts.ids import BLOCK_TOKENS, BlockId, GlobalRank, ImageBlock, Place, Replica, RequestId, Room, SlotId, Token
from services.contracts.lifecycle import TERMINAL, State, may_follow
from services.contracts.placement import Manifest
from services.scheduler.block_keys import BlockKeys, token_bytes
from services.scheduler.decode import events as ev
from services.scheduler.decode.capacity import GROWTH_TOKENS
from services.scheduler.decode.planner import DecodePlanner
from services.scheduler.decode.shape import EngineShape

END_TOKEN = Token(0)
VOCABULARY = 40
KEYS = BlockKeys("model", tokens_ahead=1)
AWAY = (State.RETRACTING, State.RETRACTED)


def small_shape(**changes: object) -> EngineShape:
    values: dict[str, object] = {
        "engine_id": "decode-0", "epoch": 7, "replicas": 2, "tp_size": 2, "places": 4, "num_blocks": 16, "num_slots": 5,
        "verify_width": 1, "adaptive": True, "max_model_len": 1500, "end_tokens": frozenset({END_TOKEN}), "buckets": (1, 2, 3),
        "graphs": True, "request_timeout": 600.0, "keys": KEYS,
    }  # fmt: skip
    return EngineShape(**{**values, **changes})  # pyright: ignore[reportArgumentType]


@dataclass
class ModelRoom:
    """What the world knows of a room."""

    asked: ev.ReserveAsked
    prompt: list[Token]
    manifest: Manifest | None = None
    unready: set[GlobalRank] = field(default_factory=set)
    undrained: set[GlobalRank] = field(default_factory=set)
    proposals: int = 0  # that its window was asked to have
    anchor: ev.AgentRankReady | None = None  # what all ranks report
    truth: list[Token] = field(default_factory=list)  # what the model really said: the anchor, then the rounds' tokens
    published: list[Token] = field(default_factory=list)
    client: ev.Client | None = None
    client_left: bool = False
    installed: bool = False
    ended: bool = False  # RoomEnded was sent
    end: ev.End | None = None  # on the client's stream
    states: list[State] = field(default_factory=list)
    step: int = 0
    replica: int = -1
    retractions: int = 0
    since: int = 0  # tokens when it came in last, or came back

    @property
    def state(self) -> State | None:
        return self.states[-1] if self.states else None

    @property
    def tokens(self) -> list[Token]:
        """All that was said, as the next turn of a conversation begins."""
        return [*self.prompt, *self.truth]

    @property
    def terminal(self) -> bool:
        return bool(self.states) and self.states[-1] in TERMINAL


@dataclass
class ModelPlace:
    room: Room
    blocks: list[BlockId]
    slot: SlotId
    position: int


class DecodeWorld:
    def __init__(self, shape: EngineShape, seed: int = 0):
        self.shape = shape
        self.planner = DecodePlanner(shape)
        self.now = 1000.0
        self.random = Random(seed)
        self.rooms: dict[Room, ModelRoom] = {}
        self.clients: dict[ev.Client, Room] = {}
        self.places: list[dict[Place, ModelPlace]] = [{} for _ in range(shape.replicas)]  # as the workers know them
        self.out: deque[ev.RoundPlan] = deque()  # the first of them runs
        self.rounds = 0
        self.busy: list[list[ModelPlace]] = [[] for _ in range(shape.replicas)]  # what the round that runs copies out
        self.coming: set[Room] = set()  # who is copied back by a round that has not landed
        self.windows: dict[Room, int] = {}  # tokens in each resident's window
        self.pair = ev.Pair(0)
        self.refused: set[ev.Pair] = set()
        self.lost: ev.Failure | None = None
        self.emptied = 0
        self.events = 0
        self.writers: list[dict[BlockId, Room]] = [{} for _ in range(shape.replicas)]  # who wrote to a block last
        self.host: list[dict[ImageBlock, tuple[Room, int, int]]] = [{} for _ in range(shape.replicas)]  # room, which, position
        self.away: list[list[Room]] = [[] for _ in range(shape.replicas)]  # retracted, the longest first
        self.transitions: set[tuple[State, State]] = set()
        self.rows: list[dict[BlockId, object]] = [{} for _ in range(shape.replicas)]  # what a block's rows are of, once final
        self._names: dict[tuple[object, ...], int] = {}
        self._numbers = iter(range(1, 1 << 30))
        self.connect_prefill()

    # ---- what may happen
    def connect_prefill(self) -> None:
        self.pair = ev.Pair(next(self._numbers))
        self.apply(ev.PrefillPaired(self.pair, "prefill-0"))

    def lose_prefill(self) -> None:
        self.apply(ev.PrefillLost(self.pair, "its stream ended"))
        self.refused.discard(self.pair)
        self.connect_prefill()

    def reserve(
        self,
        prompt: int | Sequence[Token],
        max_tokens: int,
        *,
        ignore_eos: bool = True,
        stops: tuple[Token, ...] = (),
        timeout: float = 0.0,
    ) -> Room:
        """`prompt`: its tokens, or how many random ones."""
        number = next(self._numbers)
        tokens = [self.token() for _ in range(prompt)] if isinstance(prompt, int) else list(prompt)
        keys = KEYS.of_prompt(token_bytes(tokens))
        asked = ev.ReserveAsked(
            pair=self.pair,
            request_id=RequestId(f"r{number}"),
            room=Room(number * 1_000_003),
            attempt=self.random.randint(0, 3),
            prompt_tokens=len(tokens),
            prompt_hash=b"",
            sampling=ev.Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stops),
            timeout=timeout,
            keys=keys,
            tail=tuple(tokens[len(keys) * BLOCK_TOKENS :]),
        )
        self.rooms[asked.room] = ModelRoom(asked, tokens)
        self.apply(asked)
        return asked.room

    def rank_ready(self, room: Room, rank: GlobalRank | None = None, token: Token | None = None) -> None:
        """One more rank has everything; without `rank` any that has not."""
        model = self.rooms[room]
        rank = self.random.choice(sorted(model.unready)) if rank is None else rank
        if model.anchor is None:
            anchor = self.token() if token is None else token
            window = (anchor, *(self.token() for _ in range(self.shape.verify_width - 1)))
            model.anchor = ev.AgentRankReady(
                rank, room, model.asked.attempt, anchor, window, bytes=1000, first_byte=1.0, last_byte=3.0, cached_tokens=0
            )
            model.truth = [anchor]
        model.unready.discard(rank)
        if not model.unready:
            self._sent(model)
        template = model.anchor
        self.apply(
            ev.AgentRankReady(rank, room, template.attempt, template.token, template.window, 1000, 1.0, 3.0, cached_tokens=0)
        )

    def all_ready(self, room: Room, token: Token | None = None) -> None:
        for rank in sorted(self.rooms[room].unready):
            self.rank_ready(room, rank, token)

    def rank_failed(self, room: Room) -> None:
        model = self.rooms[room]
        rank = self.random.choice(sorted(self.shape.ranks_of(model.manifest.replica)))  # pyright: ignore
        self.apply(ev.AgentRoomFailed(rank, room, model.asked.attempt, ev.Failure("transfer_failed", "checksum", "PD_BYTES")))

    def drained(self, room: Room, rank: GlobalRank | None = None) -> None:
        model = self.rooms[room]
        rank = self.random.choice(sorted(model.undrained)) if rank is None else rank
        model.undrained.discard(rank)
        self.apply(ev.AgentDrained(rank, room))

    def all_drained(self, room: Room) -> None:
        for rank in sorted(self.rooms[room].undrained):
            self.drained(room, rank)

    def cancel_room(self, room: Room, failure: ev.Failure | None = None, finished: bool = False) -> None:
        self.apply(ev.CancelRoom(self.pair, room, "cancel", failure, finished))

    def cancel_request(self, room: Room) -> None:
        self.apply(ev.CancelRequested(self.rooms[room].asked.request_id, "enough"))

    def attach(self, room: Room) -> ev.Client:
        client = ev.Client(next(self._numbers))
        model = self.rooms[room]
        if model.client is None:
            model.client = client
            self.clients[client] = room
        self.apply(ev.ClientAttached(client, model.asked.request_id, room))
        assert not (model.terminal and self.planner.knows(model.asked.request_id)), "heard to the end and still kept"
        return client

    def client_gone(self, room: Room) -> None:
        model = self.rooms[room]
        assert model.client is not None
        model.client_left = True
        self.apply(ev.ClientGone(model.client))

    def launch(self) -> ev.RoundPlan | None:
        """Ask for a plan. The workers take it when they are done with what they have."""
        plan = self.planner.plan(self.now)
        self.planner.check()
        if plan is not None:
            self._check_head(plan)
            self.out.append(plan)
            if len(self.out) == 1:
                self._take(plan)
        return plan

    def launch_ahead(self) -> None:
        """Ask until there is nothing to plan, as the shell does."""
        while self.launch() is not None:
            pass

    def round_done(self, choose: Token | None = None) -> None:
        """The workers answer the round that runs, with random tokens unless told, and go on with the next if they have it."""
        plan = self.out.popleft()
        replicas: list[tuple[ev.PlaceTokens, ...]] = []
        copied: list[Room] = []
        for replica, part in enumerate(plan.replicas):
            entries: list[ev.PlaceTokens] = []
            for place in part.live:
                accepted = self.random.randint(1, part.width.width)
                tokens = tuple(self.token() if choose is None else choose for _ in range(accepted))
                window = (tokens[-1], *(self.token() for _ in range(part.width.proposals)))
                self.windows[self.places[replica][place].room] = len(window)
                entries.append(ev.PlaceTokens(place, tokens, window))
                known = self.places[replica][place]
                known.position += accepted
                self.rooms[known.room].truth += tokens
                self._written(replica, known)
            replicas.append(tuple(entries))
            copied += [it.room for it in part.retracts] + [it.install.room for it in part.restores]
        self.busy = [[] for _ in self.busy]
        if self.out:
            self._take(self.out[0])
        self.coming.difference_update(copied)
        self.apply(ev.RoundDone(plan.round_id, tuple(replicas), tuple(copied)))

    def advance(self, seconds: float) -> None:
        """Time passes; deadlines fire when they are due, as the shell does it."""
        until = self.now + seconds
        while (deadline := self.planner.next_deadline()) is not None and deadline <= until and self.lost is None:
            self.now = max(self.now, deadline)
            self.apply(DeadlinePassed())
            after = self.planner.next_deadline()
            assert after is None or after > self.now, "what is due stays due: the shell would spin"
        self.now = until

    def token(self) -> Token:
        return Token(self.random.randrange(VOCABULARY))

    def settle(self) -> None:
        """Everybody goes: afterwards nothing may be held."""
        while self.out:
            self.round_done()
        for room in list(self.rooms):
            self.cancel_request(room)
        for room, model in self.rooms.items():
            if model.undrained:
                self.all_drained(room)
        self.advance(1000)
        held = {name: count for name, count in self.planner.counters().items() if count}
        assert not held, f"left behind: {held}"
        assert self.planner.next_deadline() is None
        assert not self.refused, "someone waits for capacity that is there"
        if self.launch() is not None:
            self.round_done()
        assert self.launch() is None
        assert not any(self.places), "the workers still know places that ended"
        assert self.lost is None

    # ---- effects, and what must hold of them
    def apply(self, event: object) -> None:
        self.events += 1
        self.perform(self.planner.apply(event, self.now))
        self.planner.check()

    def perform(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.AnswerReserve(accepted=accepted, failure=failure, pair=pair):
                    assert not (accepted and failure)
                    if accepted:
                        model = self.rooms[effect.room]
                        model.proposals, model.replica = effect.proposals, effect.replica  # pyright: ignore
                        waiting = [it for it in self.rooms.values() if it.replica == model.replica and it.state in AWAY]
                        assert not waiting, "a newcomer takes the place of those who wait to come back"
                    if not accepted and failure is None:
                        self.refused.add(pair)
                case ev.CapacityFreed(pair):
                    self.refused.remove(pair)
                case ev.ExpectManifest(ranks, manifest):
                    self._expect(ranks, manifest)
                case ev.CancelOnAgents(ranks, room):
                    assert not self.rooms[room].installed and not self.rooms[room].undrained
                    self.rooms[room].undrained = set(ranks)
                    self.rooms[room].unready.clear()
                case ev.RoomInstalled(_, room):
                    model = self.rooms[room]
                    assert not model.installed and not model.unready and not model.undrained
                    model.installed = True
                case ev.RoomEnded(_, room):
                    model = self.rooms.get(room)
                    if model is not None:
                        dead = any(isinstance(other, ev.LoseEngine) for other in effects)
                        assert dead or not model.undrained, "the room ended while agents may write to it"
                        model.ended = True
                case ev.PublishTokens(said):
                    for client, tokens in said:
                        self._heard(self.rooms[self.clients[client]], tokens)
                case ev.PublishEnd(client, end):
                    if client in self.clients:
                        self._ended(self.rooms[self.clients[client]], end)
                case ev.WriteTransition():
                    self._journal(effect)
                case ev.Emptied():
                    self.emptied += 1
                case ev.LoseEngine(failure):
                    self.lost = failure

    def _heard(self, model: ModelRoom, tokens: tuple[Token, ...]) -> None:
        assert model.end is None and not model.client_left and tokens
        model.published += tokens
        assert model.published == model.truth[: len(model.published)], "tokens lost, doubled or out of order"

    def _expect(self, ranks: tuple[GlobalRank, ...], manifest: Manifest) -> None:
        model = self.rooms[manifest.room]
        assert ranks == self.shape.ranks_of(manifest.replica)  # pyright: ignore
        assert manifest.prefix_tokens % BLOCK_TOKENS == 0 and manifest.prefix_tokens < manifest.prompt_tokens
        due = blocks_for(manifest.prompt_tokens) - manifest.prefix_tokens // BLOCK_TOKENS
        assert len(manifest.blocks) == due == len(manifest.block_gens)
        assert 0 not in manifest.blocks and manifest.slot != 0
        for room, other in self.rooms.items():
            if other.manifest is None or other.manifest.replica != manifest.replica:
                continue
            if other.undrained:
                assert not set(other.manifest.blocks) & set(manifest.blocks), f"{room}'s agents may still write there"
                assert other.manifest.slot != manifest.slot, f"{room}'s agents may still write there"
        held = self.places[manifest.replica]
        for plan in self.out:
            part = plan.replicas[manifest.replica]
            known = [held[place] for place in part.live if place in held]
            installs = [*part.installs, *(it.install for it in part.restores)]
            grown = plan.deltas.get(manifest.replica, {}).values()
            blocks = {block for of in (*(it.blocks for it in (*known, *installs)), *grown) for block in of}
            assert not blocks & set(manifest.blocks), "a round may still write there"
            assert manifest.slot not in {it.slot for it in (*known, *installs)}, "a round may still write there"
        leaving = [it for it in held.values() if self.rooms[it.room].state is State.RETRACTING]
        for it in (*self.busy[manifest.replica], *leaving):
            assert not set(it.blocks[: blocks_for(it.position)]) & set(manifest.blocks), "a copy has to read there"
            assert it.slot != manifest.slot, "a copy has to read there"
        model.manifest, model.unready = manifest, set(ranks)

    def _check_head(self, plan: ev.RoundPlan) -> None:
        assert plan.round_id == self.rounds + 1 and len(self.out) < 2
        self.rounds = plan.round_id
        assert len(plan.replicas) == self.shape.replicas
        most = max(len(part.live) for part in plan.replicas)
        fitting = [bucket for bucket in self.shape.buckets if bucket >= most]
        assert plan.bucket == (0 if most == 0 else min(fitting) if fitting else most)
        assert most or any(it.clears or it.retracts or it.restores for it in plan.replicas), "a round for nobody"

    def _take(self, plan: ev.RoundPlan) -> None:
        """The workers begin with a plan."""
        for replica, (places, part) in enumerate(zip(self.places, plan.replicas, strict=True)):
            for place in part.clears:
                del places[place]
            for install in part.installs:
                assert install.place not in places, "an install over a place that is not cleared"
                model = self.rooms[install.room]
                assert model.manifest is not None and model.anchor is not None
                found = model.manifest.prefix_tokens // BLOCK_TOKENS
                assert install.blocks[found : found + len(model.manifest.blocks)] == model.manifest.blocks
                assert install.slot == model.manifest.slot and install.window == model.anchor.window
                self.windows[install.room] = 1 + model.proposals  # padding behind them
                places[install.place] = ModelPlace(install.room, list(install.blocks), install.slot, install.position)
            for place, blocks in plan.deltas.get(Replica(replica), {}).items():
                places[place].blocks += blocks
            self.busy[replica] = [self._copy_out(replica, it) for it in part.retracts]
            for it in part.restores:
                self._copy_back(replica, it)
            assert list(part.live) == sorted(part.live) and set(part.live) <= set(places), "live places are held, ascending"
            for place in set(places) - set(part.live):
                known = places[place]
                lacks = len(known.blocks) < blocks_for(known.position + self.shape.rows_ahead)
                over = self.is_over(self.rooms[known.room])
                assert over or lacks or known.room in self.coming, "somebody who could go on is left out"
            widths = verify_widths(self.shape.verify_width)
            assert part.width.width in widths and 1 + part.width.proposals in widths, "no width that is captured"
            for place in part.live:
                assert part.width.width <= self.windows[places[place].room], "a round wider than its windows"
            written = [b for place in part.live for b in places[place].blocks[places[place].position // BLOCK_TOKENS :]]
            read = [b for place in part.live for b in set(places[place].blocks[: places[place].position // BLOCK_TOKENS])]
            assert len(written) == len(set(written)) and not set(written) & set(read), "a shared block is written to"
            for place in part.live:
                self._check_rows(replica, places[place])
            for block in written:
                self.rows[replica].pop(block, None)
            for place in part.live:
                known = places[place]
                self.writers[replica] |= dict.fromkeys(known.blocks[known.position // BLOCK_TOKENS :], known.room)
            for place in part.live:
                rows = places[place].position + self.shape.rows_ahead
                assert len(places[place].blocks) >= blocks_for(rows), "a round would write beyond its blocks"

    def _copy_out(self, replica: int, it: ev.PlaceRetract) -> ModelPlace:
        known = self.places[replica].pop(it.place)
        assert (known.room, known.position) == (it.room, it.position)
        data = blocks_for(it.position)
        assert len(it.image) == len(set(it.image)) == data + self.shape.state_blocks
        assert all(0 <= block < self.shape.image_blocks for block in it.image)
        self._check_rows(replica, known)
        if it.position % BLOCK_TOKENS:
            assert self.writers[replica][known.blocks[data - 1]] == it.room, "its last rows were written over before the copy"
        self.host[replica] |= {block: (it.room, place, it.position) for place, block in enumerate(it.image)}
        return known

    def _copy_back(self, replica: int, it: ev.PlaceRestore) -> None:
        install, places = it.install, self.places[replica]
        assert install.place not in places, "a request comes back to a place that is taken"
        position = install.position
        assert [self.host[replica][block] for block in it.image] == [
            (install.room, place, position) for place in range(len(it.image))
        ], "an image was written over"
        assert len(it.image) == blocks_for(position) + self.shape.state_blocks
        assert len(install.window) == self.windows[install.room] and install.window[0] == self.rooms[install.room].truth[-1]
        names = self._names_of(self.rooms[install.room].tokens, position // BLOCK_TOKENS)
        for place, block in enumerate(install.blocks[: blocks_for(position)]):
            if place < it.found:
                continue  # _check_rows looks at these
            self.rows[replica].pop(block, None)
            self.writers[replica][block] = install.room
            if place < len(names):
                self.rows[replica][block] = names[place]
        places[install.place] = known = ModelPlace(install.room, list(install.blocks), install.slot, position)
        self._check_rows(replica, known)
        self.coming.add(install.room)

    # ---- what the blocks hold
    def _names_of(self, tokens: list[Token], count: int) -> list[int]:
        """Of the first `count` blocks of a text: equal if and only if everything up to the end of the block is."""
        names: list[int] = []
        for place in range(count):
            rows = (names[-1] if names else 0, *tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
            names.append(self._names.setdefault(rows, len(self._names) + 1))
        return names

    def _sent(self, model: ModelRoom) -> None:
        """P's rows are in the manifest's blocks."""
        manifest = model.manifest
        assert manifest is not None
        full, found = manifest.prompt_tokens // BLOCK_TOKENS, manifest.prefix_tokens // BLOCK_TOKENS
        names = self._names_of(model.prompt, full)[found:]
        for block in manifest.blocks:
            self.rows[manifest.replica].pop(block, None)
            self.writers[manifest.replica][block] = manifest.room
        self.rows[manifest.replica] |= dict(zip(manifest.blocks, names, strict=False))

    def _written(self, replica: int, known: ModelPlace) -> None:
        """A round's rows that count; blocks before the new anchor are final."""
        full = known.position // BLOCK_TOKENS
        names = self._names_of(self.rooms[known.room].tokens, full)
        for block, name in zip(known.blocks[:full], names, strict=True):
            if self.rows[replica].setdefault(block, name) != name:
                raise AssertionError(f"block {block} has other rows than those of its text")

    def _check_rows(self, replica: int, known: ModelPlace) -> None:
        full = known.position // BLOCK_TOKENS
        found = [self.rows[replica].get(block) for block in known.blocks[:full]]
        assert found == self._names_of(self.rooms[known.room].tokens, full), "a request reads rows of another text"

    def _ended(self, model: ModelRoom, end: ev.End) -> None:
        assert model.end is None, "two ends on one stream"
        model.end = end
        if isinstance(end, ev.Finished):
            assert model.published == self.answer(model), "not the answer that the stop rules ask for"
            assert end.completion_tokens == len(model.published) and end.prompt_tokens == model.asked.prompt_tokens
            assert end.stop_token == (model.published[-1] if end.reason == "stop" else None)

    def answer(self, model: ModelRoom) -> list[Token]:
        """The truth up to the first token that ends it."""
        limit = self.limit(model)
        for index, token in enumerate(model.truth[:limit]):
            if token in self.stops(model):
                return model.truth[: index + 1]
        return model.truth[:limit]

    def is_over(self, model: ModelRoom) -> bool:
        """Whether the model has said all that the stop rules ask for."""
        return len(model.truth) >= self.limit(model) or bool(self.stops(model) & set(model.truth))

    def stops(self, model: ModelRoom) -> set[Token]:
        sampling = model.asked.sampling
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.shape.end_tokens)}

    def limit(self, model: ModelRoom) -> int:
        return min(model.asked.sampling.max_tokens, self.shape.max_model_len - model.asked.prompt_tokens)

    def first_token_is_last(self, room: Room) -> bool:
        """The prefill scheduler's rule: such a request ends there."""
        model = self.rooms[room]
        return self.limit(model) == 1 or model.truth[0] in self.stops(model)

    def _journal(self, effect: ev.WriteTransition) -> None:
        model = next(m for m in self.rooms.values() if m.asked.request_id == effect.request_id)
        assert not model.terminal, f"{effect.state} after {model.states}"
        assert effect.step > model.step and effect.attempt == model.asked.attempt
        before, after = model.state, effect.state
        if before is None or before is State.RESERVED:  # what follows that is written by prefill, or this engine ends it
            assert after in (State.RESERVED if before is None else State.INSTALLED, *TERMINAL)
        else:
            assert may_follow(before, after), f"{before} -> {after}"
            self.transitions.add((before, after))
        if self.lost is None:
            self._check_turn(model, before, after)
        model.states.append(after)
        model.step = effect.step

    def _check_turn(self, model: ModelRoom, before: State | None, after: State) -> None:
        """Fairness among those who make way and come back."""
        away, room = self.away[model.replica], model.asked.room
        neighbours = [it for it in self.rooms.values() if it.replica == model.replica and it is not model]
        match after:
            case State.INSTALLED:
                model.since = 1
            case State.RETRACTING:
                assert len(model.truth) > model.since or not model.retractions, "it has only just come back"
                assert self.limit(model) - model.since > GROWTH_TOKENS, "it came in with room for all of its answer"
                model.retractions += 1
                others = [
                    it for it in neighbours
                    if it.state is State.DECODING and it.retractions < 3 and len(it.truth) > it.since
                    and self.limit(it) - it.since > GROWTH_TOKENS
                ]  # fmt: skip
                assert model.retractions <= 3 or len(others) <= 1, "it had enough, and others could make way"
                away.append(room)
            case State.RESTORING:
                assert away[0] == room, "another one has waited longer"
                assert not any(it.state is State.RESTORING for it in neighbours), "two come back at once"
                away.remove(room)
                model.since = len(model.truth)
            case State.FINISHING if before in AWAY:
                away.remove(room)
            case _:
                pass

    def that(self, condition: Callable[[ModelRoom], object]) -> list[Room]:
        """Reserved rooms for which this holds, the oldest first."""
        return [room for room, model in self.rooms.items() if model.manifest is not None and condition(model)]
