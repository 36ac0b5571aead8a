from k3mesh.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubmitRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "timeout_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: bytes
    sampling: _common_pb2.Sampling
    timeout_ms: int
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "room")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    room: int
    def __init__(self, request_id: _Optional[str] = ..., room: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("attach", "leave")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    attach: AttachRequest
    leave: int
    def __init__(self, attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., leave: _Optional[int] = ...) -> None: ...

class FollowEvents(_message.Message):
    __slots__ = ("rooms", "counts", "tokens", "ends")
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedCompositeFieldContainer[FollowEnd]
    def __init__(self, rooms: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[_Union[FollowEnd, _Mapping]]] = ...) -> None: ...

class FollowEnd(_message.Message):
    __slots__ = ("room", "last")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    room: int
    last: RequestEvent
    def __init__(self, room: _Optional[int] = ..., last: _Optional[_Union[RequestEvent, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("queued", "attached", "tokens", "finished", "failure", "handed_over")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    queued: Queued
    attached: Attached
    tokens: TokenBatch
    finished: Finished
    failure: _common_pb2.Failure
    handed_over: HandedOver
    def __init__(self, queued: _Optional[_Union[Queued, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., handed_over: _Optional[_Union[HandedOver, _Mapping]] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("decode_address", "room")
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    decode_address: str
    room: int
    def __init__(self, decode_address: _Optional[str] = ..., room: _Optional[int] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "prompt_tokens", "completion_tokens", "cached_tokens", "stop_token", "matched_stop_token", "drafts")
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_token: int
    matched_stop_token: bool
    drafts: Drafts
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., stop_token: _Optional[int] = ..., matched_stop_token: _Optional[bool] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("windows", "proposed", "accepted", "accepted_at")
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    windows: int
    proposed: int
    accepted: int
    accepted_at: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, windows: _Optional[int] = ..., proposed: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_at: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("model_name", "model_fingerprint", "vocab_size", "max_model_len", "max_prompt_tokens", "end_token_ids", "ready", "not_ready_reason", "decode_address")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASON_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ready: bool
    not_ready_reason: str
    decode_address: str
    def __init__(self, model_name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., ready: _Optional[bool] = ..., not_ready_reason: _Optional[str] = ..., decode_address: _Optional[str] = ...) -> None: ...

class PrefillToDecode(_message.Message):
    __slots__ = ("hello", "reserve", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: PrefillHello
    reserve: Reserve
    cancel: CancelRoom
    def __init__(self, hello: _Optional[_Union[PrefillHello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., cancel: _Optional[_Union[CancelRoom, _Mapping]] = ...) -> None: ...

class DecodeToPrefill(_message.Message):
    __slots__ = ("hello", "reserved", "capacity", "installed", "ended", "refused")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    INSTALLED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    hello: DecodeHello
    reserved: ReserveReply
    capacity: CapacityFreed
    installed: RoomInstalled
    ended: RoomEnded
    refused: _common_pb2.Failure
    def __init__(self, hello: _Optional[_Union[DecodeHello, _Mapping]] = ..., reserved: _Optional[_Union[ReserveReply, _Mapping]] = ..., capacity: _Optional[_Union[CapacityFreed, _Mapping]] = ..., installed: _Optional[_Union[RoomInstalled, _Mapping]] = ..., ended: _Optional[_Union[RoomEnded, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class PrefillHello(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "stages", "tp_size", "agents", "model_fingerprint", "verify_width", "max_model_len")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    stages: int
    tp_size: int
    agents: _containers.RepeatedScalarFieldContainer[str]
    model_fingerprint: str
    verify_width: int
    max_model_len: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., stages: _Optional[int] = ..., tp_size: _Optional[int] = ..., agents: _Optional[_Iterable[str]] = ..., model_fingerprint: _Optional[str] = ..., verify_width: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DecodeHello(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "client_address", "replicas", "tp_size", "verify_width", "max_model_len", "max_request_tokens")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    client_address: str
    replicas: int
    tp_size: int
    verify_width: int
    max_model_len: int
    max_request_tokens: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., client_address: _Optional[str] = ..., replicas: _Optional[int] = ..., tp_size: _Optional[int] = ..., verify_width: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_request_tokens: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("request_id", "room", "attempt", "prompt_tokens", "prompt_hash", "sampling", "timeout_ms", "block_keys", "tail")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    room: int
    attempt: int
    prompt_tokens: int
    prompt_hash: bytes
    sampling: _common_pb2.Sampling
    timeout_ms: int
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    tail: bytes
    def __init__(self, request_id: _Optional[str] = ..., room: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_hash: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., block_keys: _Optional[_Iterable[bytes]] = ..., tail: _Optional[bytes] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("room", "accepted", "replica", "prefix_tokens", "failure", "proposals")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    room: int
    accepted: bool
    replica: int
    prefix_tokens: int
    failure: _common_pb2.Failure
    proposals: int
    def __init__(self, room: _Optional[int] = ..., accepted: _Optional[bool] = ..., replica: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., proposals: _Optional[int] = ...) -> None: ...

class CapacityFreed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelRoom(_message.Message):
    __slots__ = ("room", "reason", "failure", "finished_on_prefill")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_ON_PREFILL_FIELD_NUMBER: _ClassVar[int]
    room: int
    reason: str
    failure: _common_pb2.Failure
    finished_on_prefill: bool
    def __init__(self, room: _Optional[int] = ..., reason: _Optional[str] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., finished_on_prefill: _Optional[bool] = ...) -> None: ...

class RoomInstalled(_message.Message):
    __slots__ = ("room",)
    ROOM_FIELD_NUMBER: _ClassVar[int]
    room: int
    def __init__(self, room: _Optional[int] = ...) -> None: ...

class RoomEnded(_message.Message):
    __slots__ = ("room", "failure")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    room: int
    failure: _common_pb2.Failure
    def __init__(self, room: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...
