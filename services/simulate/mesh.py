"""A simulated mesh: cells of one prefill and one decode engine each, their clients, and what goes between them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import services.scheduler.decode.events as dec
import services.scheduler.prefill.events as pre
from services.contracts.arguments import EngineArguments
from services.contracts.geometry import Geometry
from services.contracts.ids import BLOCK_TOKENS, BlockKey, Replica, RequestId, Room, Token
from services.contracts.messages import Failure, Sampling
from services.simulate.costs import Costs
from services.simulate.decode import RIGHT, DecodeEngine
from services.simulate.network import Network
from services.simulate.prefill import PrefillEngine
from services.simulate.record import Record
from services.simulate.timeline import OwnProcessors, Processors, SharedProcessors, Timeline
from services.simulate.workload import Asked

PAIR = dec.Pair(1)


@dataclass(frozen=True)
class Shape:
    """What one cell is made of: both engines' arguments, cache fields, and (blocks, slots) of a rank."""

    prefill: EngineArguments
    decode: EngineArguments
    prefill_geometry: Geometry
    decode_geometry: Geometry
    prefill_cache: tuple[int, int]
    decode_cache: tuple[int, int]


class Cell:
    """One pair of engines with its own queue."""

    def __init__(self, shape: Shape, costs: Costs, timeline: Timeline, processors: Processors, seed: int, mesh: "Mesh"):
        self._timeline, self._costs, self._mesh = timeline, costs, mesh
        self._timeout = shape.prefill.request_timeout
        stages, replicas = shape.prefill_geometry.topology.stages, shape.decode_geometry.topology.dp_size
        self.network = Network(timeline, stages, replicas, costs.nic)
        self.prefill = PrefillEngine(
            shape.prefill, shape.prefill_geometry, shape.prefill_cache, costs, timeline, processors, self.network, seed
        )
        self.decode = DecodeEngine(
            shape.decode, shape.decode_geometry, shape.decode_cache, costs, timeline, processors, seed + 1
        )
        self.records: dict[RequestId, Record] = {}
        self._by_room: dict[Room, Record] = {}
        self._by_client: dict[dec.Client, Record] = {}
        self._left: dict[Room, int] = {}  # parts of the handoff that D lacks: the stages', and the last stage's word
        self._proposals: dict[Room, int] = {}
        self._stages, self._tp = stages, shape.decode_geometry.topology.tp_size
        self._caching = shape.prefill.enable_prefix_caching
        self._clients = 0
        self._wire()
        most = self.decode.planner.shape.max_request_tokens
        self.prefill.turns.post(pre.DecodeConnected(shape.decode.engine_id, 1, most))
        self.decode.turns.post(dec.PrefillPaired(PAIR, shape.prefill.engine_id))

    def _wire(self) -> None:
        p, d = self.prefill, self.decode
        p.launched, p.prefilled, p.sent = self._launched, self._prefilled, self._sent
        p.turns.on |= {
            pre.Reserve: self._reserve,
            pre.CancelOnDecode: self._cancel_on_decode,
            pre.PublishAttached: self._attached,
            pre.PublishTokens: self._first_token_on_prefill,
            pre.PublishFinished: self._finished_on_prefill,
            pre.PublishFailure: self._failed_on_prefill,
        }
        d.turns.on |= {
            dec.AnswerReserve: self._answered,
            dec.CapacityFreed: lambda _: self._to_prefill(pre.CapacityFreed()),
            dec.RoomInstalled: lambda effect: self._to_prefill(pre.RoomInstalled(effect.room)),
            dec.RoomEnded: lambda effect: self._to_prefill(pre.RoomEnded(effect.room, effect.failure)),
            dec.PublishTokens: self._tokens,
            dec.PublishEnd: self._ended,
        }

    # ---- clients
    def submit(self, record: Record) -> None:
        """The client sends its request now."""
        request_id = RequestId(f"r{record.number}")
        record.sent = self._timeline.now
        self.records[request_id] = record
        asked = record.asked
        sampling = Sampling(max_tokens=asked.output_tokens, ignore_eos=True)
        event = pre.RequestArrived(request_id, asked.prompt_tokens, sampling, self._timeout, self._keys(request_id, asked))
        self.prefill.turns.post(event, self._timeline.now + self._costs.control.client)

    def _keys(self, request_id: RequestId, asked: Asked) -> tuple[BlockKey, ...]:
        """Names of the prompt's full blocks; those of one prefix are the same for all who have it."""
        if not self._caching:
            return ()
        shared = asked.prefix_tokens // BLOCK_TOKENS if asked.prefix else 0
        names = (f"{asked.prefix if n < shared else request_id}/{n}" for n in range((asked.prompt_tokens - 1) // BLOCK_TOKENS))
        return tuple(BlockKey(name.encode()) for name in names)

    def _attached(self, effect: pre.PublishAttached) -> None:
        self._clients += 1
        client = dec.Client(self._clients)
        self._by_client[client] = self.records[effect.request_id]
        event = dec.ClientAttached(client, effect.request_id, effect.room)
        self.decode.turns.post(event, self._timeline.now + 2 * self._costs.control.client)

    def _tokens(self, effect: dec.PublishTokens) -> None:
        for client, tokens in effect.said:
            self._count(self._by_client[client], len(tokens))

    def _first_token_on_prefill(self, effect: pre.PublishTokens) -> None:
        self._count(self.records[effect.request_id], len(effect.tokens))

    def _count(self, record: Record, tokens: int) -> None:
        if not record.tokens:
            record.first_token = self._timeline.now + self._costs.control.client
            self._mesh.first_token()
        record.tokens += tokens
        self._mesh.tokens_at[int(self._timeline.now)] += tokens

    def _ended(self, effect: dec.PublishEnd) -> None:
        if not isinstance(effect.end, dec.ToldByPrefill):
            failure = effect.end if isinstance(effect.end, Failure) else None
            self._over(self._by_client.pop(effect.client), failure)

    def _finished_on_prefill(self, effect: pre.PublishFinished) -> None:
        self._over(self.records[effect.request_id], None)

    def _failed_on_prefill(self, effect: pre.PublishFailure) -> None:
        self._over(self.records[effect.request_id], effect.failure)

    def _over(self, record: Record, failure: Failure | None) -> None:
        record.finished = self._timeline.now + self._costs.control.client
        record.failure = failure.code if failure else ""
        self._mesh.over()

    # ---- between the schedulers
    def _to_prefill(self, event: pre.RoomEvent | pre.CapacityFreed) -> None:
        self.prefill.turns.post(event, self._timeline.now + self._costs.control.schedulers)

    def _reserve(self, effect: pre.Reserve) -> None:
        record = self._by_room[effect.room] = self.records[effect.request_id]
        unnamed = effect.prompt_tokens - len(effect.keys) * BLOCK_TOKENS  # unlike anybody's, or answers would be alike, too
        tail = (Token(2 + record.number),) + (RIGHT,) * (unnamed - 1) if self._caching else ()
        asked = dec.ReserveAsked(
            PAIR, effect.request_id, effect.room, effect.attempt, effect.prompt_tokens, b"", effect.sampling, effect.timeout,
            effect.keys, tail,
        )  # fmt: skip
        self.decode.turns.post(asked, self._timeline.now + self._costs.control.schedulers)

    def _answered(self, effect: dec.AnswerReserve) -> None:
        now, room = self._timeline.now, effect.room
        if effect.accepted:
            assert effect.replica is not None
            self._by_room[room].reserved = now
            self.decode.replicas[room] = effect.replica
            self.prefill.reserved(room, effect.replica)
            self._left[room] = self._stages + 1
            self._timeline.after(self._costs.control.agents, self.prefill.agents_ready, room)
        replica = effect.replica or Replica(0)
        answer = pre.ReserveAnswered(room, effect.accepted, replica, effect.prefix_tokens, effect.proposals, effect.failure)
        self.prefill.turns.post(answer, now + self._costs.control.schedulers)

    def _cancel_on_decode(self, effect: pre.CancelOnDecode) -> None:
        cancel = dec.CancelRoom(PAIR, effect.room, effect.reason, effect.failure, effect.finished_on_prefill)
        self.decode.turns.post(cancel, self._timeline.now + self._costs.control.schedulers)

    # ---- the handoff
    def _launched(self, room: Room, first: bool) -> None:
        record = self._by_room[room]
        record.chunks += 1
        if first:
            record.started = self._timeline.now

    def _prefilled(self, room: Room, proposals: int) -> None:
        self._by_room[room].prefilled = self._timeline.now
        self._proposals[room] = proposals
        self._one_less(room)

    def _sent(self, room: Room, size: int) -> None:
        self._by_room[room].bytes += size
        self._one_less(room)

    def _one_less(self, room: Room) -> None:
        self._left[room] -= 1
        if not self._left[room]:
            del self._left[room]
            record = self._by_room[room]
            record.transferred = self._timeline.now
            self.decode.arrived(room, self._proposals.pop(room), record.bytes // self._tp)


class Mesh:
    """All cells on one timeline. Requests go to the cells in turn, as a balancer before them would do it."""

    def __init__(self, shape: Shape, costs: Costs, cells: int, seed: int):
        self.shape = shape
        self.timeline = Timeline()
        shared = costs.contention
        processors = SharedProcessors(self.timeline, shared.speeds) if shared else OwnProcessors(self.timeline)
        self.cells = [Cell(shape, costs, self.timeline, processors, seed + 2 * n, self) for n in range(cells)]
        self.tokens_at: Counter[int] = Counter()  # by second
        self._waiting: list[Record] = []
        self._lanes = 0  # besides the first, not open yet
        self._costs = costs

    def run(self, asked: Sequence[Asked], at_once: int | None = None, lead: bool = False) -> list[Record]:
        """Until every request is over and nothing is on its way. `at_once`: so many are under way, whatever their times of
        arrival; the next is sent when one is over. `lead`: of these, the first is alone until it has its first token."""
        records = [Record(number, it) for number, it in enumerate(asked)]
        if at_once is None:
            for record in records:
                self.timeline.at(record.asked.arrival_s, self._submit, record)
        else:
            self._waiting, self._lanes = records[::-1], at_once - 1
            self.timeline.at(0.0, self._submit, self._waiting.pop())
            if not lead:
                self._open_lanes()
        self.timeline.run()
        return records

    def _submit(self, record: Record) -> None:
        self.cells[record.number % len(self.cells)].submit(record)

    def first_token(self) -> None:
        """A client has one."""
        if self._lanes:
            self.timeline.after(self._costs.control.client, self._open_lanes)

    def _open_lanes(self) -> None:
        for _ in range(min(self._lanes, len(self._waiting))):
            self.timeline.after(0.0, self._submit, self._waiting.pop())
        self._lanes = 0

    def over(self) -> None:
        """A client has its end."""
        if self._waiting:
            self._submit(self._waiting.pop())
