"""Thousands of random histories of the prefill planner: loss, cancels, refusals, deadlines, in every order that the
contracts allow. tests/lib/prefill_world.py checks each effect, the planner's own invariants are checked after each event."""

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import services.scheduler.prefill.events as ev
from tests.lib.prefill_world import OTHER, World, limits

PROMPTS = st.one_of(st.integers(1, 700), st.sampled_from([128, 129, 512, 1024, 2047, 2048, 3000]))
TRANSFER_ERRORS = st.sampled_from(["PD_TRANSFER", "PD_BYTES", "PD_PEER_DEAD"])

WHICH = st.integers(0, 1 << 16)  # one of the candidates


def pick(candidates: Sequence[Any], which: int) -> Any:
    return candidates[which % len(candidates)]


class Histories(RuleBasedStateMachine):
    world: World

    @initialize(
        stages=st.integers(1, 3), tp=st.integers(1, 2), blocks=st.integers(26, 60), slots=st.integers(2, 6),
        seqs=st.integers(1, 4), chunk=st.sampled_from([128, 256, 512, 1024]), width=st.sampled_from([1, 8]),
        places=st.integers(1, 5),
    )  # fmt: skip
    def start(self, stages: int, tp: int, blocks: int, slots: int, seqs: int, chunk: int, width: int, places: int) -> None:
        shape = limits(
            stages=stages, tp_size=tp, num_blocks=blocks, num_slots=slots, max_num_seqs=seqs, chunk_tokens=chunk,
            verify_width=width,
        )  # fmt: skip
        self.world = World(shape, places)
        self.world.connect()

    @rule(
        prompt=PROMPTS, max_tokens=st.sampled_from([1, 2, 50]), timeout=st.sampled_from([1.0, 20.0, 300.0]),
        stops=st.sampled_from([(), (OTHER,)]), ignore_eos=st.booleans(), family=st.sampled_from(["", "a", "a", "b"]),
        like=st.integers(0, 8),
    )  # fmt: skip
    def arrive(self, **how: Any) -> None:
        if not self.world.stopped:
            how["stop_token_ids"] = how.pop("stops")
            self.world.arrive(how.pop("prompt"), **how)

    @rule(prompts=st.lists(st.tuples(PROMPTS, st.sampled_from("ab"), st.sampled_from([2, 5, 20])), min_size=1, max_size=3))
    def prompts_go_through(self, prompts: list[tuple[int, str, int]]) -> None:
        """Alike, so that some find what others left, and some compute the same at once."""
        if self.world.stopped or self.world.planner.decode is None:
            return
        for prompt, family, like in prompts:
            self.world.arrive(prompt, family=family, like=like, timeout=300.0)
            while self.world.decide() or self.world.hear_decode():
                pass
        for pair in sorted(self.world.offers):
            self.world.offer(pair)
        self.world.settle()

    @rule(refuse=st.sampled_from([None, None, None, None, ev.Failure("bad_request", "too long for D")]))
    def decode_decides(self, refuse: ev.Failure | None) -> None:
        self.world.decide(refuse=refuse)

    @rule(times=st.integers(1, 3))
    def decode_is_heard(self, times: int) -> None:
        for _ in range(times):
            self.world.hear_decode()

    @rule(which=WHICH, times=st.integers(1, 4))
    def manifests_arrive(self, which: int, times: int) -> None:
        for _ in range(times):
            if self.world.offers:
                self.world.offer(pick(sorted(self.world.offers), which))

    @rule(stage=st.integers(0, 2), times=st.integers(1, 3))
    def stages_answer(self, stage: int, times: int) -> None:
        for _ in range(times):
            if not self.world.stopped:
                self.world.answer_step(stage % self.world.limits.stages)

    @rule()
    def all_stages_answer(self) -> None:
        for stage in range(self.world.limits.stages):
            while not self.world.stopped and self.world.answer_step(stage):
                pass

    @rule(which=WHICH, times=st.integers(1, 4))
    def ranks_send(self, which: int, times: int) -> None:
        for _ in range(times):
            if pairs := self.world.sendable():
                self.world.ack(pick(pairs, which))

    @rule(which=WHICH, times=st.integers(1, 4))
    def ranks_release(self, which: int, times: int) -> None:
        for _ in range(times):
            if self.world.acked:
                self.world.release(pick(sorted(self.world.acked), which))

    @rule(which=WHICH)
    def decode_installs(self, which: int) -> None:
        if rooms := self.world.installable():
            self.world.install(pick(rooms, which))

    @rule(which=WHICH, times=st.integers(1, 4))
    def ranks_drain(self, which: int, times: int) -> None:
        for _ in range(times):
            if self.world.draining:
                self.world.drain(pick(sorted(self.world.draining), which))

    @rule(which=WHICH)
    def decode_lets_go(self, which: int) -> None:
        rooms = sorted(room for room, state in self.world.on_decode.items() if state != "reserved")
        if rooms:
            self.world.leave_decode(pick(rooms, which))

    @rule(which=WHICH, detail=TRANSFER_ERRORS)
    def an_agent_fails(self, which: int, detail: str) -> None:
        if self.world.armed:
            pair = pick(sorted(self.world.armed), which)
            self.world.agent_fails(pair, ev.Failure("transfer_failed", "it broke", detail))

    @rule(which=WHICH, detail=st.one_of(st.none(), TRANSFER_ERRORS))
    def decode_gives_a_room_up(self, which: int, detail: str | None) -> None:
        """D cancels or fails it: its agents tell ours, who say so before D's word comes."""
        rooms = sorted(room for room, state in self.world.on_decode.items() if state == "reserved")
        if not rooms:
            return
        room = pick(rooms, which)
        self.world.offers = {pair for pair in self.world.offers if pair[0] != room}
        self.world.leave_decode(room, detail and ev.Failure("transfer_failed", "it broke on D", detail))
        for pair in sorted(pair for pair in self.world.armed if pair[0] == room):
            if (which + pair[1]) % 2:
                self.world.agent_fails(pair, ev.Failure("cancelled", "D cancelled"))

    @rule(which=WHICH)
    def a_client_cancels(self, which: int) -> None:
        if self.world.clients and not self.world.stopped:
            self.world.post(ev.CancelRequested(pick(sorted(self.world.clients), which), "changed its mind"))

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.5, 2.5, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @precondition(lambda self: self.world.now > 10)
    @rule(back=st.booleans())
    def decode_is_lost(self, back: bool) -> None:
        self.world.lose_decode()
        if back and not self.world.stopped:
            self.world.connect()

    @precondition(lambda self: len(self.world.steps) > 10)
    @rule()
    def the_engine_is_lost(self) -> None:
        if not self.world.stopped:
            self.world.post(ev.EngineFailed(ev.Failure("engine_lost", "a worker died")))

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if not world.stopped:
            world.post(ev.DrainAsked())
            if world.planner.decode is None:
                world.connect()
        world.settle()
        world.check_at_rest()


Histories.TestCase.settings = settings(
    max_examples=200, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
