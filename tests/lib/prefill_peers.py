"""The far ends of a prefill scheduler's streams, on real gRPC servers: its workers and agents, and a decode scheduler.

Left alone they do what real ones do; `hold_*` stops them at a point, and a test may speak for any of them.
"""

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from k3mesh.errors import MeshError
from k3mesh.v1 import common_pb2, request_pb2, request_pb2_grpc, transfer_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.runtime.channels import failure
from tests.lib.follow import follow
from tests.lib.peers import Lines, Servers

END = 7  # the model's end token
VOCAB = 100
Reserve = request_pb2.Reserve


@dataclass
class Script:
    """How the peers behave."""

    first_token: int = 8
    hold_steps: bool = False
    hold_ready: bool = False
    hold_install: bool = False
    places: int = 64
    refuse: MeshError | None = None  # every reservation, for good
    refuse_pairing: MeshError | None = None
    answer: list[int] = field(default_factory=lambda: [8, 9])  # of D's stream, the first token included


class Worker(worker_pb2_grpc.WorkerControlServicer):
    """The leader of one stage."""

    def __init__(self, peers: "Peers", stage: int):
        self.peers, self.stage, self.lines = peers, stage, Lines()
        self.held: list[worker_pb2.PrefillStep] = []
        self.hello = worker_pb2.WorkerHello(
            engine_id="prefill-0", engine_epoch=42, rank=stage, num_blocks=100 - stage, num_slots=9, model_fingerprint="abc",
            model_name="k3", vocab_size=VOCAB, end_token_ids=[END], max_position=4096,
        )  # fmt: skip

    @property
    def steps(self) -> list[worker_pb2.PrefillStep]:
        return [command.prefill for command in self.lines.heard if command.WhichOneof("command") == "prefill"]

    @property
    def forgotten(self) -> list[int]:
        return [room for command in self.lines.heard for room in command.forget.rooms]

    async def Drive(self, request_iterator: Any, context: Any) -> Any:
        async for report in self.lines.serve(request_iterator, self._react):
            yield report

    def _react(self, command: worker_pb2.WorkerCommand) -> None:
        match command.WhichOneof("command"):
            case "introduce":
                self.lines.say(worker_pb2.WorkerReport(hello=self.hello))
            case "prefill" if self.peers.script.hold_steps:
                self.held.append(command.prefill)
            case "prefill":
                self.run(command.prefill)

    def run(self, step: worker_pb2.PrefillStep) -> None:
        last_stage = self.stage == len(self.peers.workers) - 1
        done = worker_pb2.StepDone(step_id=step.step_id, stage=self.stage, started=100.0 + step.step_id, ended=101.0)
        for row in step.rows:
            if row.last and last_stage:
                token = self.peers.script.first_token
                done.first_tokens.add(room=row.room, token=token, window=[token])
        self.lines.say(worker_pb2.WorkerReport(step=done))
        for row in step.rows:
            if row.last:
                self.peers.sent(self.stage, row.room)


class Agent(transfer_pb2_grpc.TransferControlServicer):
    def __init__(self, peers: "Peers", rank: int):
        self.peers, self.rank, self.lines = peers, rank, Lines()
        self.hello = transfer_pb2.AgentHello(engine_id="prefill-0", engine_epoch=42, rank=rank, peer_address=f"peer-{rank}")
        self.cancelled: list[int] = []

    async def Drive(self, request_iterator: Any, context: Any) -> Any:
        async for report in self.lines.serve(request_iterator, self._react):
            yield report

    def _react(self, command: transfer_pb2.AgentCommand) -> None:
        match command.WhichOneof("command"):
            case "introduce":
                self.lines.say(transfer_pb2.AgentReport(hello=self.hello))
            case "cancel":
                self.cancelled.append(command.cancel.room)
                self.lines.say(transfer_pb2.AgentReport(drained=transfer_pb2.Drained(room=command.cancel.room)))


class Decode(request_pb2_grpc.DecodeSchedulerServicer):
    def __init__(self, peers: "Peers"):
        self.peers, self.lines = peers, Lines()
        self.address = ""
        self.rooms: dict[int, Reserve] = {}
        self.reserved: list[Reserve] = []
        self.cancelled: list[request_pb2.CancelRoom] = []
        self.asked_to_cancel: list[str] = []
        self.hello: request_pb2.PrefillHello | None = None

    async def Pair(self, request_iterator: Any, context: Any) -> Any:
        async for message in self.lines.serve(request_iterator, self._react):
            yield message

    async def Follow(self, request_iterator: Any, context: Any) -> Any:
        async for events in follow(self._play, request_iterator):
            yield events

    async def _play(self, request: Any, context: Any) -> Any:
        answer = self.peers.script.answer
        for token in answer:
            yield request_pb2.RequestEvent(tokens=request_pb2.TokenBatch(tokens=[token]))
        finished = request_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=len(answer))
        yield request_pb2.RequestEvent(finished=finished)

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.asked_to_cancel.append(request.request_id)
        return request_pb2.CancelReply(known=request.request_id == "on-decode")

    def _react(self, message: request_pb2.PrefillToDecode) -> None:
        script = self.peers.script
        match message.WhichOneof("message"):
            case "hello" if script.refuse_pairing is not None:
                self.lines.say(request_pb2.DecodeToPrefill(refused=failure(script.refuse_pairing)))
                self.lines.hang_up()
            case "hello":
                self.hello = message.hello
                hello = request_pb2.DecodeHello(
                    engine_id="decode-0", engine_epoch=43, client_address=self.address, replicas=1, tp_size=1, verify_width=1,
                    max_model_len=4096, max_request_tokens=4000,
                )  # fmt: skip
                self.lines.say(request_pb2.DecodeToPrefill(hello=hello))
            case "reserve":
                self._reserve(message.reserve)
            case "cancel":
                self.cancelled.append(message.cancel)
                self.rooms.pop(message.cancel.room, None)
                self.lines.say(request_pb2.DecodeToPrefill(ended=request_pb2.RoomEnded(room=message.cancel.room)))

    def _reserve(self, asked: Reserve) -> None:
        self.reserved.append(asked)
        script = self.peers.script
        refused = failure(script.refuse) if script.refuse is not None else None
        accepted = refused is None and len(self.rooms) < script.places
        reply = request_pb2.ReserveReply(room=asked.room, accepted=accepted, failure=refused)
        self.lines.say(request_pb2.DecodeToPrefill(reserved=reply))
        if accepted:
            self.rooms[asked.room] = asked
            if not script.hold_ready:
                self.peers.make_ready(asked.room)


class Peers(Servers):
    """A prefill engine of `stages` stages and one decode scheduler. `start` before use, `stop` after."""

    def __init__(self, stages: int = 2):
        super().__init__()
        self.script = Script()
        self.workers = [Worker(self, stage) for stage in range(stages)]
        self.agents = [Agent(self, rank) for rank in range(stages)]
        self.decode = Decode(self)
        self._sent: dict[int, set[int]] = defaultdict(set)

    async def start(self) -> None:
        for worker in self.workers:
            await self.serve(worker, worker_pb2_grpc.add_WorkerControlServicer_to_server, "WorkerControl")
        for agent in self.agents:
            await self.serve(agent, transfer_pb2_grpc.add_TransferControlServicer_to_server, "TransferControl")
        await self.start_decode()

    async def start_decode(self) -> None:
        """On the address that it had before, if it was stopped."""
        listen = self.decode.address or "127.0.0.1:0"
        add = request_pb2_grpc.add_DecodeSchedulerServicer_to_server
        self.decode.address = await self.serve(self.decode, add, "DecodeScheduler", listen)

    async def stop_decode(self) -> None:
        self.decode.rooms.clear()
        await self.servers.pop(self.decode).stop(0)

    # ---- what the peers do among themselves
    def make_ready(self, room: int) -> None:
        """D's manifest reaches every agent."""
        for agent in self.agents:
            agent.lines.say(transfer_pb2.AgentReport(ready=transfer_pb2.RoomReady(room=room, attempt=1)))

    def sent(self, rank: int, room: int) -> None:
        """A stage has written its last chunk; D gets it, and installs when it has all stages."""
        if room not in self.decode.rooms:
            return
        self._sent[room].add(rank)
        released = transfer_pb2.SourceReleased(room=room, bytes=1000)
        self.agents[rank].lines.say(transfer_pb2.AgentReport(released=released))
        asked = self.decode.rooms[room]
        ends = self.script.first_token == END or asked.sampling.max_tokens == 1
        if len(self._sent[room]) == len(self.agents) and not ends and not self.script.hold_install:
            self.install(room)

    def install(self, room: int) -> None:
        del self.decode.rooms[room]
        self.decode.lines.say(request_pb2.DecodeToPrefill(installed=request_pb2.RoomInstalled(room=room)))

    def release_steps(self) -> None:
        """Run what was held, and hold no more."""
        self.script.hold_steps = False
        for worker in self.workers:
            held, worker.held = worker.held, []
            for step in held:
                worker.run(step)


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()
