"""The decode engine's workers and agents: a leader for each replica, an agent for each rank."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from k3mesh.errors import EngineLost, TransferFailed
from services.contracts.arguments import SchedulerArguments
from services.contracts.ids import GlobalRank
from services.scheduler.decode import events as ev
from services.scheduler.decode import wire
from services.scheduler.decode.shape import EngineShape
from services.scheduler.fleet import EngineFleet

PAIR_S = 60.0  # agents link to a prefill engine within this


class Fleet(EngineFleet):
    """Gathers a round's results into one event, and links the agents to those of a prefill engine."""

    def __init__(self, arguments: SchedulerArguments, fence: int):
        super().__init__(arguments, fence, wire.worker_report, wire.agent_report)
        leaders = arguments.world_size // arguments.attn_tp_size
        self._results: list[deque[wire.RoundResult]] = [deque() for _ in range(leaders)]  # by replica: one may be a round ahead
        self._pairing = asyncio.Lock()  # a refusal does not say whom it refuses, so one engine pairs at a time
        self._pairing_with: wire.PrefillHello | None = None
        self._unpaired: dict[GlobalRank, asyncio.Future[None]] = {}
        self.on_unlinked: Callable[[GlobalRank, ev.Failure], None] | None = None  # an agent has given its pairing up

    def shape(self) -> EngineShape:
        """After start()."""
        arguments = self._arguments
        return EngineShape(
            engine_id=arguments.engine_id,
            epoch=self.hello.engine_epoch,
            replicas=arguments.data_parallel_size,
            tp_size=arguments.attn_tp_size,
            places=arguments.replica_seqs,
            num_blocks=self.hello.num_blocks,
            num_slots=self.hello.num_slots,
            verify_width=arguments.verify_width,
            adaptive=arguments.speculative_adaptive,
            max_model_len=arguments.max_model_len,
            end_tokens=frozenset(self.hello.end_token_ids),
            buckets=arguments.buckets(),
            graphs=not arguments.enforce_eager,
            request_timeout=arguments.request_timeout,
            keys=self.block_keys(),
            image_blocks=self.hello.image_blocks,
            state_blocks=self.hello.state_blocks,
        )

    async def run(self, post: Callable[[Any], None]) -> NoReturn:
        """Events of the planner go to `post`. Ends by EngineLost when a worker or an agent is lost."""

        def hear_worker(report: Any) -> None:
            if isinstance(report, wire.RoundResult):
                self._gather(report, post)

        def hear_agent(rank: GlobalRank, report: Any) -> None:
            match report:
                case ev.AgentRankReady() | ev.AgentRoomFailed() | ev.AgentDrained():
                    post(report)
                case wire.Paired():
                    self._paired(rank, report)
                case wire.PairRefused(failure):
                    self._refused(rank, failure)
                case _:
                    pass

        await self.drive(hear_worker, hear_agent)

    # ---- effects
    def launch(self, plan: ev.RoundPlan) -> None:
        for drive, command in zip(self._workers, wire.round_commands(plan, self._fence), strict=True):
            drive.send(command)

    def expect(self, effect: ev.ExpectManifest) -> None:
        command = wire.expect_command(effect.manifest, self._fence)
        for rank in effect.ranks:
            self._agents[rank].send(command)

    def cancel(self, effect: ev.CancelOnAgents) -> None:
        self.cancel_room(effect.ranks, effect.room, effect.reason)

    async def pair(self, hello: wire.PrefillHello) -> None:
        """Link every agent to the prefill agents of its tensor-parallel rank. The agents' refusal, or TransferFailed when
        they take too long."""
        async with self._pairing:
            loop = asyncio.get_running_loop()
            self._pairing_with = hello
            self._unpaired = {GlobalRank(rank): loop.create_future() for rank in range(len(self._agents))}
            waiting = dict(self._unpaired)
            for rank, drive in enumerate(self._agents):
                tp = rank % hello.tp_size
                sources = tuple(hello.agents[stage * hello.tp_size + tp] for stage in range(hello.stages))
                drive.send(wire.pair_command(hello, sources, self._fence))
            try:
                async with asyncio.timeout(PAIR_S):
                    await asyncio.gather(*waiting.values())
            except TimeoutError as error:
                late = sorted(rank for rank, future in waiting.items() if future.cancelled() or not future.done())
                raise TransferFailed(
                    f"decode agents {late} have no link to prefill engine {hello.engine_id} after {PAIR_S:g} s; see their logs",
                    detail="PD_TIMEOUT_BOOT",
                ) from error
            finally:
                self._pairing_with, self._unpaired = None, {}

    # ---- reports
    def _gather(self, result: wire.RoundResult, post: Callable[[Any], None]) -> None:
        """A round is done when all replicas have answered it; one that does not answer is the planner's deadline."""
        if result.replica >= len(self._results):
            raise EngineLost(f"replica {result.replica} answers, but there are {len(self._results)}; the engine must restart")
        self._results[result.replica].append(result)
        if not all(self._results):
            return
        parts = [results.popleft() for results in self._results]
        if len({part.round_id for part in parts}) > 1:
            told = {part.replica: part.round_id for part in parts}
            raise EngineLost(f"the replicas are out of step: {told} (replica: round); the engine must restart")
        copied = tuple(room for part in parts for room in part.copied)
        post(ev.RoundDone(result.round_id, tuple(part.rows for part in parts), copied))

    def _paired(self, rank: GlobalRank, paired: wire.Paired) -> None:
        hello = self._pairing_with
        if hello is not None and (paired.engine_id, paired.engine_epoch) == (hello.engine_id, hello.engine_epoch):
            future = self._unpaired.get(rank)
            if future is not None and not future.done():
                future.set_result(None)

    def _refused(self, rank: GlobalRank, failure: ev.Failure) -> None:
        future = self._unpaired.get(rank)
        if future is not None and not future.done():
            future.set_exception(failure.error())
        elif self._pairing_with is None and self.on_unlinked is not None:
            self.on_unlinked(rank, failure)
