"""The prefill scheduler's messages on and off the wire. Protobuf stops here: inside are frozen dataclasses."""

import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from k3mesh.errors import BadRequest
from k3mesh.v1 import request_pb2, transfer_pb2, worker_pb2
from services.contracts.ids import TOKEN_BYTES, GlobalRank, Replica, RequestId, Room, Token
from services.runtime.wire import failure, read_failure, read_sampling, sampling
from services.scheduler.block_keys import BlockKeys
from services.scheduler.prefill import events as ev
from services.scheduler.wire import REASONS, AgentHello, PrefillHello, WorkerHello, agent_hello, worker_hello

REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_STOP_TOKENS = 1024

Publication = (
    ev.PublishQueued | ev.PublishAttached | ev.PublishTokens | ev.PublishFinished | ev.PublishFailure | ev.PublishHandedOver
)


# ---- clients
def request_arrived(
    message: request_pb2.SubmitRequest,
    default_timeout: float,
    vocab_size: int,
    max_model_len: int,
    keys: BlockKeys | None = None,
) -> ev.RequestArrived:
    """BadRequest for what no planner should see: a bad id, bytes that are no token ids, ids outside the vocabulary, and more
    of them than one request can have, which nobody has the time to look through. `keys` names blocks where there is a prefix
    cache."""
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
        sampling=read_sampling(message.sampling),
        timeout=message.timeout_ms / 1000 or default_timeout,
        keys=keys.of_prompt(message.prompt) if keys else (),
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
                cached_tokens=it.finished.cached_tokens,
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


def reserve(it: ev.Reserve, prompt_hash: bytes, tail: bytes) -> request_pb2.PrefillToDecode:
    """`tail`: the prompt's bytes behind the blocks that `it.keys` names."""
    message = request_pb2.Reserve(
        request_id=it.request_id,
        room=it.room,
        attempt=it.attempt,
        prompt_tokens=it.prompt_tokens,
        prompt_hash=prompt_hash,
        sampling=sampling(it.sampling),
        timeout_ms=max(1, round(it.timeout * 1000)),
        block_keys=it.keys,
        tail=tail,
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
                proposals=reply.proposals,
                failure=read_failure(reply.failure) if reply.HasField("failure") else None,
            )
        case "capacity":
            return ev.CapacityFreed()
        case "installed":
            return ev.RoomInstalled(Room(message.installed.room))
        case "ended":
            ended = message.ended
            return ev.RoomEnded(Room(ended.room), read_failure(ended.failure) if ended.HasField("failure") else None)
        case "refused":
            return Refused(read_failure(message.refused))
        case _:
            return None


# ---- workers
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
            sampling=sampling(row.sampling) if row.last else None,
            prefix_tokens=row.prefix_tokens,
            next_token=int.from_bytes(tokens(row, row.end, row.end + 1), "little"),
            proposals=row.proposals if row.last else 0,
            load_slot=row.load_slot,
            save_slot=row.save_slot,
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
            return worker_hello(message.hello)
        case "step":
            step = message.step
            first = tuple(ev.FirstToken(Room(token.room), Token(token.token)) for token in step.first_tokens)
            return ev.StepDone(step.step_id, step.stage, step.started, step.ended, first)
        case "failure":
            return read_failure(message.failure)
        case _:
            return None


# ---- agents
AgentReport = AgentHello | ev.RoomReady | ev.RoomFailed | ev.SourceReleased | ev.Drained | ev.Failure


def agent_report(rank: GlobalRank, message: transfer_pb2.AgentReport) -> AgentReport | None:
    """What the agent of `rank` says; None for a report that is not a prefill agent's."""
    match message.WhichOneof("report"):
        case "hello":
            return agent_hello(message.hello)
        case "ready":
            return ev.RoomReady(rank, Room(message.ready.room))
        case "failed":
            return ev.RoomFailed(rank, Room(message.failed.room), read_failure(message.failed.failure))
        case "released":
            return ev.SourceReleased(rank, Room(message.released.room), message.released.bytes)
        case "drained":
            return ev.Drained(rank, Room(message.drained.room))
        case "fatal":
            return read_failure(message.fatal)
        case _:
            return None


# ---- parts
def _unpack(prompt: bytes) -> "array[int]":
    ids = array("I", prompt)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _check_ids(field: str, ids: Collection[int] | Iterable[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise BadRequest(f"{field}: token id {largest} is outside the vocabulary of {vocab_size}", param=field)
