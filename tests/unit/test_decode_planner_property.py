"""Whatever happens, in whatever order: nothing is shared or lost, rounds stay in step, every token is published once, and
when everyone is gone the engine is as it was. What must hold of each effect is asserted in tests/lib/decode_world.py."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.contracts.ids import Room, Token
from services.contracts.lifecycle import TRANSITIONS, State
from services.scheduler.decode import events as ev
from tests.lib.decode_world import DecodeWorld, ModelRoom, small_shape

COPYING = (State.RETRACTING, State.RESTORING)
INSTALLED = (State.INSTALLED, State.DECODING, *COPYING, State.RETRACTED, State.FINISHING)

index = st.integers(0, 1 << 20)


def unready(model: ModelRoom) -> bool:
    return bool(model.unready)


def undrained(model: ModelRoom) -> bool:
    return bool(model.undrained)


def attached(model: ModelRoom) -> bool:
    return model.client is not None and not model.client_left


class DecodeMachine(RuleBasedStateMachine):
    @initialize(
        seed=index,
        width=st.sampled_from([1, 4, 4]),
        blocks=st.sampled_from([3, 8, 14, 20]),
        slots=st.integers(2, 5),
        images=st.sampled_from([0, 9, 30, 30]),
    )
    def start(self, seed: int, width: int, blocks: int, slots: int, images: int) -> None:
        shape = small_shape(
            verify_width=width, adaptive=bool(seed % 2), num_blocks=blocks, num_slots=slots, image_blocks=images, state_blocks=3
        )
        self.world = DecodeWorld(shape, seed)

    def pick(self, rooms: list[Room], at: int) -> Room | None:
        return rooms[at % len(rooms)] if rooms else None

    @rule(
        prompt=st.sampled_from([1, 100, 127, 128, 129, 300]),
        max_tokens=st.sampled_from([1, 2, 5, 40, 200, 1400]),
        ignore_eos=st.booleans(),
        stops=st.sampled_from([(), (Token(1), Token(2))]),
        timeout=st.sampled_from([0.0, 20.0, 300.0]),
    )
    def reserve(self, prompt: int, max_tokens: int, ignore_eos: bool, stops: tuple[Token, ...], timeout: float) -> None:
        self.world.reserve(prompt, max_tokens, ignore_eos=ignore_eos, stops=stops, timeout=timeout)

    @rule(
        prompt=st.sampled_from([1, 127, 130]),
        max_tokens=st.sampled_from([2, 30, 300, 1370]),
        attach=st.booleans(),
        others=st.integers(0, 3),
    )
    def requests_are_handed_over(self, prompt: int, max_tokens: int, attach: bool, others: int) -> None:
        for _ in range(1 + others):
            room = self.world.reserve(prompt, max_tokens)
            if self.world.rooms[room].manifest is not None:
                if attach:
                    self.world.attach(room)
                self.world.all_ready(room)

    @rule(at=index, more=st.sampled_from([1, 60, 130]), cut=st.sampled_from([0, 0, 100]), max_tokens=st.sampled_from([2, 300]))
    def a_conversation_goes_on(self, at: int, more: int, cut: int, max_tokens: int) -> None:
        """With everything that was said, or with another end."""
        if (room := self.pick(self.world.that(lambda model: model.truth), at)) is not None:
            said = self.world.rooms[room].tokens
            said = said[: max(0, len(said) - cut)]
            room = self.world.reserve([*said[:1100], *(self.world.token() for _ in range(more))], max_tokens)
            if self.world.rooms[room].manifest is not None:
                self.world.attach(room)
                self.world.all_ready(room)

    @rule(at=index)
    def a_rank_is_ready(self, at: int) -> None:
        if (room := self.pick(self.world.that(unready), at)) is not None:
            self.world.rank_ready(room)

    @rule(at=index)
    def all_ranks_are_ready(self, at: int) -> None:
        if (room := self.pick(self.world.that(unready), at)) is not None:
            self.world.all_ready(room)

    @rule(at=index)
    def a_rank_fails(self, at: int) -> None:
        if (room := self.pick(self.world.that(lambda model: True), at)) is not None:
            self.world.rank_failed(room)

    @rule(at=index)
    def a_rank_repeats_itself(self, at: int) -> None:
        if (room := self.pick(self.world.that(lambda model: model.anchor), at)) is not None:
            ready = self.world.rooms[room].anchor
            assert ready is not None
            if ready.rank not in self.world.rooms[room].unready:
                self.world.apply(ready)

    @rule(at=index)
    def a_rank_drains(self, at: int) -> None:
        if (room := self.pick(self.world.that(undrained), at)) is not None:
            self.world.drained(room)

    @rule(at=index)
    def a_room_drains(self, at: int) -> None:
        if (room := self.pick(self.world.that(undrained), at)) is not None:
            self.world.all_drained(room)

    @rule(at=index, told=st.sampled_from([None, ev.Failure("internal", "stage 2 failed")]), finished=st.booleans())
    def prefill_cancels(self, at: int, told: ev.Failure | None, finished: bool) -> None:
        if (room := self.pick(list(self.world.rooms), at)) is not None:
            self.world.cancel_room(room, told, finished)

    @rule(at=index)
    def someone_cancels(self, at: int) -> None:
        if (room := self.pick(list(self.world.rooms), at)) is not None:
            self.world.cancel_request(room)

    @rule(at=index)
    def a_client_attaches(self, at: int) -> None:
        if (room := self.pick(self.world.that(lambda model: True), at)) is not None:
            self.world.attach(room)

    @rule(at=index)
    def a_client_leaves(self, at: int) -> None:
        if (room := self.pick(self.world.that(attached), at)) is not None:
            self.world.client_gone(room)

    @rule(chance=st.integers(0, 4))
    def prefill_is_lost(self, chance: int) -> None:
        if chance == 0:
            self.world.lose_prefill()

    @rule()
    def a_round_is_planned(self) -> None:
        self.world.launch()

    @precondition(lambda self: self.world.out)
    @rule()
    def a_round_ends(self) -> None:
        self.world.round_done()

    @rule(count=st.sampled_from([1, 3, 20, 400]))
    def rounds_go_on(self, count: int) -> None:
        for _ in range(count):
            self.world.launch_ahead()
            if not self.world.out:
                return
            self.world.round_done()

    @rule(seconds=st.sampled_from([0.5, 10.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        while self.world.out:
            self.world.round_done()
        for room in self.world.that(undrained):
            self.world.all_drained(room)
        self.world.advance(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestDecodeMachine = DecodeMachine.TestCase
TestDecodeMachine.settings = settings(
    max_examples=120, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def live_busily(seed: int, width: int, steps: int) -> DecodeWorld:
    """A long life of a small engine, with requests coming in faster than they can be served."""
    choice = Random(seed)
    world = DecodeWorld(small_shape(verify_width=width, adaptive=bool(seed % 2), num_blocks=14, places=6, num_slots=6), seed)
    for _ in range(steps):
        if world.out and choice.random() < 0.8:
            world.round_done()
        if choice.random() < 0.8:
            world.launch()
        roll = choice.random()
        if roll < 0.10:
            said = [model.tokens[:300] for model in world.rooms.values() if len(model.tokens) > 130][-8:]
            prompt = [world.token() for _ in range(choice.randint(1, 300))]
            prompt = choice.choice(said) + prompt[:40] if said and choice.random() < 0.4 else prompt
            room = world.reserve(prompt, choice.choice([1, 30, 1200, 1200]), ignore_eos=choice.random() < 0.9)
            if world.rooms[room].manifest is not None and choice.random() < 0.98:
                world.attach(room)
        elif roll < 0.25 and (rooms := world.that(unready)):
            room = choice.choice(rooms)
            world.rank_ready(room)
            if world.first_token_is_last(room) and choice.random() < 0.9:
                world.cancel_room(room, finished=True)
        elif roll < 0.30 and (rooms := world.that(undrained)):
            world.drained(choice.choice(rooms))
        elif 0.30 < roll < 0.305 and (rooms := world.that(attached)):
            world.client_gone(choice.choice(rooms))
        elif roll < 0.32 and (rooms := world.that(unready)):
            world.rank_failed(choice.choice(rooms))
        elif roll < 0.325 and world.rooms:
            world.cancel_room(choice.choice(list(world.rooms)))
        elif roll < 0.326:
            world.lose_prefill()
        elif roll < 0.33 and (rooms := world.that(lambda model: model.undrained)):
            late = world.rooms[choice.choice(rooms)].anchor
            if late is not None:
                world.apply(late)
        world.advance(0.02)
    return world


def test_long_busy_lives_with_too_few_blocks_end_as_they_began():
    worlds = [live_busily(seed, width, steps=3000) for seed, width in enumerate([1, 1, 2, 4, 8])]
    kinds = worlds[0].planner.totals.keys() - {"retractions", "restores"}
    unseen = [kind for kind in kinds if not any(world.planner.totals[kind] for world in worlds)]
    assert not unseen, "the runs prove nothing about these"
    for world in worlds:
        world.settle()


def live_scarcely(seed: int, width: int, events: int, images: int) -> DecodeWorld:
    """A life of long answers that outgrow the cache all the time, while people cancel whoever is on the way out or back."""
    choice = Random(seed)
    world = DecodeWorld(
        small_shape(
            verify_width=width, adaptive=False, max_model_len=5000, num_blocks=40, places=8, num_slots=8,
            buckets=(1, 2, 4, 8), image_blocks=images, state_blocks=2,
        ),
        seed,
    )  # fmt: skip
    while world.events < events:
        for _ in range(choice.choice([1, 2, 10])):
            if world.out:
                world.round_done()
            for _ in range(choice.choice([0, 1, 1, 2, 2, 2, 2, 2, 2])):
                world.launch()
        roll = choice.random()
        copying = world.that(lambda model: model.state in COPYING)
        if roll < 0.3 and len(world.that(lambda model: not model.terminal)) < 20:
            said = [model.tokens[:400] for model in world.rooms.values() if len(model.tokens) > 130][-8:]
            prompt = [world.token() for _ in range(choice.randint(1, 300))]
            prompt = choice.choice(said) + prompt[:40] if said and choice.random() < 0.4 else prompt
            room = world.reserve(prompt, choice.choice([30, 500, 2500, 4500, 4500]), timeout=choice.choice([0, 0, 0, 30]))
            if world.rooms[room].manifest is not None:
                world.attach(room)
        elif roll < 0.6 and (rooms := world.that(unready)):
            world.all_ready(room := choice.choice(rooms))
            if choice.random() < 0.05:
                world.cancel_request(room)
        elif roll < 0.62 and copying:
            world.cancel_request(choice.choice(copying))
        elif 0.62 < roll < 0.624 and (rooms := world.that(lambda model: model.state is State.RETRACTED)):
            world.cancel_request(choice.choice(rooms))
        elif 0.624 < roll < 0.63 and (rooms := world.that(attached)):
            world.client_gone(choice.choice(rooms))
        elif 0.63 < roll < 0.632 and (rooms := world.that(unready)):
            world.rank_failed(choice.choice(rooms))
        elif roll < 0.7 and (rooms := world.that(undrained)):
            world.all_drained(choice.choice(rooms))
        if not world.out or choice.random() < 0.2:
            world.advance(0.02)
    return world


def scarcity(events: int) -> list[DecodeWorld]:
    """Lives of a roomy, a tight and no image pool, at several widths."""
    lives = [(32, 100), (32, 24), (64, 100), (16, 60), (32, 0)]  # wide rounds: long answers in few events
    return [live_scarcely(seed, width, events // len(lives), images) for seed, (width, images) in enumerate(lives)]


def serve_to_the_end(world: DecodeWorld) -> None:
    """Nobody new, nobody cancelled: who is here gets the whole answer, or is told why not."""
    for _ in range(20_000):
        for room in world.that(unready):
            world.all_ready(room)
        for room in world.that(undrained):
            world.all_drained(room)
        for room in world.that(lambda model: model.truth and not model.installed and not model.ended):
            world.cancel_room(room, finished=True)  # its first token is its last
        world.launch_ahead()
        if not world.out:
            break
        world.round_done()
    assert not world.planner.requests, "somebody is left, and nothing happens"


def assert_all_was_seen(worlds: list[DecodeWorld]) -> None:
    """Every transition of the table that is this engine's to make, and none that is not."""
    legal = {(before, after) for before in INSTALLED for after in TRANSITIONS[before]}
    seen = set[tuple[State, State]]().union(*(world.transitions for world in worlds))
    assert seen <= legal
    assert legal - seen <= {(State.RESTORING, State.INSTALLED), (State.FINISHING, State.FAILED)}, legal - seen
    for kind in ("retractions", "restores", "capacity_aborts", "prefix_cache_hits"):
        assert any(world.planner.totals[kind] for world in worlds), kind
    for world in worlds:  # whoever ended for want of blocks ended for want of host memory
        ends = [model.end for model in world.rooms.values() if isinstance(model.end, ev.Failure)]
        told = [end.message for end in ends if end.code == "capacity_aborted"]
        assert all("--retraction-snapshot-ratio" in message or "as many as may be" in message for message in told)


def test_lives_of_scarcity_lose_no_block_slot_or_image_and_end_as_they_began():
    worlds = scarcity(events=8_000)
    assert_all_was_seen(worlds)
    for world in worlds:
        serve_to_the_end(world)
        world.settle()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_long_lives_of_scarcity_end_as_they_began():
    worlds = scarcity(events=150_000)
    assert_all_was_seen(worlds)
    assert max(model.retractions for world in worlds for model in world.rooms.values()) >= 3
    for world in worlds:
        serve_to_the_end(world)
        world.settle()
