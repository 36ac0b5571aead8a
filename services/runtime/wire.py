"""Messages of services/contracts on and off the wire: `x` makes the protobuf form, `read_x` the dataclass."""

from k3mesh.errors import ConfigError
from k3mesh.v1 import common_pb2, transfer_pb2
from services.contracts.barriers import Handoff
from services.contracts.ids import BlockId, RequestId, Room, SlotId, Token
from services.contracts.messages import Failure, Sampling
from services.contracts.placement import Arena, FieldPlace, Manifest, Placement
from services.runtime import channels


def failure(it: Failure) -> common_pb2.Failure:
    return channels.failure(it.error())


def read_failure(it: common_pb2.Failure) -> Failure:
    return Failure(it.code, it.message, it.detail)


def sampling(it: Sampling) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=it.temperature,
        top_p=it.top_p,
        top_k=it.top_k,
        seed=it.seed,
        max_tokens=it.max_tokens,
        ignore_eos=it.ignore_eos,
        stop_token_ids=it.stop_token_ids,
    )


def read_sampling(it: common_pb2.Sampling) -> Sampling:
    return Sampling(
        temperature=it.temperature,
        top_p=it.top_p,
        top_k=it.top_k,
        seed=it.seed,
        max_tokens=it.max_tokens,
        ignore_eos=it.ignore_eos,
        stop_token_ids=tuple(map(Token, it.stop_token_ids)),
    )


def manifest(it: Manifest) -> transfer_pb2.Manifest:
    return transfer_pb2.Manifest(
        request_id=it.request_id,
        room=it.room,
        attempt=it.attempt,
        decode_epoch=it.decode_epoch,
        replica=it.replica,
        prefix_tokens=it.prefix_tokens,
        prompt_tokens=it.prompt_tokens,
        prompt_hash=it.prompt_hash,
        blocks=it.blocks,
        block_gens=it.block_gens,
        slot=it.slot,
        slot_gen=it.slot_gen,
        timeout_ms=round(it.timeout * 1000),
    )


def read_manifest(it: transfer_pb2.Manifest) -> Manifest:
    return Manifest(
        request_id=RequestId(it.request_id),
        room=Room(it.room),
        attempt=it.attempt,
        decode_epoch=it.decode_epoch,
        replica=it.replica,
        prefix_tokens=it.prefix_tokens,
        prompt_tokens=it.prompt_tokens,
        prompt_hash=it.prompt_hash,
        blocks=tuple(map(BlockId, it.blocks)),
        block_gens=tuple(it.block_gens),
        slot=SlotId(it.slot),
        slot_gen=it.slot_gen,
        timeout=it.timeout_ms / 1000,
    )


def handoff(it: Handoff) -> transfer_pb2.Handoff:
    return transfer_pb2.Handoff(token=it.token, window=it.window, cached_tokens=it.cached_tokens)


def read_handoff(it: transfer_pb2.Handoff) -> Handoff:
    return Handoff(it.token, tuple(it.window), it.cached_tokens)


def placement(it: Placement) -> transfer_pb2.Placement:
    return transfer_pb2.Placement(
        contract=it.contract,
        engine_id=it.engine_id,
        role=it.role,
        engine_epoch=it.engine_epoch,
        stage=it.stage,
        num_stages=it.num_stages,
        tp_rank=it.tp_rank,
        tp_size=it.tp_size,
        dp_rank=it.dp_rank,
        dp_size=it.dp_size,
        global_rank=it.global_rank,
        model_fingerprint=it.model_fingerprint,
        draft_fingerprint=it.draft_fingerprint,
        block_tokens=it.block_tokens,
        num_blocks=it.num_blocks,
        num_slots=it.num_slots,
        verify_width=it.verify_width,
        speculative_algorithm=it.speculative_algorithm,
        layer_lo=it.layer_lo,
        layer_hi=it.layer_hi,
        arenas=[transfer_pb2.Arena(arena_id=arena.arena_id, name=arena.name, length=arena.length) for arena in it.arenas],
        fields=[
            transfer_pb2.Field(
                field_id=field.field_id,
                layer=field.layer,
                kind=field.kind,
                dtype=field.dtype,
                shape=field.shape,
                arena_id=field.arena_id,
                offset=field.offset,
                unit_stride=field.unit_stride,
                payload=field.payload,
                parts=field.parts,
            )
            for field in it.fields
        ],
        fingerprint=it.fingerprint,
    )


def read_placement(it: transfer_pb2.Placement) -> Placement:
    """ConfigError if the record's fingerprint is not that of its content: the other side reads the contract differently."""
    record = Placement(
        contract=it.contract,
        engine_id=it.engine_id,
        role=it.role,
        engine_epoch=it.engine_epoch,
        stage=it.stage,
        num_stages=it.num_stages,
        tp_rank=it.tp_rank,
        tp_size=it.tp_size,
        dp_rank=it.dp_rank,
        dp_size=it.dp_size,
        global_rank=it.global_rank,
        model_fingerprint=it.model_fingerprint,
        draft_fingerprint=it.draft_fingerprint,
        block_tokens=it.block_tokens,
        num_blocks=it.num_blocks,
        num_slots=it.num_slots,
        verify_width=it.verify_width,
        speculative_algorithm=it.speculative_algorithm,
        layer_lo=it.layer_lo,
        layer_hi=it.layer_hi,
        arenas=tuple(Arena(arena.arena_id, arena.name, arena.length) for arena in it.arenas),
        fields=tuple(
            FieldPlace(
                field_id=field.field_id,
                layer=field.layer,
                kind=field.kind,
                dtype=field.dtype,
                shape=tuple(field.shape),
                arena_id=field.arena_id,
                offset=field.offset,
                unit_stride=field.unit_stride,
                payload=field.payload,
                parts=tuple(field.parts),
            )
            for field in it.fields
        ),
    )
    if record.fingerprint != it.fingerprint:
        raise ConfigError(
            f"{record.name}: the placement record has fingerprint {record.fingerprint}, it says {it.fingerprint!r}; "
            "run the same release in all processes",
            detail="PD_CONTRACT",
        )
    return record
