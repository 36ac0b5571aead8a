"""The prefill scheduler's messages on and off the wire. Protobuf stops here: inside are frozen dataclasses."""

import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from k3mesh.errors import BadRequest, MeshError, from_code
from k3mesh.v1 import common_pb2, request_pb2, transfer_pb2, worker_pb2
from services.contracts.ids import GlobalRank, Replica, RequestId, Room, Token
from services.scheduler.prefill import events as ev

REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TOKEN_BYTES = 4
MAX_STOP_TOKENS = 1024
REASONS = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}

Publication = (
    ev.PublishQueued | ev.PublishAttached | ev.PublishTokens | ev.PublishFinished | ev.PublishFailure | ev.PublishHandedOver
)


# ---- failures
def failure_of(error: MeshError) -> ev.Failure:
    return ev.Failure(error.code, error.message, error.detail)


def error_of(failure: ev.Failure) -> MeshError:
    return from_code(failure.code, failure.message, failure.detail)


def failure_from(message: common_pb2.Failure) -> ev.Failure:
    return ev.Failure(message.code, message.message, message.detail)


def failure(it: ev.Failure) -> common_pb2.Failure:
    retryable = error_of(it).retryable
    return common_pb2.Failure(code=it.code, message=it.message, retryable=retryable, detail=it.detail)


# ---- clients
def request_arrived(
    message: request_pb2.SubmitRequest, default_timeout: float, vocab_size: int, max_model_len: int
) -> ev.RequestArrived:
    """BadRequest for what no planner should see: a bad id, bytes that are no token ids, ids outside the vocabulary, and more
    of them than one request can have, which nobody has the time to look through."""
    if not REQUEST_ID.fullmatch(message.request_id):
        raise BadRequest(
            f"request_id {message.request_id!r}: must be 1 to 64 of letters, digits, '_', '.', '-'", param="request_id"
        )
    if len(message.prompt) % TOKEN_BYTES:
        raise BadRequest(
            f"prompt of {len(message.prompt)} bytes: must be little-endian uint32 token ids, {TOKEN_BYTES} bytes each",
            param="prompt",
        )
    if (tokens := len(message.prompt) // TOKEN_BYTES) > max_model_len:
        raise BadRequest(
            f"{tokens} prompt tokens exceed the context length of {max_model_len}; shorten the prompt", param="prompt"
        )
    if (stops := len(message.sampling.stop_token_ids)) > MAX_STOP_TOKENS:
        raise BadRequest(f"{stops} stop_token_ids: there may be {MAX_STOP_TOKENS} at most", param="stop_token_ids")
    _check_ids("prompt", _unpack(message.prompt), vocab_size)
    _check_ids("stop_token_ids", message.sampling.stop_token_ids, vocab_size)
    return ev.RequestArrived(
        request_id=RequestId(message.request_id),
        prompt_tokens=tokens,
        sampling=_sampling_from(message.sampling),
        timeout=message.timeout_ms / 1000 or default_timeout,
    )


def request_event(it: Publication, decode_address: str) -> request_pb2.RequestEvent:
    """`decode_address` is where the client attaches."""
    match it:
        case ev.PublishQueued():
            return request_pb2.RequestEvent(queued=request_pb2.Queued(position=it.position))
        case ev.PublishAttached():
            return request_pb2.RequestEvent(attached=request_pb2.Attached(decode_address=decode_address, room=it.room))
        case ev.PublishTokens():
            return request_pb2.RequestEvent(tokens=request_pb2.TokenBatch(tokens=it.tokens))
        case ev.PublishFinished():
            finished = request_pb2.Finished(
                reason=REASONS[it.finished.reason],
                prompt_tokens=it.finished.prompt_tokens,
                completion_tokens=1,
                stop_token=it.finished.stop_token or 0,
                matched_stop_token=it.finished.stop_token is not None,
            )
            return request_pb2.RequestEvent(finished=finished)
        case ev.PublishFailure():
            return request_pb2.RequestEvent(failure=failure(it.failure))
        case ev.PublishHandedOver():
            return request_pb2.RequestEvent(handed_over=request_pb2.HandedOver())


# ---- decode scheduler
@dataclass(frozen=True, slots=True)
class PrefillHello:
    engine_id: str
    engine_epoch: int
    stages: int
    tp_size: int
    agents: tuple[str, ...]  # by global rank
    model_fingerprint: str
    verify_width: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class DecodeHello:
    engine_id: str
    engine_epoch: int
    client_address: str
    max_request_tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The decode scheduler will not pair."""

    failure: ev.Failure


FromDecode = DecodeHello | Refused | ev.ReserveAnswered | ev.CapacityFreed | ev.RoomInstalled | ev.RoomEnded


def hello_to_decode(it: PrefillHello) -> request_pb2.PrefillToDecode:
    hello = request_pb2.PrefillHello(
        engine_id=it.engine_id,
        engine_epoch=it.engine_epoch,
        stages=it.stages,
        tp_size=it.tp_size,
        agents=it.agents,
        model_fingerprint=it.model_fingerprint,
        verify_width=it.verify_width,
        max_model_len=it.max_model_len,
    )
    return request_pb2.PrefillToDecode(hello=hello)


def reserve(it: ev.Reserve, prompt_hash: bytes) -> request_pb2.PrefillToDecode:
    message = request_pb2.Reserve(
        request_id=it.request_id,
        room=it.room,
        attempt=it.attempt,
        prompt_tokens=it.prompt_tokens,
        prompt_hash=prompt_hash,
        sampling=_sampling(it.sampling),
        timeout_ms=max(1, round(it.timeout * 1000)),
    )
    return request_pb2.PrefillToDecode(reserve=message)


def cancel_on_decode(it: ev.CancelOnDecode) -> request_pb2.PrefillToDecode:
    cancel = request_pb2.CancelRoom(
        room=it.room,
        reason=it.reason,
        failure=failure(it.failure) if it.failure else None,
        finished_on_prefill=it.finished_on_prefill,
    )
    return request_pb2.PrefillToDecode(cancel=cancel)


def from_decode(message: request_pb2.DecodeToPrefill) -> FromDecode | None:
    """None for a message that a newer decode scheduler may send."""
    match message.WhichOneof("message"):
        case "hello":
            it = message.hello
            return DecodeHello(it.engine_id, it.engine_epoch, it.client_address, it.max_request_tokens)
        case "reserved":
            reply = message.reserved
            return ev.ReserveAnswered(
                room=Room(reply.room),
                accepted=reply.accepted,
                replica=Replica(reply.replica),
                prefix_tokens=reply.prefix_tokens,
                failure=failure_from(reply.failure) if reply.HasField("failure") else None,
            )
        case "capacity":
            return ev.CapacityFreed()
        case "installed":
            return ev.RoomInstalled(Room(message.installed.room))
        case "ended":
            ended = message.ended
            return ev.RoomEnded(Room(ended.room), failure_from(ended.failure) if ended.HasField("failure") else None)
        case "refused":
            return Refused(failure_from(message.refused))
        case _:
            return None


# ---- workers
@dataclass(frozen=True, slots=True)
class WorkerHello:
    engine_id: str
    engine_epoch: int
    rank: GlobalRank
    num_blocks: int
    num_slots: int
    model_fingerprint: str
    model_name: str
    vocab_size: int
    end_token_ids: tuple[int, ...]


def introduce_worker(scheduler: str, fence: int) -> worker_pb2.WorkerCommand:
    return worker_pb2.WorkerCommand(fence=fence, introduce=worker_pb2.Introduce(scheduler=scheduler))


def step_command(step: ev.PrefillStep, prompt: Callable[[RequestId], bytes], fence: int) -> worker_pb2.WorkerCommand:
    """`prompt` gives a request's token bytes, of which each row carries its chunk and, in front of another, one more token."""

    def tokens(row: ev.ChunkRow, start: int, end: int) -> bytes:
        return prompt(row.request_id)[TOKEN_BYTES * start : TOKEN_BYTES * end]

    rows = [
        worker_pb2.ChunkRow(
            request_id=row.request_id,
            room=row.room,
            start=row.start,
            end=row.end,
            last=row.last,
            tokens=tokens(row, row.start, row.end),
            new_blocks=row.new_blocks,
            slot=row.slot,
            sampling=_sampling(row.sampling) if row.last else None,
            prefix_tokens=row.prefix_tokens,
            next_token=int.from_bytes(tokens(row, row.end, row.end + 1), "little"),
        )
        for row in step.rows
    ]
    return worker_pb2.WorkerCommand(fence=fence, prefill=worker_pb2.PrefillStep(step_id=step.step_id, rows=rows))


def forget_command(it: ev.ForgetRooms, fence: int) -> worker_pb2.WorkerCommand:
    return worker_pb2.WorkerCommand(fence=fence, forget=worker_pb2.ForgetRooms(rooms=it.rooms))


def worker_report(message: worker_pb2.WorkerReport) -> WorkerHello | ev.StepDone | ev.Failure | None:
    """None for a report that is not a prefill worker's."""
    match message.WhichOneof("report"):
        case "hello":
            it = message.hello
            return WorkerHello(
                engine_id=it.engine_id,
                engine_epoch=it.engine_epoch,
                rank=GlobalRank(it.rank),
                num_blocks=it.num_blocks,
                num_slots=it.num_slots,
                model_fingerprint=it.model_fingerprint,
                model_name=it.model_name,
                vocab_size=it.vocab_size,
                end_token_ids=tuple(it.end_token_ids),
            )
        case "step":
            step = message.step
            first = tuple(ev.FirstToken(Room(token.room), Token(token.token)) for token in step.first_tokens)
            return ev.StepDone(step.step_id, step.stage, step.started, step.ended, first)
        case "failure":
            return failure_from(message.failure)
        case _:
            return None


# ---- agents
@dataclass(frozen=True, slots=True)
class AgentHello:
    engine_id: str
    engine_epoch: int
    rank: GlobalRank
    peer_address: str


AgentReport = AgentHello | ev.RoomReady | ev.RoomFailed | ev.SourceReleased | ev.Drained | ev.Failure


def introduce_agent(scheduler: str, fence: int) -> transfer_pb2.AgentCommand:
    return transfer_pb2.AgentCommand(fence=fence, introduce=transfer_pb2.IntroduceAgent(scheduler=scheduler))


def cancel_command(it: ev.CancelOnAgents, fence: int) -> transfer_pb2.AgentCommand:
    return transfer_pb2.AgentCommand(fence=fence, cancel=request_pb2.CancelRoom(room=it.room, reason=it.reason))


def agent_report(rank: GlobalRank, message: transfer_pb2.AgentReport) -> AgentReport | None:
    """What the agent of `rank` says; None for a report that is not a prefill agent's."""
    match message.WhichOneof("report"):
        case "hello":
            it = message.hello
            return AgentHello(it.engine_id, it.engine_epoch, GlobalRank(it.rank), it.peer_address)
        case "ready":
            return ev.RoomReady(rank, Room(message.ready.room))
        case "failed":
            return ev.RoomFailed(rank, Room(message.failed.room), failure_from(message.failed.failure))
        case "released":
            return ev.SourceReleased(rank, Room(message.released.room), message.released.bytes)
        case "drained":
            return ev.Drained(rank, Room(message.drained.room))
        case "fatal":
            return failure_from(message.fatal)
        case _:
            return None


# ---- parts
def _sampling_from(message: common_pb2.Sampling) -> ev.Sampling:
    return ev.Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        max_tokens=message.max_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(map(Token, message.stop_token_ids)),
    )


def _sampling(it: ev.Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=it.temperature,
        top_p=it.top_p,
        top_k=it.top_k,
        seed=it.seed,
        max_tokens=it.max_tokens,
        ignore_eos=it.ignore_eos,
        stop_token_ids=it.stop_token_ids,
    )


def _unpack(prompt: bytes) -> "array[int]":
    ids = array("I", prompt)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _check_ids(field: str, ids: Collection[int] | Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise BadRequest(f"{field}: token id {largest} is outside the vocabulary of {vocab_size}", param=field)
