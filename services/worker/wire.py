"""The worker's messages: what its scheduler asks, what it reports. Protobuf stops here."""

from dataclasses import dataclass
from enum import Enum

from k3mesh.errors import Internal
from k3mesh.v1 import common_pb2, worker_pb2
from services.contracts.ids import NULL_SLOT
from services.worker.speculative.sampling import Sampling

# ---- scheduler -> worker


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """Prompt positions [start, end) of one request. Blocks are appended to its table, `sampling` is set on the last chunk."""

    request_id: str
    room: int
    start: int
    end: int
    last: bool
    tokens: bytes  # little-endian uint32 each
    new_blocks: tuple[int, ...]
    slot: int
    sampling: Sampling | None
    prefix_tokens: int
    next_token: int = 0  # at position `end`; nothing on the last chunk
    proposals: int = 0  # to be drafted on the last chunk
    load_slot: int = NULL_SLOT  # a slot to take the KDA state at `start` from
    save_slot: int = NULL_SLOT  # a slot that gets the state at `end` too


@dataclass(frozen=True, slots=True)
class PrefillStep:
    step_id: int
    rows: tuple[ChunkRow, ...]


class Mode(Enum):
    """How a round runs; every rank of the engine gets the same."""

    LOW_LATENCY_GRAPH = worker_pb2.ROUND_MODE_LOW_LATENCY_GRAPH
    LOW_LATENCY_EAGER = worker_pb2.ROUND_MODE_LOW_LATENCY_EAGER
    NORMAL_EAGER = worker_pb2.ROUND_MODE_NORMAL_EAGER


@dataclass(frozen=True, slots=True)
class PlaceInstall:
    """A place's new request. `window[0]` is the anchor, at `position`; its rows are not in the cache yet."""

    place: int
    room: int
    blocks: tuple[int, ...]
    slot: int
    position: int
    window: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class BlockDelta:
    place: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlaceRetract:
    """The place's request, whose anchor is at `position`, goes to its image: data blocks in order, then its KDA state."""

    place: int
    room: int
    position: int
    image: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlaceRestore:
    """A request comes back from its image, but for its first `found` blocks, which have their rows already."""

    install: PlaceInstall
    found: int
    image: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Changes first (clears, installs, deltas, retracts, restores), then one round of the live places padded to `bucket`
    rows."""

    round_id: int
    bucket: int
    mode: Mode
    installs: tuple[PlaceInstall, ...]
    clears: tuple[int, ...]
    deltas: tuple[BlockDelta, ...]
    live: tuple[int, ...]
    width: int = 1  # rows of each window that are verified
    proposals: int = 0  # drafted behind each new anchor
    most_proposals: int = 0  # of any replica in this round
    retracts: tuple[PlaceRetract, ...] = ()
    restores: tuple[PlaceRestore, ...] = ()


@dataclass(frozen=True, slots=True)
class ForgetRooms:
    rooms: tuple[int, ...]


Command = PrefillStep | RoundPlan | ForgetRooms


def command(message: worker_pb2.WorkerCommand) -> Command:
    """The work that a command asks for. Internal if it asks for none that a worker knows."""
    kind = message.WhichOneof("command")
    if kind == "prefill":
        return PrefillStep(message.prefill.step_id, tuple(map(_chunk_row, message.prefill.rows)))
    if kind == "round":
        return _round_plan(message.round)
    if kind == "forget":
        return ForgetRooms(tuple(message.forget.rooms))
    raise Internal(f"a worker command of kind {kind!r} cannot follow Introduce; scheduler and worker must be of one version")


def _chunk_row(row: worker_pb2.ChunkRow) -> ChunkRow:
    return ChunkRow(
        request_id=row.request_id,
        room=row.room,
        start=row.start,
        end=row.end,
        last=row.last,
        tokens=row.tokens,
        new_blocks=tuple(row.new_blocks),
        slot=row.slot,
        sampling=_sampling(row.sampling) if row.HasField("sampling") else None,
        prefix_tokens=row.prefix_tokens,
        next_token=row.next_token,
        proposals=row.proposals,
        load_slot=row.load_slot,
        save_slot=row.save_slot,
    )


def _round_plan(plan: worker_pb2.RoundPlan) -> RoundPlan:
    try:
        mode = Mode(plan.mode)
    except ValueError as error:
        raise Internal(f"round {plan.round_id} names mode {plan.mode}; a worker knows {[m.value for m in Mode]}") from error
    return RoundPlan(
        round_id=plan.round_id,
        bucket=plan.bucket,
        mode=mode,
        installs=tuple(map(_install, plan.installs)),
        clears=tuple(plan.clears),
        deltas=tuple(BlockDelta(delta.place, tuple(delta.blocks)) for delta in plan.deltas),
        live=tuple(plan.live),
        width=plan.width,
        proposals=plan.proposals,
        most_proposals=plan.most_proposals,
        retracts=tuple(PlaceRetract(it.place, it.room, it.position, tuple(it.image)) for it in plan.retracts),
        restores=tuple(PlaceRestore(_install(it.install), it.found, tuple(it.image)) for it in plan.restores),
    )


def _install(it: worker_pb2.PlaceInstall) -> PlaceInstall:
    return PlaceInstall(it.place, it.room, tuple(it.blocks), it.slot, it.position, tuple(it.window), _sampling(it.sampling))


def _sampling(sampling: common_pb2.Sampling) -> Sampling:
    """What chooses a token; when to stop is the scheduler's business."""
    return Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed)


# ---- worker -> scheduler


@dataclass(frozen=True, slots=True)
class WorkerHello:
    engine_id: str
    engine_epoch: int
    rank: int
    num_blocks: int
    num_slots: int
    model_fingerprint: str
    model_name: str
    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_position: int
    draft_fingerprint: str = ""
    image_blocks: int = 0
    state_blocks: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    room: int
    token: int
    window: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepDone:
    step_id: int
    stage: int
    started: float  # Unix seconds, of the stage's own compute
    ended: float
    first_tokens: tuple[FirstToken, ...]


@dataclass(frozen=True, slots=True)
class PlaceTokens:
    place: int
    tokens: tuple[int, ...]
    window: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundResult:
    round_id: int
    replica: int
    tokens: tuple[PlaceTokens, ...]
    started: float
    ended: float
    copied: tuple[int, ...] = ()  # rooms whose images every rank of the replica has written or read


Report = StepDone | RoundResult


def hello(it: WorkerHello) -> worker_pb2.WorkerHello:
    return worker_pb2.WorkerHello(
        engine_id=it.engine_id,
        engine_epoch=it.engine_epoch,
        rank=it.rank,
        num_blocks=it.num_blocks,
        num_slots=it.num_slots,
        model_fingerprint=it.model_fingerprint,
        model_name=it.model_name,
        vocab_size=it.vocab_size,
        end_token_ids=it.end_token_ids,
        max_position=it.max_position,
        draft_fingerprint=it.draft_fingerprint,
        image_blocks=it.image_blocks,
        state_blocks=it.state_blocks,
    )


def report(it: Report) -> worker_pb2.WorkerReport:
    match it:
        case StepDone():
            first = [worker_pb2.FirstToken(room=f.room, token=f.token, window=f.window) for f in it.first_tokens]
            step = worker_pb2.StepDone(
                step_id=it.step_id, stage=it.stage, started=it.started, ended=it.ended, first_tokens=first
            )
            return worker_pb2.WorkerReport(step=step)
        case RoundResult():
            done = worker_pb2.RoundResult(
                round_id=it.round_id,
                replica=it.replica,
                started=it.started,
                ended=it.ended,
                places=[p.place for p in it.tokens],
                counts=[len(p.tokens) for p in it.tokens],
                tokens=[token for p in it.tokens for token in p.tokens],
                proposals=[token for p in it.tokens for token in p.window[1:]],
                copied=it.copied,
            )
            return worker_pb2.WorkerReport(round=done)
