"""What both schedulers say to their engine's workers and agents and hear from them, and how P introduces itself to D."""

from dataclasses import dataclass

from k3mesh.v1 import common_pb2, request_pb2, transfer_pb2, worker_pb2
from services.contracts.ids import GlobalRank, Room, Token

REASONS = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}


@dataclass(frozen=True, slots=True)
class PrefillHello:
    """The first message of a Pair stream."""

    engine_id: str
    engine_epoch: int
    stages: int
    tp_size: int
    agents: tuple[str, ...]  # by global rank: stage * tp_size + t
    model_fingerprint: str
    verify_width: int
    max_model_len: int


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
    end_token_ids: tuple[Token, ...]
    draft_fingerprint: str = ""  # empty without a drafter
    image_blocks: int = 0  # host memory for images of suspended requests, in cache blocks (decode)
    state_blocks: int = 0  # of them, what a KDA state takes


@dataclass(frozen=True, slots=True)
class AgentHello:
    engine_id: str
    engine_epoch: int
    rank: GlobalRank
    peer_address: str  # where agents of the other engine link to
    placement_fingerprint: str


def introduce_worker(scheduler: str, fence: int) -> worker_pb2.WorkerCommand:
    return worker_pb2.WorkerCommand(fence=fence, introduce=worker_pb2.Introduce(scheduler=scheduler))


def introduce_agent(scheduler: str, fence: int) -> transfer_pb2.AgentCommand:
    return transfer_pb2.AgentCommand(fence=fence, introduce=transfer_pb2.IntroduceAgent(scheduler=scheduler))


def cancel_command(room: Room, reason: str, fence: int) -> transfer_pb2.AgentCommand:
    return transfer_pb2.AgentCommand(fence=fence, cancel=request_pb2.CancelRoom(room=room, reason=reason))


def worker_hello(it: worker_pb2.WorkerHello) -> WorkerHello:
    return WorkerHello(
        engine_id=it.engine_id,
        engine_epoch=it.engine_epoch,
        rank=GlobalRank(it.rank),
        num_blocks=it.num_blocks,
        num_slots=it.num_slots,
        model_fingerprint=it.model_fingerprint,
        model_name=it.model_name,
        vocab_size=it.vocab_size,
        end_token_ids=tuple(map(Token, it.end_token_ids)),
        draft_fingerprint=it.draft_fingerprint,
        image_blocks=it.image_blocks,
        state_blocks=it.state_blocks,
    )


def agent_hello(it: transfer_pb2.AgentHello) -> AgentHello:
    return AgentHello(it.engine_id, it.engine_epoch, GlobalRank(it.rank), it.peer_address, it.placement_fingerprint)
