"""The decode scheduler's messages on and off the wire. Protobuf stops here: inside are frozen dataclasses."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from k3mesh.v1 import request_pb2, transfer_pb2, worker_pb2
from services.contracts.ids import BlockKey, GlobalRank, Place, Replica, RequestId, Room, Token
from services.contracts.placement import Manifest
from services.runtime.wire import failure, manifest, read_failure, read_sampling, sampling
from services.scheduler.block_keys import tokens_of
from services.scheduler.decode import events as ev
from services.scheduler.decode.buckets import RoundMode
from services.scheduler.wire import REASONS, AgentHello, PrefillHello, WorkerHello, agent_hello, worker_hello

MODES = {
    RoundMode.LOW_LATENCY_GRAPH: worker_pb2.ROUND_MODE_LOW_LATENCY_GRAPH,
    RoundMode.LOW_LATENCY_EAGER: worker_pb2.ROUND_MODE_LOW_LATENCY_EAGER,
}


# ---- prefill scheduler
@dataclass(frozen=True, slots=True)
class DecodeHello:
    engine_id: str
    engine_epoch: int
    client_address: str
    replicas: int
    tp_size: int
    verify_width: int
    max_model_len: int
    max_request_tokens: int


ToPrefill = DecodeHello | ev.AnswerReserve | ev.CapacityFreed | ev.RoomInstalled | ev.RoomEnded | ev.Failure


def prefill_hello(message: request_pb2.PrefillToDecode) -> PrefillHello | None:
    """None: the message is another one."""
    if message.WhichOneof("message") != "hello":
        return None
    it = message.hello
    return PrefillHello(
        engine_id=it.engine_id,
        engine_epoch=it.engine_epoch,
        stages=it.stages,
        tp_size=it.tp_size,
        agents=tuple(it.agents),
        model_fingerprint=it.model_fingerprint,
        verify_width=it.verify_width,
        max_model_len=it.max_model_len,
    )


def prefill_event(pair: ev.Pair, message: request_pb2.PrefillToDecode) -> ev.ReserveAsked | ev.CancelRoom | None:
    """What the prefill scheduler asks for; None for a message that a newer one may send."""
    match message.WhichOneof("message"):
        case "reserve":
            it = message.reserve
            return ev.ReserveAsked(
                pair=pair,
                request_id=RequestId(it.request_id),
                room=Room(it.room),
                attempt=it.attempt,
                prompt_tokens=it.prompt_tokens,
                prompt_hash=it.prompt_hash,
                sampling=read_sampling(it.sampling),
                timeout=it.timeout_ms / 1000,
                keys=tuple(map(BlockKey, it.block_keys)),
                tail=tuple(tokens_of(it.tail)),
            )
        case "cancel":
            it = message.cancel
            told = read_failure(it.failure) if it.HasField("failure") else None
            return ev.CancelRoom(pair, Room(it.room), it.reason, told, it.finished_on_prefill)
        case _:
            return None


def to_prefill(it: ToPrefill) -> request_pb2.DecodeToPrefill:
    match it:
        case DecodeHello():
            hello = request_pb2.DecodeHello(
                engine_id=it.engine_id,
                engine_epoch=it.engine_epoch,
                client_address=it.client_address,
                replicas=it.replicas,
                tp_size=it.tp_size,
                verify_width=it.verify_width,
                max_model_len=it.max_model_len,
                max_request_tokens=it.max_request_tokens,
            )
            return request_pb2.DecodeToPrefill(hello=hello)
        case ev.AnswerReserve():
            told = failure(it.failure) if it.failure else None
            reply = request_pb2.ReserveReply(
                room=it.room,
                accepted=it.accepted,
                replica=it.replica or 0,
                prefix_tokens=it.prefix_tokens,
                failure=told,
                proposals=it.proposals,
            )
            return request_pb2.DecodeToPrefill(reserved=reply)
        case ev.CapacityFreed():
            return request_pb2.DecodeToPrefill(capacity=request_pb2.CapacityFreed())
        case ev.RoomInstalled():
            return request_pb2.DecodeToPrefill(installed=request_pb2.RoomInstalled(room=it.room))
        case ev.RoomEnded():
            told = failure(it.failure) if it.failure else None
            return request_pb2.DecodeToPrefill(ended=request_pb2.RoomEnded(room=it.room, failure=told))
        case ev.Failure():
            return request_pb2.DecodeToPrefill(refused=failure(it))


# ---- clients
def tokens_event(tokens: tuple[Token, ...]) -> request_pb2.RequestEvent:
    return request_pb2.RequestEvent(tokens=request_pb2.TokenBatch(tokens=tokens))


def end_event(end: ev.End) -> request_pb2.RequestEvent | None:
    """A stream's last message; None: it ends without one."""
    match end:
        case ev.ToldByPrefill():
            return None
        case ev.Failure():
            return request_pb2.RequestEvent(failure=failure(end))
        case ev.Finished():
            finished = request_pb2.Finished(
                reason=REASONS[end.reason],
                prompt_tokens=end.prompt_tokens,
                completion_tokens=end.completion_tokens,
                cached_tokens=end.cached_tokens,
                stop_token=end.stop_token or 0,
                matched_stop_token=end.stop_token is not None,
                drafts=_drafts(end.drafts) if end.drafts is not None else None,
            )
            return request_pb2.RequestEvent(finished=finished)


Followed = tuple[Room, tuple[Token, ...] | ev.End]  # of one request on a stream that many share


def follow_events(burst: Iterable[Followed]) -> request_pb2.FollowEvents:
    """Everything that waits, tokens before ends. Columns, because a message of its own for each request is slow to build."""
    rooms: list[int] = []
    counts: list[int] = []
    tokens: list[int] = []
    ends: list[request_pb2.FollowEnd] = []
    for room, it in burst:
        if isinstance(it, tuple):
            rooms.append(room)
            counts.append(len(it))
            tokens += it
        else:
            ends.append(request_pb2.FollowEnd(room=room, last=end_event(it)))
    return request_pb2.FollowEvents(rooms=rooms, counts=counts, tokens=tokens, ends=ends)


# ---- workers
@dataclass(frozen=True, slots=True)
class RoundResult:
    """One replica's part of a round."""

    round_id: int
    replica: Replica
    rows: tuple[ev.PlaceTokens, ...]
    copied: tuple[Room, ...] = ()


def round_commands(plan: ev.RoundPlan, fence: int) -> list[worker_pb2.WorkerCommand]:
    """One command a replica, in replica order: the common head and the replica's own rows."""
    return [
        worker_pb2.WorkerCommand(fence=fence, round=_round(plan, replica))
        for replica in map(Replica, range(len(plan.replicas)))
    ]


def worker_report(message: worker_pb2.WorkerReport) -> WorkerHello | RoundResult | ev.Failure | None:
    """None for a report that a newer worker may send."""
    match message.WhichOneof("report"):
        case "hello":
            return worker_hello(message.hello)
        case "round":
            it = message.round
            return RoundResult(it.round_id, Replica(it.replica), tuple(_place_tokens(it)), tuple(map(Room, it.copied)))
        case "failure":
            return read_failure(message.failure)
        case _:
            return None


# ---- agents
@dataclass(frozen=True, slots=True)
class Paired:
    engine_id: str
    engine_epoch: int


@dataclass(frozen=True, slots=True)
class PairRefused:
    failure: ev.Failure


RoomReport = ev.AgentRankReady | ev.AgentRoomFailed | ev.AgentDrained
AgentReport = AgentHello | Paired | PairRefused | RoomReport | ev.Failure


def pair_command(hello: PrefillHello, agents: tuple[str, ...], fence: int) -> transfer_pb2.AgentCommand:
    pair = transfer_pb2.PairWith(engine_id=hello.engine_id, engine_epoch=hello.engine_epoch, agents=agents)
    return transfer_pb2.AgentCommand(fence=fence, pair=pair)


def expect_command(it: Manifest, fence: int) -> transfer_pb2.AgentCommand:
    return transfer_pb2.AgentCommand(fence=fence, expect=manifest(it))


def agent_report(rank: GlobalRank, message: transfer_pb2.AgentReport) -> AgentReport | None:
    """What the agent of `rank` says; None for a report that concerns a prefill engine, or that a newer agent may send."""
    match message.WhichOneof("report"):
        case "hello":
            return agent_hello(message.hello)
        case "paired":
            return Paired(message.paired.engine_id, message.paired.engine_epoch)
        case "pair_refused":
            return PairRefused(read_failure(message.pair_refused))
        case "rank_ready":
            it = message.rank_ready
            return ev.AgentRankReady(
                rank=rank,
                room=Room(it.room),
                attempt=it.attempt,
                token=Token(it.token),
                window=_tokens(it.window),
                bytes=it.bytes,
                first_byte=it.first_byte,
                last_byte=it.last_byte,
                cached_tokens=it.cached_tokens,
            )
        case "failed":
            it = message.failed
            return ev.AgentRoomFailed(rank, Room(it.room), it.attempt, read_failure(it.failure))
        case "drained":
            return ev.AgentDrained(rank, Room(message.drained.room))
        case "fatal":
            return read_failure(message.fatal)
        case _:
            return None


# ---- parts
def _round(plan: ev.RoundPlan, replica: Replica) -> worker_pb2.RoundPlan:
    part, grown = plan.replicas[replica], plan.deltas.get(replica, {})
    return worker_pb2.RoundPlan(
        round_id=plan.round_id,
        bucket=plan.bucket,
        mode=MODES[plan.mode],
        clears=part.clears,
        installs=list(map(_install, part.installs)),
        deltas=[worker_pb2.BlockDelta(place=place, blocks=grown[place]) for place in sorted(grown)],
        live=part.live,
        width=part.width.width,
        proposals=part.width.proposals,
        most_proposals=max(other.width.proposals for other in plan.replicas),
        retracts=[
            worker_pb2.PlaceRetract(place=it.place, room=it.room, position=it.position, image=it.image) for it in part.retracts
        ],
        restores=[
            worker_pb2.PlaceRestore(install=_install(it.install), found=it.found, image=it.image) for it in part.restores
        ],
    )


def _install(it: ev.PlaceInstall) -> worker_pb2.PlaceInstall:
    return worker_pb2.PlaceInstall(
        place=it.place,
        room=it.room,
        blocks=it.blocks,
        slot=it.slot,
        position=it.position,
        window=it.window,
        sampling=sampling(it.sampling),
    )


def _drafts(it: ev.Drafts) -> request_pb2.Drafts:
    return request_pb2.Drafts(windows=it.windows, proposed=it.proposed, accepted=it.accepted, accepted_at=it.accepted_at)


def _place_tokens(it: worker_pb2.RoundResult) -> Iterator[ev.PlaceTokens]:
    """Rows of the columns. Those of lengths that do not fit give rows that no plan asked for."""
    tokens, proposals = cast("list[Token]", list(it.tokens)), cast("list[Token]", list(it.proposals))
    places = list(it.places)
    start, each = 0, len(proposals) // max(1, len(places))
    for n, (place, count) in enumerate(zip(places, list(it.counts), strict=False)):
        said = tuple(tokens[start : start + count])
        start += count
        yield ev.PlaceTokens(Place(place), said, (*said[-1:], *proposals[n * each : (n + 1) * each]))


def _tokens(ids: Iterable[int]) -> tuple[Token, ...]:
    return tuple(map(Token, ids))
