"""One request on the mesh: n choices submitted, followed, and ended together."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from k3mesh.client import Finished, SamplingParams, Stream, Tokens
from k3mesh.errors import Cancelled, DeadlineExceeded, MeshError
from services.contracts.lifecycle import RANK, State
from services.gateway.mesh import ID_IN_USE, Mesh
from services.gateway.metrics import AnswerTimes, Metrics
from services.gateway.openai.types import Delta, Usage
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop import StopStrings
from services.gateway.text.tokenizer import Tokenizer

ID_LENGTH = 64
DEADLINE_GRACE_S = 5.0  # the mesh ends a late request itself; this is for a mesh that does not
Emit = Callable[[int, Delta], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What the mesh is to do for one HTTP request."""

    request_id: str
    prompt: list[int]
    choices: Sequence[SamplingParams]
    stops: tuple[str, ...]
    silent: frozenset[int]  # tokens that end an answer and are no part of its text
    timeout: float  # seconds, of the whole request
    started: float  # time.monotonic() at its arrival


class Choice:
    """The text of one answer while its tokens arrive. Without a tokenizer the text stays empty."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str], silent: frozenset[int]):
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stops = StopStrings(stops)
        self._silent = silent
        self.completion_tokens = 0

    def push(self, tokens: Sequence[int]) -> Delta:
        """What these tokens add; a delta with finish_reason "stop" if a stop string is complete, and none may follow."""
        text = ""
        for taken, token in enumerate(tokens, start=1):
            text += self._stops.push(self._text(token))
            if self._stops.matched is not None:
                self.completion_tokens += taken
                return Delta(text, tuple(tokens[:taken]), "stop")
        self.completion_tokens += len(tokens)
        return Delta(text, tuple(tokens))

    def finish(self, reason: str) -> Delta:
        """What was held back. A broken character at the very end may still complete a stop string."""
        text = self._stops.push(self._detokenizer.finish()) if self._detokenizer is not None else ""
        text += self._stops.finish()
        return Delta(text, (), "stop" if self._stops.matched is not None else reason)

    def _text(self, token: int) -> str:
        return "" if self._detokenizer is None or token in self._silent else self._detokenizer.push((token,))


class Generation:
    """Runs a job. Leaving `run` in any way but the good one cancels on the mesh whatever still runs there."""

    def __init__(self, job: Job, mesh: Mesh, metrics: Metrics, tokenizer: Tokenizer | None):
        self.usage = Usage(prompt_tokens=len(job.prompt))
        self._job = job
        self._mesh = mesh
        self._metrics = metrics
        self._tokenizer = tokenizer

    async def run(self, emit: Emit) -> None:
        """Give `emit` every choice's deltas as they come; the last one of each has a finish_reason.

        Raises the MeshError of the first choice that fails, perhaps inside an ExceptionGroup.
        """
        try:
            async with asyncio.timeout(self._job.timeout + DEADLINE_GRACE_S), asyncio.TaskGroup() as group:
                for index, sampling in enumerate(self._job.choices):
                    group.create_task(self._run_choice(child_id(self._job.request_id, index), index, sampling, emit))
        except TimeoutError:
            raise DeadlineExceeded(f"the request took longer than {self._job.timeout:g} s; ask for less") from None

    async def _run_choice(self, request_id: str, index: int, sampling: SamplingParams, emit: Emit) -> None:
        job, mesh = self._job, self._mesh
        with mesh.claim(request_id):
            figures = {"prompt_tokens": len(job.prompt), "max_tokens": sampling.max_tokens}
            mesh.ledger.transition(request_id, State.RECEIVED, 0, RANK[State.RECEIVED], **figures)
            stream = await mesh.client.submit(job.prompt, sampling, request_id=request_id, timeout=job.timeout)
            try:
                async with stream:
                    with self._metrics.answer(job.started) as times:
                        await self._follow(index, stream, times, emit)
            except (MeshError, asyncio.CancelledError) as error:
                self._note_refusal(stream, error)
                raise

    async def _follow(self, index: int, stream: Stream, times: AnswerTimes, emit: Emit) -> None:
        choice = Choice(self._tokenizer, self._job.stops, self._job.silent)
        async for event in stream:
            match event:
                case Tokens(tokens):
                    delta = choice.push(tokens)
                    times.tokens(len(delta.tokens))
                    self.usage.completion_tokens += len(delta.tokens)
                    emit(index, delta)
                    if delta.finish_reason is not None:
                        return
                case Finished():
                    self.usage.cached_tokens = event.cached_tokens
                    if event.drafts is not None:
                        self.usage.proposed_tokens += event.drafts.proposed
                        self.usage.accepted_tokens += event.drafts.accepted
                        self._metrics.drafts(event.drafts)
                    emit(index, choice.finish(event.reason))

    def _note_refusal(self, stream: Stream, error: MeshError | asyncio.CancelledError) -> None:
        """A request that the mesh never answered to, or that was lost with an engine, is nobody else's to journal, unless
        another one has its id."""
        if stream.accepted or (isinstance(error, MeshError) and error.detail == ID_IN_USE):
            return
        cancelled = not isinstance(error, MeshError) or isinstance(error, Cancelled)
        code, message = (error.code, error.message) if isinstance(error, MeshError) else ("cancelled", "the client went away")
        state = State.CANCELLED if cancelled else State.FAILED
        self._mesh.ledger.transition(stream.request_id, state, 0, RANK[State.QUEUED], error=code, message=message)


def child_id(request_id: str, index: int) -> str:
    """The mesh's id of one choice: the first has the request's own."""
    if index == 0:
        return request_id
    suffix = f"-{index}"
    return request_id[: ID_LENGTH - len(suffix)] + suffix
