"""The prefill engine: the real planner, and around it stages that run its steps one after the other."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import services.scheduler.prefill.events as ev
from services.contracts.arguments import EngineArguments
from services.contracts.geometry import PAGED, SLOT, Geometry, blocks_for
from services.contracts.ids import BLOCK_TOKENS, GlobalRank, Room, Token
from services.scheduler.prefill.admission import Limits
from services.scheduler.prefill.planner import PrefillPlanner
from services.simulate.costs import Chunk, Costs
from services.simulate.network import Network, Part
from services.simulate.timeline import PlannerTurns, Processors, Timeline, Work

FIRST_TOKEN = Token(1)


@dataclass(slots=True)
class Stage:
    """One pipeline stage: its steps in order, and how long it worked."""

    waiting: deque[ev.PrefillStep] = field(default_factory=deque[ev.PrefillStep])
    running: bool = False
    busy: float = 0.0
    in_flight: float = 0.0  # seconds in which some step was in the pipeline


class PrefillEngine:
    """Stages, hops and the sending side of handoffs. What others must hear goes to the callbacks that mesh sets."""

    def __init__(
        self,
        arguments: EngineArguments,
        geometry: Geometry,
        cache: tuple[int, int],
        costs: Costs,
        timeline: Timeline,
        processors: Processors,
        network: Network,
        seed: int,
    ):
        self.planner = PrefillPlanner(limits_of(arguments, geometry, cache), Random(seed))
        self.turns = PlannerTurns(timeline, self.planner)
        self.turns.launch = self._launch
        self.turns.on[ev.CancelOnAgents] = self._cancel
        self.stages = [Stage() for _ in range(geometry.topology.stages)]
        self.prefilled: Callable[[Room, int], None] = _unset  # room, proposals: first token and window are there
        self.launched: Callable[[Room, bool], None] = _unset  # room, whether this is its first chunk
        self.sent: Callable[[Room, int], None] = _unset  # room, bytes: the last part of it is on D
        self.steps = self.chunks = 0
        self._timeline, self._processors, self._costs, self._network = timeline, processors, costs, network
        self._geometry = geometry
        self._interval = arguments.disaggregation_layerwise_interval
        self._block_bytes = [geometry.bytes_of_stage(n, PAGED) for n in range(len(self.stages))]
        self._slot_bytes = [geometry.bytes_of_stage(n, SLOT) for n in range(len(self.stages))]
        self._intervals = [_intervals(len(geometry.producer_steps(n)), self._interval) for n in range(len(self.stages))]
        self._sent_blocks: dict[tuple[Room, int], int] = {}  # by stage
        self._sent_bytes: dict[tuple[Room, int], int] = {}
        self._replicas: dict[Room, int] = {}
        self._over: set[Room] = set()  # cancelled: nothing of them is sent any more
        self._in_pipeline, self._since = 0, 0.0

    @property
    def in_flight(self) -> float:
        """Seconds in which some step was in the pipeline."""
        return self.stages[0].in_flight

    def reserved(self, room: Room, replica: int) -> None:
        """D has a place for the room on this replica."""
        self._replicas[room] = replica

    def agents_ready(self, room: Room) -> None:
        for rank in range(self._geometry.topology.world_size):
            self.turns.post(ev.RoomReady(GlobalRank(rank), room))

    # ---- steps
    def _launch(self, step: ev.PrefillStep) -> None:
        self.steps += 1
        self.chunks += len(step.rows)
        if not self._in_pipeline:
            self._since = self._timeline.now
        self._in_pipeline += 1
        for row in step.rows:
            self.launched(row.room, (row.room, 0) not in self._sent_blocks)
            for stage in range(len(self.stages)):
                self._sent_blocks.setdefault((row.room, stage), row.prefix_tokens // BLOCK_TOKENS)
        self._timeline.after(self._costs.control.step, self._arrive, 0, step)

    def _arrive(self, stage: int, step: ev.PrefillStep) -> None:
        self.stages[stage].waiting.append(step)
        self._start(stage)

    def _start(self, stage: int) -> None:
        it = self.stages[stage]
        if it.running or not it.waiting:
            return
        it.running = True
        step = it.waiting.popleft()
        seconds = self._costs.stage(stage, [Chunk(row.start, row.end, row.last) for row in step.rows])
        self._processors.run(Work.STAGE, seconds, self._ran, stage, step, self._timeline.now)

    def _ran(self, stage: int, step: ev.PrefillStep, began: float) -> None:
        it, now = self.stages[stage], self._timeline.now
        it.running = False
        it.busy += now - began
        last = stage == len(self.stages) - 1
        tokens = sum(row.end - row.start for row in step.rows)
        if not last:
            arrives = self._network.hop(stage, self._costs.hop(stage, tokens))
            self._timeline.at(arrives, self._arrive, stage + 1, step)
        first = tuple(ev.FirstToken(row.room, FIRST_TOKEN) for row in step.rows if row.last) if last else ()
        done = ev.StepDone(step.step_id, stage, began, now, first)
        self.turns.post(done, now + self._costs.control.step)
        for row in step.rows:
            self._send(stage, row, began)
        if last:
            self._left_pipeline(step)
        self._start(stage)

    def _left_pipeline(self, step: ev.PrefillStep) -> None:
        self._in_pipeline -= 1
        if not self._in_pipeline:
            self.stages[0].in_flight += self._timeline.now - self._since
        for row in step.rows:
            if row.last and row.room not in self._over:
                self.prefilled(row.room, row.proposals)

    # ---- handoff
    def _send(self, stage: int, row: ev.ChunkRow, began: float) -> None:
        """What the stage has written of this chunk goes out: full blocks, at the end the rest and the slot."""
        room, key = row.room, (row.room, stage)
        if room in self._over:
            return
        behind = blocks_for(row.end) if row.last else row.end // BLOCK_TOKENS
        blocks = max(0, behind - self._sent_blocks[key])
        self._sent_blocks[key] += blocks
        size = blocks * self._block_bytes[stage] + (self._slot_bytes[stage] if row.last else 0)
        self._sent_bytes[key] = self._sent_bytes.get(key, 0) + size
        part = Part(stage, self._replicas[room], size, began, self._timeline.now, self._intervals[stage])
        arrives = self._network.send(part) + self._costs.control.transfer
        if row.last:
            self._timeline.at(arrives, self._released, room, stage)

    def _released(self, room: Room, stage: int) -> None:
        """D has all of this stage's ranks."""
        size = self._sent_bytes.pop((room, stage), 0)
        del self._sent_blocks[room, stage]
        if room in self._over:
            return
        topology = self._geometry.topology
        for rank in self._ranks_of(stage):
            self.turns.post(ev.SourceReleased(rank, room, size))
        self.sent(room, size * topology.tp_size)

    def _ranks_of(self, stage: int) -> Sequence[GlobalRank]:
        topology = self._geometry.topology
        first = topology.rank_of(stage, 0, 0)
        return [GlobalRank(rank) for rank in range(first, first + topology.tp_size)]

    def _cancel(self, effect: ev.CancelOnAgents) -> None:
        self._over.add(effect.room)
        for rank in effect.ranks:
            self.turns.post(ev.Drained(rank, effect.room), self._timeline.now + self._costs.control.agents)


def _intervals(steps: int, interval: int) -> int:
    """Parts in which a stage's share of a chunk leaves; 1: all of it when the stage is done."""
    return max(1, -(-steps // interval)) if interval else 1


def limits_of(arguments: EngineArguments, geometry: Geometry, cache: tuple[int, int]) -> Limits:
    """As services.scheduler.prefill.fleet makes them of its workers' word."""
    blocks, slots = cache
    return Limits(
        engine_id=arguments.engine_id,
        stages=arguments.pipeline_parallel_size,
        tp_size=arguments.attn_tp_size,
        num_blocks=blocks,
        num_slots=slots,
        max_num_seqs=arguments.max_num_seqs,
        chunk_tokens=arguments.chunked_prefill_size,
        max_model_len=arguments.max_model_len,
        vocab_size=geometry.model.vocab_size,
        end_tokens=frozenset(geometry.model.eos_token_ids),
        verify_width=arguments.verify_width,
    )


def _unset(*_: Any) -> None:
    raise RuntimeError("the mesh sets this")
