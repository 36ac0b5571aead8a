"""The engine's limits, and may a request come in (spec scheduling §1, §2.1, §7)."""

import math
from dataclasses import dataclass

from services.contracts.geometry import blocks_for
from services.contracts.ids import BLOCK_TOKENS
from services.scheduler.prefill.events import Failure, RequestArrived

MAX_QUEUED = 512  # requests that wait for a decode place; the next one is told to come again
RESERVED_AHEAD = 2  # decode places for prompts that do not run yet, in batches of max_num_seqs


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine as its scheduler sees it. Times are in seconds."""

    engine_id: str
    stages: int
    tp_size: int
    num_blocks: int  # the null block included
    num_slots: int  # the null slot included
    max_num_seqs: int
    chunk_tokens: int  # new tokens of one batch, a multiple of 128
    max_model_len: int
    vocab_size: int
    end_tokens: frozenset[int]
    verify_width: int = 1
    max_queued: int = MAX_QUEUED
    answer_timeout: float = 30.0  # the decode scheduler's answer to a reservation
    ready_timeout: float = 120.0  # from the manifest until every rank has accepted it
    hold_timeout: float = 2.0  # a decode place is kept for a prompt that finds no blocks here
    step_timeout: float = 120.0  # some stage must answer meanwhile while steps are in flight
    transfer_timeout: float = 300.0  # from the first token until D has everything
    drain_timeout: float = 60.0  # a cancelled room must be out of the agents' hands

    @property
    def ranks(self) -> int:
        return self.stages * self.tp_size

    @property
    def reserved_ahead(self) -> int:
        return RESERVED_AHEAD * self.max_num_seqs

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that an empty pool takes, the drafter's rows included."""
        return (self.num_blocks - 1) * BLOCK_TOKENS - self.verify_width

    def prompt_blocks(self, prompt_tokens: int) -> int:
        """Blocks of a whole prompt. The last stage's drafter writes `verify_width` rows behind it."""
        return blocks_for(prompt_tokens + self.verify_width)


def refusal(arrived: RequestArrived, limits: Limits, decode_tokens: int) -> Failure | None:
    """Why this request can never be served, however empty the mesh is. `decode_tokens`: of one request on D."""
    sampling = arrived.sampling
    prompt, new = arrived.prompt_tokens, sampling.max_tokens
    total = f"{prompt} prompt tokens and max_tokens = {new}"
    cure = "shorten the prompt or ask for fewer tokens"
    rules = (
        (prompt >= 1, "the prompt is empty: it must have at least 1 token"),
        (new >= 1, f"max_tokens = {new}: must be at least 1"),
        (prompt + new <= limits.max_model_len, f"{total} exceed the context length of {limits.max_model_len}; {cure}"),
        (
            prompt <= limits.max_prompt_tokens,
            f"{prompt} prompt tokens: the prefill engine holds {limits.max_prompt_tokens} of one request; shorten the prompt",
        ),
        (prompt + new <= decode_tokens, f"{total}: one decode replica holds {decode_tokens} tokens of one request; {cure}"),
        (
            math.isfinite(sampling.temperature) and sampling.temperature >= 0,
            f"temperature = {sampling.temperature}: must be 0 (greedy) or more",
        ),
        (0 < sampling.top_p <= 1, f"top_p = {sampling.top_p}: must be above 0 and at most 1"),
        (sampling.top_k >= 0, f"top_k = {sampling.top_k}: must be 0 (off) or more"),
    )
    for holds, message in rules:
        if not holds:
            return Failure("bad_request", message)
    return None
