from k3mesh.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RoundMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROUND_MODE_UNSPECIFIED: _ClassVar[RoundMode]
    ROUND_MODE_LOW_LATENCY_GRAPH: _ClassVar[RoundMode]
    ROUND_MODE_LOW_LATENCY_EAGER: _ClassVar[RoundMode]
    ROUND_MODE_NORMAL_EAGER: _ClassVar[RoundMode]
ROUND_MODE_UNSPECIFIED: RoundMode
ROUND_MODE_LOW_LATENCY_GRAPH: RoundMode
ROUND_MODE_LOW_LATENCY_EAGER: RoundMode
ROUND_MODE_NORMAL_EAGER: RoundMode

class WorkerCommand(_message.Message):
    __slots__ = ("fence", "introduce", "prefill", "round", "forget")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    INTRODUCE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    fence: int
    introduce: Introduce
    prefill: PrefillStep
    round: RoundPlan
    forget: ForgetRooms
    def __init__(self, fence: _Optional[int] = ..., introduce: _Optional[_Union[Introduce, _Mapping]] = ..., prefill: _Optional[_Union[PrefillStep, _Mapping]] = ..., round: _Optional[_Union[RoundPlan, _Mapping]] = ..., forget: _Optional[_Union[ForgetRooms, _Mapping]] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("hello", "step", "round", "failure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    step: StepDone
    round: RoundResult
    failure: _common_pb2.Failure
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., step: _Optional[_Union[StepDone, _Mapping]] = ..., round: _Optional[_Union[RoundResult, _Mapping]] = ..., failure: _Optional[_Union[_common_pb2.Failure, _Mapping]] = ...) -> None: ...

class Introduce(_message.Message):
    __slots__ = ("scheduler",)
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    scheduler: str
    def __init__(self, scheduler: _Optional[str] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "rank", "num_blocks", "num_slots", "model_fingerprint", "model_name", "vocab_size", "end_token_ids", "max_position", "draft_fingerprint", "image_blocks", "state_blocks")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    rank: int
    num_blocks: int
    num_slots: int
    model_fingerprint: str
    model_name: str
    vocab_size: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_position: int
    draft_fingerprint: str
    image_blocks: int
    state_blocks: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., rank: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_slots: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., model_name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., max_position: _Optional[int] = ..., draft_fingerprint: _Optional[str] = ..., image_blocks: _Optional[int] = ..., state_blocks: _Optional[int] = ...) -> None: ...

class PrefillStep(_message.Message):
    __slots__ = ("step_id", "rows")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    rows: _containers.RepeatedCompositeFieldContainer[ChunkRow]
    def __init__(self, step_id: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[ChunkRow, _Mapping]]] = ...) -> None: ...

class ChunkRow(_message.Message):
    __slots__ = ("request_id", "room", "start", "end", "last", "tokens", "new_blocks", "slot", "sampling", "prefix_tokens", "next_token", "load_slot", "save_slot", "proposals")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOAD_SLOT_FIELD_NUMBER: _ClassVar[int]
    SAVE_SLOT_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    room: int
    start: int
    end: int
    last: bool
    tokens: bytes
    new_blocks: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    sampling: _common_pb2.Sampling
    prefix_tokens: int
    next_token: int
    load_slot: int
    save_slot: int
    proposals: int
    def __init__(self, request_id: _Optional[str] = ..., room: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., last: _Optional[bool] = ..., tokens: _Optional[bytes] = ..., new_blocks: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., prefix_tokens: _Optional[int] = ..., next_token: _Optional[int] = ..., load_slot: _Optional[int] = ..., save_slot: _Optional[int] = ..., proposals: _Optional[int] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("step_id", "stage", "started", "ended", "first_tokens")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    stage: int
    started: float
    ended: float
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    def __init__(self, step_id: _Optional[int] = ..., stage: _Optional[int] = ..., started: _Optional[float] = ..., ended: _Optional[float] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("room", "token", "window")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    room: int
    token: int
    window: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, room: _Optional[int] = ..., token: _Optional[int] = ..., window: _Optional[_Iterable[int]] = ...) -> None: ...

class ForgetRooms(_message.Message):
    __slots__ = ("rooms",)
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rooms: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundPlan(_message.Message):
    __slots__ = ("round_id", "bucket", "mode", "installs", "clears", "deltas", "live", "width", "proposals", "most_proposals", "retracts", "restores")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    INSTALLS_FIELD_NUMBER: _ClassVar[int]
    CLEARS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    MOST_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    RETRACTS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    bucket: int
    mode: RoundMode
    installs: _containers.RepeatedCompositeFieldContainer[PlaceInstall]
    clears: _containers.RepeatedScalarFieldContainer[int]
    deltas: _containers.RepeatedCompositeFieldContainer[BlockDelta]
    live: _containers.RepeatedScalarFieldContainer[int]
    width: int
    proposals: int
    most_proposals: int
    retracts: _containers.RepeatedCompositeFieldContainer[PlaceRetract]
    restores: _containers.RepeatedCompositeFieldContainer[PlaceRestore]
    def __init__(self, round_id: _Optional[int] = ..., bucket: _Optional[int] = ..., mode: _Optional[_Union[RoundMode, str]] = ..., installs: _Optional[_Iterable[_Union[PlaceInstall, _Mapping]]] = ..., clears: _Optional[_Iterable[int]] = ..., deltas: _Optional[_Iterable[_Union[BlockDelta, _Mapping]]] = ..., live: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., proposals: _Optional[int] = ..., most_proposals: _Optional[int] = ..., retracts: _Optional[_Iterable[_Union[PlaceRetract, _Mapping]]] = ..., restores: _Optional[_Iterable[_Union[PlaceRestore, _Mapping]]] = ...) -> None: ...

class PlaceInstall(_message.Message):
    __slots__ = ("place", "room", "blocks", "slot", "position", "window", "sampling")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    place: int
    room: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    slot: int
    position: int
    window: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    def __init__(self, place: _Optional[int] = ..., room: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., slot: _Optional[int] = ..., position: _Optional[int] = ..., window: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ...) -> None: ...

class BlockDelta(_message.Message):
    __slots__ = ("place", "blocks")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    place: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, place: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class PlaceRetract(_message.Message):
    __slots__ = ("place", "room", "position", "image")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    place: int
    room: int
    position: int
    image: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, place: _Optional[int] = ..., room: _Optional[int] = ..., position: _Optional[int] = ..., image: _Optional[_Iterable[int]] = ...) -> None: ...

class PlaceRestore(_message.Message):
    __slots__ = ("install", "found", "image")
    INSTALL_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    install: PlaceInstall
    found: int
    image: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, install: _Optional[_Union[PlaceInstall, _Mapping]] = ..., found: _Optional[int] = ..., image: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundResult(_message.Message):
    __slots__ = ("round_id", "replica", "started", "ended", "copied", "places", "counts", "tokens", "proposals")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    replica: int
    started: float
    ended: float
    copied: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    proposals: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round_id: _Optional[int] = ..., replica: _Optional[int] = ..., started: _Optional[float] = ..., ended: _Optional[float] = ..., copied: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., proposals: _Optional[_Iterable[int]] = ...) -> None: ...
