"""The two endpoints that generate: from a request's body to the last byte of its answer."""

import asyncio
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from k3mesh.errors import BadRequest, Cancelled, EngineLost, Internal, MeshError, NotFound
from services.gateway.generation import Generation, Job
from services.gateway.json_response import json_response
from services.gateway.limits import Admission, check_new_tokens, check_prompt, read_json
from services.gateway.mesh import Mesh
from services.gateway.metrics import Metrics
from services.gateway.openai.errors import error_body, first
from services.gateway.openai.types import Answer, AnswerHead, Delta, Dialect, GenerationRequest, Usage
from services.gateway.stream import EventStream
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.telemetry import log


@dataclass(frozen=True, slots=True)
class Serving:
    """What both endpoints share."""

    model_name: str
    mesh: Mesh
    tokenizer: Tokenizer | None
    admission: Admission
    metrics: Metrics
    max_body_bytes: int
    max_buffered_bytes: int
    request_timeout: float  # seconds


@dataclass(slots=True)
class Record:
    """What is told about a request when it has ended."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    usage: Usage = field(default_factory=Usage)
    outcome: str = "finished"


class GenerationEndpoint:
    """An ASGI application for one dialect."""

    def __init__(self, dialect: Dialect, serving: Serving):
        self._dialect = dialect
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the MeshError of a request whose response has not begun."""
        record = Record(scope["state"]["request_id"])
        try:
            await self._serve(Request(scope, receive), send, record)
        except Exception as raised:
            raise self._failed(record, raised) from raised
        except asyncio.CancelledError:
            record.outcome = Cancelled.code
            raise
        finally:
            self._serving.metrics.finished(self._dialect.name, record.outcome, record.started, record.usage)
            log.info(
                "request ended",
                endpoint=self._dialect.name,
                outcome=record.outcome,
                prompt_tokens=record.usage.prompt_tokens,
                completion_tokens=record.usage.completion_tokens,
                seconds=round(time.monotonic() - record.started, 4),
            )

    async def _serve(self, request: Request, send: Send, record: Record) -> None:
        asked = self._dialect.parse(await read_json(request, self._serving.max_body_bytes))
        served = self._serving.model_name
        if asked.model not in (None, served):
            message = f"model = {asked.model!r}: not served here; this is {served!r}"
            raise NotFound(message, param="model", detail="model_not_found")
        with self._serving.admission.places(asked.n):
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(_watch(request))
                job, answer = await self._prepare(asked, record)
                generation = Generation(job, self._serving.mesh, self._serving.metrics, self._serving.tokenizer)
                record.usage = generation.usage
                if asked.stream:
                    events = EventStream(self._serving.max_buffered_bytes)
                    writer = group.create_task(events.run(send))
                    await self._stream(asked, generation, answer, events, record)
                    await writer
                    finish = events.end
                else:
                    whole = json_response(await _collect(asked.n, generation, answer))

                    async def finish(send: Send) -> None:
                        await whole(request.scope, request.receive, send)

                watcher.cancel()
        await finish(send)

    async def _prepare(self, asked: GenerationRequest, record: Record) -> tuple[Job, Answer]:
        """Everything that can refuse a request before the mesh hears of it."""
        tokenizer = self._serving.tokenizer
        if asked.stop and tokenizer is None:
            raise BadRequest("stop: this checkpoint has no tokenizer files; use stop_token_ids", param="stop")
        model = await self._serving.mesh.model()
        prompt = await self._dialect.tokenize(asked)
        check_prompt(prompt, model, self._dialect.prompt_field)
        new_tokens = asked.new_tokens or self._dialect.default_max_tokens(model.max_model_len - len(prompt))
        check_new_tokens(new_tokens, len(prompt), model)
        ends = () if asked.ignore_eos else model.end_token_ids
        job = Job(
            request_id=record.request_id,
            prompt=prompt,
            choices=[asked.sampling(new_tokens, choice) for choice in range(asked.n)],
            stops=tuple(asked.stop),
            silent=frozenset((*ends, *asked.stop_token_ids)),
            timeout=self._serving.request_timeout,
            started=record.started,
        )
        head = AnswerHead(
            id=record.request_id,
            created=int(time.time()),
            model=self._serving.model_name,
            prompt=prompt,
            with_token_ids=asked.return_token_ids or tokenizer is None,
            with_usage=asked.include_usage,
        )
        return job, self._dialect.answer(head)

    async def _stream(
        self, asked: GenerationRequest, generation: Generation, answer: Answer, events: EventStream, record: Record
    ) -> None:
        """All events of the answer. An error after the first one becomes the last one."""
        shows_tokens = asked.return_token_ids or self._serving.tokenizer is None
        opened: set[int] = set()

        def emit(index: int, delta: Delta) -> None:
            if index not in opened:
                opened.add(index)
                for chunk in answer.opening(index):
                    events.put(chunk)
            if delta.text or delta.finish_reason or shows_tokens:
                events.put(answer.chunk(index, delta))

        try:
            await generation.run(emit)
            if asked.include_usage:
                events.put(answer.usage_chunk(generation.usage))
        except Exception as raised:
            if not events.started:
                raise
            events.fail(error_body(self._failed(record, raised)))
        else:
            events.done()

    def _failed(self, record: Record, raised: Exception) -> MeshError:
        """The error that the client is told, noted in the record."""
        error = first(raised)
        if not isinstance(error, MeshError):
            log.error("a request failed on a defect", exc_info=error)
            error = Internal(f"the gateway failed: {type(error).__name__}; its log has the traceback")
        if isinstance(error, EngineLost):
            self._serving.mesh.forget()
        record.outcome = error.code
        return error


async def _collect(choices: int, generation: Generation, answer: Answer) -> dict[str, object]:
    """The whole answer, when all choices are complete."""
    texts = ["" for _ in range(choices)]
    tokens: list[list[int]] = [[] for _ in range(choices)]
    reasons: list[str | None] = [None for _ in range(choices)]

    def emit(index: int, delta: Delta) -> None:
        texts[index] += delta.text
        tokens[index].extend(delta.tokens)
        reasons[index] = delta.finish_reason

    await generation.run(emit)
    deltas = [Delta(text, tuple(ids), reason) for text, ids, reason in zip(texts, tokens, reasons, strict=True)]
    return answer.whole(deltas, generation.usage)


async def _watch(request: Request) -> None:
    """Wait until the client goes away; Cancelled then."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise Cancelled("the client went away")
