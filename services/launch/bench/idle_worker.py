"""A decode worker that computes nothing, for `k3mesh bench control`: `python -m services.launch.bench.idle_worker …`.

Its control stream, its fan-out to peers and its device thread are the worker's own. A round only takes time: whoever is live
gets letters of the alphabet, as many as the round is wide.
"""

import time
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial

from pydantic import Field
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from k3mesh.errors import Internal
from services.contracts.arguments import WorkerArguments
from services.contracts.flags import split_address
from services.runtime.process import Process, run
from services.worker import wire
from services.worker.engine import Engine
from services.worker.serving import Rank, serve

EPOCH = 1
VOCABULARY = 512  # the smallest that tokenizer_files makes
LETTERS = range(ord("a"), ord("z") + 1)  # a byte's token is the byte


class IdleWorkerArguments(WorkerArguments):
    round_ms: float = Field(default=0.0, ge=0, description="what a round takes, milliseconds")


class IdleReplica:
    """A rank of a decode replica: it knows its places' anchors and nothing else."""

    def __init__(self, arguments: IdleWorkerArguments):
        self._replica = arguments.rank // arguments.attn_tp_size
        self._round_s = arguments.round_ms / 1000
        self._anchors = [0] * arguments.replica_seqs
        longest = 2 * arguments.verify_width
        self._text = [tuple(LETTERS[(start + n) % len(LETTERS)] for n in range(longest)) for start in range(len(LETTERS))]
        self._rounds, self._busy_us = 0, 0

    def counters(self) -> dict[str, int]:
        return {}

    def totals(self) -> dict[str, int]:
        """Rounds that were run, and microseconds in them."""
        return {"rounds": self._rounds, "busy_us": self._busy_us}

    def execute(self, command: wire.Command) -> wire.RoundResult:
        if not isinstance(command, wire.RoundPlan):
            raise Internal(f"an idle worker runs decode rounds alone, not {type(command).__name__}")
        for it in command.installs:
            self._anchors[it.place] = 0
        started = time.time()
        if command.bucket and self._round_s:
            time.sleep(self._round_s)
        results = tuple(self._answer(place, command.width, command.proposals) for place in command.live)
        ended = time.time()
        if command.live:
            self._rounds += 1
            self._busy_us += round((ended - started) * 1e6)
        return wire.RoundResult(command.round_id, self._replica, results, started, ended)

    def _answer(self, place: int, width: int, proposals: int) -> wire.PlaceTokens:
        start = self._anchors[place]
        anchor = self._anchors[place] = (start + width) % len(LETTERS)
        return wire.PlaceTokens(place, self._text[start][1 : 1 + width], self._text[anchor][: 1 + proposals])


def meet(a: IdleWorkerArguments) -> TCPStore:
    """Return when all ranks are here, so that leaders listen before their peers connect. The first rank's store must stay
    until then."""
    store = TCPStore(*split_address(a.dist_init_addr), a.world_size, a.rank == 0, timedelta(seconds=a.startup_timeout))
    if store.add("here", 1) == a.world_size:
        store.set("all", "")
    store.wait(["all"])
    return store


async def main(process: Process, arguments: IdleWorkerArguments) -> None:
    first = arguments.rank - arguments.rank % arguments.attn_tp_size

    async def build(engine: Engine, stack: AsyncExitStack) -> Rank:
        store = await engine.call(partial(meet, arguments))
        stack.callback(lambda: store)  # kept as long as this rank
        hello = wire.WorkerHello(
            engine_id=arguments.engine_id,
            engine_epoch=EPOCH,
            rank=arguments.rank,
            num_blocks=arguments.num_blocks,
            num_slots=arguments.num_slots,
            model_fingerprint="idle",
            model_name=arguments.served_model_name,
            vocab_size=VOCABULARY,
            end_token_ids=(VOCABULARY - 1,),
            max_position=arguments.max_model_len,
        )
        return Rank(hello, IdleReplica(arguments))

    await serve(process, arguments, range(first, first + arguments.attn_tp_size), build)


if __name__ == "__main__":
    run("idle-worker", main, IdleWorkerArguments)
