from k3mesh.v1 import common_pb2 as _common_pb2
from k3mesh.v1 import request_pb2 as _request_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentCommand(_message.Message):
    __slots__ = ("fence", "introduce", "pair", "expect", "cancel")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    INTRODUCE_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    fence: int
    introduce: IntroduceAgent
    pair: PairWith
    expect: Manifest
    cancel: _request_pb2.CancelRoom
    def __init__(self, fence: _Optional[int] = ..., introduce: _Optional[_Union[IntroduceAgent, _Mapping]] = ..., pair: _Optional[_Union[PairWith, _Mapping]] = ..., expect: _Optional[_Union[Manifest, _Mapping]] = ..., cancel: _Optional[_Union[_request_pb2.CancelRoom, _Mapping]] = ...) -> None: ...

class AgentReport(_message.Message):
    __slots__ = ("hello", "paired", "pair_refused", "ready", "rank_ready", "released", "failed", "drained", "fatal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PAIRED_FIELD_NUMBER: _ClassVar[int]
    PAIR_REFUSED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RANK_READY_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    hello: AgentHello
    paired: Paired
    pair_refused: _common_pb2.Failure
    ready: RoomReady
    rank_ready: RankReady
    released: SourceReleased
    failed: RoomFailed
    drained: Drained
    fatal: _common_pb2.Failure
    def __init__(self, hello: _Optional[_Union[AgentHello, _Mapping]] = ..., paired: _Optional[_Union[Paired, _Mapping]] = ..., pair_refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., ready: _Optional[_Union[RoomReady, _Mapping]] = ..., rank_ready: _Optional[_Union[RankReady, _Mapping]] = ..., released: _Optional[_Union[SourceReleased, _Mapping]] = ..., failed: _Optional[_Union[RoomFailed, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., fatal: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class IntroduceAgent(_message.Message):
    __slots__ = ("scheduler",)
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    scheduler: str
    def __init__(self, scheduler: _Optional[str] = ...) -> None: ...

class AgentHello(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "rank", "peer_address", "staging_bytes", "placement_fingerprint")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    rank: int
    peer_address: str
    staging_bytes: int
    placement_fingerprint: str
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., rank: _Optional[int] = ..., peer_address: _Optional[str] = ..., staging_bytes: _Optional[int] = ..., placement_fingerprint: _Optional[str] = ...) -> None: ...

class PairWith(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "agents")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    agents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., agents: _Optional[_Iterable[str]] = ...) -> None: ...

class Paired(_message.Message):
    __slots__ = ("engine_id", "engine_epoch")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ...) -> None: ...

class RoomReady(_message.Message):
    __slots__ = ("room", "attempt", "prompt_tokens")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    prompt_tokens: int
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class RankReady(_message.Message):
    __slots__ = ("room", "attempt", "token", "window", "bytes", "first_byte", "last_byte", "cached_tokens")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    LAST_BYTE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    token: int
    window: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    first_byte: float
    last_byte: float
    cached_tokens: int
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ..., token: _Optional[int] = ..., window: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ..., first_byte: _Optional[float] = ..., last_byte: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SourceReleased(_message.Message):
    __slots__ = ("room", "bytes")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    room: int
    bytes: int
    def __init__(self, room: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class RoomFailed(_message.Message):
    __slots__ = ("room", "attempt", "failure")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    failure: _common_pb2.Failure
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("room",)
    ROOM_FIELD_NUMBER: _ClassVar[int]
    room: int
    def __init__(self, room: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("request_id", "room", "attempt", "decode_epoch", "replica", "prefix_tokens", "prompt_tokens", "prompt_hash", "blocks", "block_gens", "slot", "slot_gen", "timeout_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GENS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_GEN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    room: int
    attempt: int
    decode_epoch: int
    replica: int
    prefix_tokens: int
    prompt_tokens: int
    prompt_hash: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    block_gens: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    slot_gen: int
    timeout_ms: int
    def __init__(self, request_id: _Optional[str] = ..., room: _Optional[int] = ..., attempt: _Optional[int] = ..., decode_epoch: _Optional[int] = ..., replica: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_hash: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ..., block_gens: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., slot_gen: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("contract", "engine_id", "role", "engine_epoch", "stage", "num_stages", "tp_rank", "tp_size", "dp_rank", "dp_size", "global_rank", "model_fingerprint", "draft_fingerprint", "block_tokens", "num_blocks", "num_slots", "verify_width", "speculative_algorithm", "layer_lo", "layer_hi", "arenas", "fields", "fingerprint")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_RANK_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_WIDTH_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    LAYER_LO_FIELD_NUMBER: _ClassVar[int]
    LAYER_HI_FIELD_NUMBER: _ClassVar[int]
    ARENAS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    contract: str
    engine_id: str
    role: str
    engine_epoch: int
    stage: int
    num_stages: int
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    global_rank: int
    model_fingerprint: str
    draft_fingerprint: str
    block_tokens: int
    num_blocks: int
    num_slots: int
    verify_width: int
    speculative_algorithm: str
    layer_lo: int
    layer_hi: int
    arenas: _containers.RepeatedCompositeFieldContainer[Arena]
    fields: _containers.RepeatedCompositeFieldContainer[Field]
    fingerprint: str
    def __init__(self, contract: _Optional[str] = ..., engine_id: _Optional[str] = ..., role: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., stage: _Optional[int] = ..., num_stages: _Optional[int] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., global_rank: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., draft_fingerprint: _Optional[str] = ..., block_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., verify_width: _Optional[int] = ..., speculative_algorithm: _Optional[str] = ..., layer_lo: _Optional[int] = ..., layer_hi: _Optional[int] = ..., arenas: _Optional[_Iterable[_Union[Arena, _Mapping]]] = ..., fields: _Optional[_Iterable[_Union[Field, _Mapping]]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("arena_id", "name", "length", "cuda_handle", "cuda_device")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CUDA_HANDLE_FIELD_NUMBER: _ClassVar[int]
    CUDA_DEVICE_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    name: str
    length: int
    cuda_handle: bytes
    cuda_device: bytes
    def __init__(self, arena_id: _Optional[int] = ..., name: _Optional[str] = ..., length: _Optional[int] = ..., cuda_handle: _Optional[bytes] = ..., cuda_device: _Optional[bytes] = ...) -> None: ...

class Field(_message.Message):
    __slots__ = ("field_id", "layer", "kind", "dtype", "shape", "arena_id", "offset", "unit_stride", "payload", "parts")
    FIELD_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    UNIT_STRIDE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    field_id: str
    layer: int
    kind: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    arena_id: int
    offset: int
    unit_stride: int
    payload: int
    parts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, field_id: _Optional[str] = ..., layer: _Optional[int] = ..., kind: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., arena_id: _Optional[int] = ..., offset: _Optional[int] = ..., unit_stride: _Optional[int] = ..., payload: _Optional[int] = ..., parts: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerMessage(_message.Message):
    __slots__ = ("hello", "offer", "offer_reply", "frames", "grant", "stage_done", "stage_ack", "cancel", "drained", "heartbeat", "refused", "bundle")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    OFFER_REPLY_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    STAGE_DONE_FIELD_NUMBER: _ClassVar[int]
    STAGE_ACK_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    offer: Manifest
    offer_reply: OfferReply
    frames: FrameBatch
    grant: Grant
    stage_done: StageDone
    stage_ack: StageAck
    cancel: _request_pb2.CancelRoom
    drained: Drained
    heartbeat: Heartbeat
    refused: _common_pb2.Failure
    bundle: Bundle
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., offer: _Optional[_Union[Manifest, _Mapping]] = ..., offer_reply: _Optional[_Union[OfferReply, _Mapping]] = ..., frames: _Optional[_Union[FrameBatch, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., stage_done: _Optional[_Union[StageDone, _Mapping]] = ..., stage_ack: _Optional[_Union[StageAck, _Mapping]] = ..., cancel: _Optional[_Union[_request_pb2.CancelRoom, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., refused: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ..., bundle: _Optional[_Union[Bundle, _Mapping]] = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[PeerMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[PeerMessage, _Mapping]]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("placement", "ucx_address", "link_id", "link_epoch", "frame_bytes", "checksum", "piece_bytes")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    UCX_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINK_ID_FIELD_NUMBER: _ClassVar[int]
    LINK_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    placement: Placement
    ucx_address: bytes
    link_id: int
    link_epoch: int
    frame_bytes: int
    checksum: str
    piece_bytes: int
    def __init__(self, placement: _Optional[_Union[Placement, _Mapping]] = ..., ucx_address: _Optional[bytes] = ..., link_id: _Optional[int] = ..., link_epoch: _Optional[int] = ..., frame_bytes: _Optional[int] = ..., checksum: _Optional[str] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class OfferReply(_message.Message):
    __slots__ = ("room", "attempt", "failure")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    failure: _common_pb2.Failure
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class FrameBatch(_message.Message):
    __slots__ = ("room", "attempt", "frames")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("seq", "length", "extents")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    length: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, seq: _Optional[int] = ..., length: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("fields", "first", "count")
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedScalarFieldContainer[int]
    first: int
    count: int
    def __init__(self, fields: _Optional[_Iterable[int]] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("room", "seqs")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    SEQS_FIELD_NUMBER: _ClassVar[int]
    room: int
    seqs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, room: _Optional[int] = ..., seqs: _Optional[_Iterable[int]] = ...) -> None: ...

class StageDone(_message.Message):
    __slots__ = ("room", "attempt", "stage", "bytes", "frames", "slot_gen", "handoff")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    SLOT_GEN_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    stage: int
    bytes: int
    frames: int
    slot_gen: int
    handoff: Handoff
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ..., stage: _Optional[int] = ..., bytes: _Optional[int] = ..., frames: _Optional[int] = ..., slot_gen: _Optional[int] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("token", "window", "cached_tokens")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token: int
    window: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    def __init__(self, token: _Optional[int] = ..., window: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class StageAck(_message.Message):
    __slots__ = ("room", "attempt")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    room: int
    attempt: int
    def __init__(self, room: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class LocalMessage(_message.Message):
    __slots__ = ("export", "chunk", "ready", "handoff", "forget")
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    export: Placement
    chunk: ChunkStarted
    ready: FieldsReady
    handoff: HandoffReady
    forget: ForgetLocal
    def __init__(self, export: _Optional[_Union[Placement, _Mapping]] = ..., chunk: _Optional[_Union[ChunkStarted, _Mapping]] = ..., ready: _Optional[_Union[FieldsReady, _Mapping]] = ..., handoff: _Optional[_Union[HandoffReady, _Mapping]] = ..., forget: _Optional[_Union[ForgetLocal, _Mapping]] = ...) -> None: ...

class ChunkStarted(_message.Message):
    __slots__ = ("step_id", "rows")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    rows: _containers.RepeatedCompositeFieldContainer[LocalRow]
    def __init__(self, step_id: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[LocalRow, _Mapping]]] = ...) -> None: ...

class LocalRow(_message.Message):
    __slots__ = ("room", "start", "end", "last", "slot", "new_blocks")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    room: int
    start: int
    end: int
    last: bool
    slot: int
    new_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, room: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., last: _Optional[bool] = ..., slot: _Optional[int] = ..., new_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class FieldsReady(_message.Message):
    __slots__ = ("step_id", "lo", "hi")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LO_FIELD_NUMBER: _ClassVar[int]
    HI_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    lo: int
    hi: int
    def __init__(self, step_id: _Optional[int] = ..., lo: _Optional[int] = ..., hi: _Optional[int] = ...) -> None: ...

class HandoffReady(_message.Message):
    __slots__ = ("room", "handoff")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    room: int
    handoff: Handoff
    def __init__(self, room: _Optional[int] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ...) -> None: ...

class ForgetLocal(_message.Message):
    __slots__ = ("rooms",)
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rooms: _Optional[_Iterable[int]] = ...) -> None: ...
