"""The decode engine: the real planner, and around it replicas that run its rounds in lockstep and a drafter that is right as
often as the constants say."""

from collections import deque
from dataclasses import dataclass
from random import Random

import services.scheduler.decode.events as ev
from services.contracts.arguments import EngineArguments
from services.contracts.geometry import Geometry
from services.contracts.ids import GlobalRank, Place, Room, Token
from services.scheduler.block_keys import BlockKeys
from services.scheduler.decode.planner import DecodePlanner
from services.scheduler.decode.shape import EngineShape
from services.simulate.costs import Costs, Round
from services.simulate.timeline import PlannerTurns, Processors, Timeline, Work

RIGHT, WRONG = Token(1), Token(0)  # every answer is RIGHT, RIGHT, …; a WRONG proposal is not what the target says


@dataclass(slots=True)
class Row:
    """A place's request, as the workers know it."""

    position: int  # of the anchor
    right: int  # proposals of its window that are right, from the first


class Drafter:
    """Draws how many proposals of a window are right."""

    def __init__(self, acceptance: tuple[float, ...], rng: Random):
        self._acceptance, self._rng = acceptance, rng
        self._windows: dict[tuple[int, int], tuple[Token, ...]] = {}

    def draw(self, proposals: int) -> int:
        if not proposals:
            return 0
        drawn, right = self._rng.random(), 0
        while right < min(proposals, len(self._acceptance)) and drawn < self._acceptance[right]:
            right += 1
        return right

    def window(self, right: int, proposals: int, length: int) -> tuple[Token, ...]:
        """The anchor, `proposals` of which the first `right` are so, and padding up to `length`."""
        key = (right, length)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = (RIGHT,) * (1 + right) + (WRONG,) * (length - 1 - right)
        return window


class DecodeEngine:
    """Replicas and the receiving side of handoffs."""

    def __init__(
        self,
        arguments: EngineArguments,
        geometry: Geometry,
        cache: tuple[int, int],
        costs: Costs,
        timeline: Timeline,
        processors: Processors,
        seed: int,
    ):
        self.planner = DecodePlanner(shape_of(arguments, geometry, cache))
        self.turns = PlannerTurns(timeline, self.planner)
        self.turns.launch = self._launch
        self.turns.on[ev.CancelOnAgents] = self._cancel
        self.drafter = Drafter(costs.acceptance, Random(seed))
        self.rounds = 0  # that ran someone
        self.busy = 0.0
        self.live_rows = self.padded_rows = 0
        self.widths: dict[int, int] = {}
        self._timeline, self._processors, self._costs = timeline, processors, costs
        self._tp = geometry.topology.tp_size
        self._width, self._block_bytes = arguments.verify_width, geometry.block_bytes
        self._rows: list[dict[Place, Row]] = [{} for _ in range(geometry.topology.dp_size)]
        self._contexts = [0] * geometry.topology.dp_size
        self._waiting: deque[ev.RoundPlan] = deque()
        self._computing = 0  # replicas
        self._began = 0.0
        self.replicas: dict[Room, int] = {}

    # ---- handoff
    def arrived(self, room: Room, proposals: int, size: int) -> None:
        """Every stage's part of the room is in the pools of its replica: `size` bytes of each rank."""
        window = self.drafter.window(self.drafter.draw(proposals), proposals, self._width)
        first = self.replicas[room] * self._tp
        for rank in range(first, first + self._tp):
            now = self._timeline.now
            self.turns.post(ev.AgentRankReady(GlobalRank(rank), room, 1, RIGHT, window, size, now, now, 0))

    def _cancel(self, effect: ev.CancelOnAgents) -> None:
        for rank in effect.ranks:
            self.turns.post(ev.AgentDrained(rank, effect.room), self._timeline.now + self._costs.control.agents)

    # ---- rounds
    def _launch(self, plan: ev.RoundPlan) -> None:
        self._timeline.after(self._costs.control.round / 2, self._arrive, plan)

    def _arrive(self, plan: ev.RoundPlan) -> None:
        self._waiting.append(plan)
        self._start()

    def _start(self) -> None:
        if self._computing or not self._waiting:
            return
        plan = self._waiting.popleft()
        for replica, part in enumerate(plan.replicas):
            self._prepare(replica, part)
        parts = plan.replicas
        width = max(part.width.width for part in parts)
        proposals = max(part.width.proposals for part in parts)
        live = tuple(len(part.live) for part in parts)
        shape = Round(plan.bucket, width, proposals, live, tuple(self._contexts))
        seconds = self._costs.round(shape) if any(live) else (0.0,) * len(parts)
        entries = tuple(self._run(replica, part) for replica, part in enumerate(parts))
        copied = (it.room for part in parts for it in (*part.retracts, *(restore.install for restore in part.restores)))
        done = ev.RoundDone(plan.round_id, entries, tuple(copied))
        if any(live):
            self.rounds += 1
            self.live_rows += sum(live)
            self.padded_rows += plan.bucket * len(parts)
            self.widths[width] = self.widths.get(width, 0) + 1
        self._computing, self._began = len(parts), self._timeline.now
        for each, part in zip(seconds, parts, strict=True):
            self._processors.run(Work.ROUND, each + self._copying(part), self._ran, done)

    def _copying(self, part: ev.ReplicaPlan) -> float:
        """Seconds that a replica's ranks copy images, each its own, before the rows run."""
        blocks = sum(len(it.image) for it in (*part.retracts, *part.restores))
        return blocks * self._block_bytes / self._costs.host_copy

    def _prepare(self, replica: int, part: ev.ReplicaPlan) -> None:
        """Clears, installs, then images out and in, as the workers take them."""
        rows = self._rows[replica]
        for place in part.clears:
            if (row := rows.pop(place, None)) is not None:
                self._contexts[replica] -= row.position
        for install in part.installs:
            rows[install.place] = Row(install.position, install.window.count(RIGHT) - 1)
            self._contexts[replica] += install.position
        for retract in part.retracts:
            row = rows.pop(retract.place)
            self._contexts[replica] -= row.position
        for restore in part.restores:
            install = restore.install
            rows[install.place] = Row(install.position, install.window.count(RIGHT) - 1)
            self._contexts[replica] += install.position

    def _run(self, replica: int, part: ev.ReplicaPlan) -> tuple[ev.PlaceTokens, ...]:
        """Verify each window, accept, draft the next."""
        rows, width, proposals = self._rows[replica], part.width.width, part.width.proposals
        drafter, entries = self.drafter, list[ev.PlaceTokens]()
        for place in part.live:
            row = rows[place]
            count = 1 + min(row.right, width - 1)
            row.position += count
            self._contexts[replica] += count
            row.right = drafter.draw(proposals)
            entries.append(ev.PlaceTokens(place, (RIGHT,) * count, drafter.window(row.right, proposals, 1 + proposals)))
        return tuple(entries)

    def _ran(self, done: ev.RoundDone) -> None:
        self._computing -= 1
        if self._computing:
            return
        now = self._timeline.now
        self.busy += now - self._began
        self.turns.post(done, now + self._costs.control.round / 2)
        self._start()


def shape_of(arguments: EngineArguments, geometry: Geometry, cache: tuple[int, int]) -> EngineShape:
    """As services.scheduler.decode.fleet makes it of its workers' word."""
    blocks, slots = cache
    return EngineShape(
        engine_id=arguments.engine_id,
        epoch=1,
        replicas=arguments.data_parallel_size,
        tp_size=arguments.attn_tp_size,
        places=arguments.replica_seqs,
        num_blocks=blocks,
        num_slots=slots,
        verify_width=arguments.verify_width,
        adaptive=arguments.speculative_adaptive,
        max_model_len=arguments.max_model_len,
        end_tokens=frozenset(map(Token, geometry.model.eos_token_ids)),
        buckets=arguments.buckets(),
        graphs=not arguments.enforce_eager,
        request_timeout=arguments.request_timeout,
        keys=BlockKeys() if arguments.enable_prefix_caching else None,
        image_blocks=arguments.image_blocks(geometry, blocks, slots),
        state_blocks=geometry.state_blocks,
    )
