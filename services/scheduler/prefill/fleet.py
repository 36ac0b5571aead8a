"""The prefill engine's workers and agents: a leader for each stage, an agent for each rank."""

from collections.abc import Callable
from typing import Any, NoReturn

import services.scheduler.prefill.events as ev
from services.contracts.arguments import SchedulerArguments
from services.contracts.ids import RequestId
from services.scheduler.fleet import EngineFleet
from services.scheduler.prefill import wire
from services.scheduler.prefill.admission import Limits


class Fleet(EngineFleet):
    """Every report is an event of the planner."""

    def __init__(self, arguments: SchedulerArguments, fence: int):
        super().__init__(arguments, fence, wire.worker_report, wire.agent_report)

    def limits(self) -> Limits:
        """After start()."""
        arguments = self._arguments
        return Limits(
            engine_id=arguments.engine_id,
            stages=arguments.pipeline_parallel_size,
            tp_size=arguments.attn_tp_size,
            num_blocks=self.hello.num_blocks,
            num_slots=self.hello.num_slots,
            max_num_seqs=arguments.max_num_seqs,
            chunk_tokens=arguments.chunked_prefill_size,
            max_model_len=arguments.max_model_len,
            vocab_size=self.hello.vocab_size,
            end_tokens=frozenset(self.hello.end_token_ids),
            verify_width=arguments.verify_width,
        )

    def introduction(self) -> wire.PrefillHello:
        """How this engine introduces itself to the decode scheduler. After start()."""
        arguments = self._arguments
        return wire.PrefillHello(
            engine_id=arguments.engine_id,
            engine_epoch=self.hello.engine_epoch,
            stages=arguments.pipeline_parallel_size,
            tp_size=arguments.attn_tp_size,
            agents=self.peer_addresses,
            model_fingerprint=self.hello.model_fingerprint,
            verify_width=arguments.verify_width,
            max_model_len=arguments.max_model_len,
        )

    async def run(self, post: Callable[[Any], None]) -> NoReturn:
        """Events of the planner go to `post`. Ends by EngineLost when a worker or an agent is lost."""
        await self.drive(post, lambda _, event: post(event))

    # ---- effects
    def launch(self, step: ev.PrefillStep, prompt: Callable[[RequestId], bytes]) -> None:
        command = wire.step_command(step, prompt, self._fence)
        for drive in self._workers:
            drive.send(command)

    def forget(self, effect: ev.ForgetRooms) -> None:
        command = wire.forget_command(effect, self._fence)
        for drive in self._workers:
            drive.send(command)

    def cancel(self, effect: ev.CancelOnAgents) -> None:
        self.cancel_room(effect.ranks, effect.room, effect.reason)
