"""Straight lines through what one mesh on one machine was seen to take; `k3mesh sim --calibrate` draws them."""

from collections.abc import Sequence

from services.simulate.constants import Constants
from services.simulate.costs import Chunk, Contention, Control, Round


class MeasuredCosts:
    """Lines through measurements of one mesh."""

    def __init__(self, constants: Constants, stages: int):
        self.control = Control.of(constants)
        self.contention = Contention.of(constants)
        self.nic = constants.number("nic_bytes_per_s")
        self.host_copy = constants.number("host_copy_bytes_per_s")
        self.acceptance = constants.numbers("acceptance")
        self._step, self._token = constants.numbers("stage_step_s"), constants.numbers("stage_token_s")
        self._pair = constants.number("stage_pair_s")
        self._last_stage = stages - 1
        self._last = constants.number("stage_last_s")
        self._hop = constants.number("hop_s"), constants.number("hop_token_s")
        self._round = (
            constants.number("replica_round_s"),
            constants.number("replica_row_s"),
            constants.number("replica_context_s"),
        )

    def stage(self, stage: int, chunks: Sequence[Chunk]) -> float:
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        pairs = sum((chunk.end**2 - chunk.start**2) / 2 for chunk in chunks)
        fixed, token = (of[min(stage, len(of) - 1)] for of in (self._step, self._token))
        last = self._last * sum(chunk.last for chunk in chunks) if stage == self._last_stage else 0.0
        return fixed + token * tokens + self._pair * pairs + last

    def hop(self, stage: int, tokens: int) -> float:
        fixed, token = self._hop
        return fixed + token * tokens

    def round(self, it: Round) -> tuple[float, ...]:
        fixed, row, context = self._round
        rows = it.bucket * it.width  # padded rows cost what live ones cost
        return tuple(fixed + row * rows + context * of for of in it.contexts)
