"""The far ends of a decode scheduler's streams, on real gRPC servers: its replicas' leaders and its agents.

Left alone they do what real ones do: a place's next token is its anchor + 1, agents receive everything at once.
`hold_*` stops them at a point, and a test may speak for any of them.
"""

from dataclasses import dataclass
from typing import Any

from k3mesh.errors import MeshError
from k3mesh.v1 import request_pb2, transfer_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.runtime.channels import failure
from tests.lib.peers import Lines, Servers

END = 7  # the model's end token
FIRST = 20  # what prefill samples, unless told
EPOCH = 43


@dataclass
class Script:
    """How the peers behave."""

    first_token: int = FIRST
    hold_rounds: bool = False
    hold_ready: bool = False
    hold_drained: bool = False
    hold_pairing: bool = False
    refuse_pairing: MeshError | None = None


@dataclass
class Seat:
    room: int
    blocks: list[int]
    position: int
    anchor: int


class Worker(worker_pb2_grpc.WorkerControlServicer):
    """The leader of one replica."""

    def __init__(self, peers: "DecodePeers", replica: int):
        self.peers, self.replica, self.lines = peers, replica, Lines()
        self.places: dict[int, Seat] = {}
        self.held: list[worker_pb2.RoundPlan] = []
        self.hello = worker_pb2.WorkerHello(
            engine_id="decode-0", engine_epoch=EPOCH, rank=replica * peers.tp_size, num_blocks=12 - replica, num_slots=9,
            model_fingerprint="abc", model_name="k3", vocab_size=1000, end_token_ids=[END], max_position=4096,
        )  # fmt: skip

    @property
    def rounds(self) -> list[worker_pb2.RoundPlan]:
        return [command.round for command in self.lines.heard if command.WhichOneof("command") == "round"]

    async def Drive(self, request_iterator: Any, context: Any) -> Any:
        async for report in self.lines.serve(request_iterator, self._react):
            yield report

    def _react(self, command: worker_pb2.WorkerCommand) -> None:
        match command.WhichOneof("command"):
            case "introduce":
                self.lines.say(worker_pb2.WorkerReport(hello=self.hello))
            case "round" if self.peers.script.hold_rounds:
                self.held.append(command.round)
            case "round":
                self.run(command.round)

    def run(self, plan: worker_pb2.RoundPlan) -> None:
        for place in plan.clears:
            del self.places[place]
        for it in plan.installs:
            assert it.place not in self.places
            self.places[it.place] = Seat(it.room, list(it.blocks), it.position, it.window[0])
        for delta in plan.deltas:
            self.places[delta.place].blocks += delta.blocks
        result = worker_pb2.RoundResult(round_id=plan.round_id, replica=self.replica)
        for place in plan.live:
            seat = self.places[place]
            seat.anchor, seat.position = seat.anchor + 1, seat.position + 1
            result.places.append(place)
            result.counts.append(1)
            result.tokens.append(seat.anchor)
        self.lines.say(worker_pb2.WorkerReport(round=result))


class Agent(transfer_pb2_grpc.TransferControlServicer):
    def __init__(self, peers: "DecodePeers", rank: int):
        self.peers, self.rank, self.lines = peers, rank, Lines()
        self.manifests: dict[int, transfer_pb2.Manifest] = {}
        self.cancelled: list[int] = []
        self.pairs: list[transfer_pb2.PairWith] = []
        self.hello = transfer_pb2.AgentHello(engine_id="decode-0", engine_epoch=EPOCH, rank=rank, peer_address=f"peer-{rank}")

    async def Drive(self, request_iterator: Any, context: Any) -> Any:
        async for report in self.lines.serve(request_iterator, self._react):
            yield report

    def _react(self, command: transfer_pb2.AgentCommand) -> None:
        script = self.peers.script
        match command.WhichOneof("command"):
            case "introduce":
                self.say(hello=self.hello)
            case "pair":
                self.pairs.append(command.pair)
                if script.refuse_pairing is not None:
                    self.say(pair_refused=failure(script.refuse_pairing))
                elif not script.hold_pairing:
                    pair = command.pair
                    self.say(paired=transfer_pb2.Paired(engine_id=pair.engine_id, engine_epoch=pair.engine_epoch))
            case "expect":
                self.manifests[command.expect.room] = command.expect
                if not script.hold_ready:
                    self.ready(command.expect.room)
            case "cancel":
                self.cancelled.append(command.cancel.room)
                if not script.hold_drained:
                    self.drained(command.cancel.room)

    def say(self, **report: Any) -> None:
        self.lines.say(transfer_pb2.AgentReport(**report))

    def ready(self, room: int, token: int | None = None) -> None:
        token = self.peers.script.first_token if token is None else token
        attempt = self.manifests[room].attempt
        self.say(
            rank_ready=transfer_pb2.RankReady(
                room=room, attempt=attempt, token=token, window=[token], bytes=5_000_000, first_byte=10.0, last_byte=10.5
            )
        )

    def failed(self, room: int, error: MeshError) -> None:
        attempt = self.manifests[room].attempt
        self.say(failed=transfer_pb2.RoomFailed(room=room, attempt=attempt, failure=failure(error)))

    def drained(self, room: int) -> None:
        self.say(drained=transfer_pb2.Drained(room=room))


class DecodePeers(Servers):
    """A decode engine of `replicas` replicas of `tp_size` ranks. `start` before use, `stop` after."""

    def __init__(self, replicas: int = 2, tp_size: int = 2):
        super().__init__()
        self.replicas, self.tp_size, self.script = replicas, tp_size, Script()
        self.workers = [Worker(self, replica) for replica in range(replicas)]
        self.agents = [Agent(self, rank) for rank in range(replicas * tp_size)]

    async def start(self) -> None:
        for worker in self.workers:
            await self.serve(worker, worker_pb2_grpc.add_WorkerControlServicer_to_server, "WorkerControl")
        for agent in self.agents:
            await self.serve(agent, transfer_pb2_grpc.add_TransferControlServicer_to_server, "TransferControl")

    def release_rounds(self) -> None:
        """Run what was held, and hold no more."""
        self.script.hold_rounds = False
        for worker in self.workers:
            held, worker.held = worker.held, []
            for plan in held:
                worker.run(plan)


class PrefillEnd:
    """A prefill scheduler's end of the Pair stream."""

    def __init__(self, stub: Any, epoch: int = 42, **changes: Any):
        hello: dict[str, Any] = {
            "engine_id": "prefill-0", "engine_epoch": epoch, "stages": 2, "tp_size": 2, "agents": ["a:0", "a:1", "a:2", "a:3"],
            "model_fingerprint": "abc", "verify_width": 1, "max_model_len": 1024,
        }  # fmt: skip
        self._hello = request_pb2.PrefillHello(**hello | changes)
        self._call = stub.Pair()
        self._room = epoch * 1000

    async def hear(self) -> request_pb2.DecodeToPrefill:
        return await self._call.read()

    async def pair(self) -> request_pb2.DecodeToPrefill:
        """-> the answer to our hello."""
        await self._call.write(request_pb2.PrefillToDecode(hello=self._hello))
        return await self.hear()

    async def reserve(self, request_id: str, prompt_tokens: int = 200, max_tokens: int = 4, **changes: Any) -> int:
        """-> the room; the answer is heard by the caller."""
        self._room += 1
        asked = request_pb2.Reserve(
            request_id=request_id, room=self._room, attempt=1, prompt_tokens=prompt_tokens, prompt_hash=b"h" * 32,
            timeout_ms=60_000,
        )  # fmt: skip
        asked.sampling.max_tokens = max_tokens
        for name, value in changes.items():
            setattr(asked.sampling, name, value)
        await self._call.write(request_pb2.PrefillToDecode(reserve=asked))
        return self._room

    async def reserved(self, request_id: str, **changes: Any) -> int:
        """-> the room of an accepted reservation."""
        room = await self.reserve(request_id, **changes)
        answer = await self.hear()
        assert answer.reserved.accepted and answer.reserved.room == room, answer
        return room

    async def cancel(self, room: int, **changes: Any) -> None:
        await self._call.write(request_pb2.PrefillToDecode(cancel=request_pb2.CancelRoom(room=room, **changes)))

    def hang_up(self) -> None:
        self._call.cancel()
