"""Messages of services/contracts on and off the wire: `x` makes the protobuf form, `read_x` the dataclass."""

from k3mesh.v1 import common_pb2, transfer_pb2
from services.contracts.ids import Token
from services.contracts.messages import Failure, Sampling
from services.contracts.placement import Manifest
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
