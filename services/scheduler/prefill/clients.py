"""The clients' streams, and the prompts that they have brought."""

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import services.scheduler.prefill.events as ev
from k3mesh.errors import BadRequest
from k3mesh.v1 import request_pb2
from services.contracts.ids import RequestId
from services.scheduler.prefill import wire
from services.scheduler.streams import Outbox

LAST = ev.PublishFinished | ev.PublishFailure | ev.PublishHandedOver


@dataclass(slots=True)
class _Submission:
    prompt: bytes
    prompt_hash: bytes
    outbox: Outbox[wire.Publication] = field(default_factory=Outbox[wire.Publication])
    open: bool = True  # the client still gets events


class Clients:
    """One submission for each request that the planner knows."""

    def __init__(self, post: Callable[[Any], None]):
        self._post = post
        self._submissions: dict[RequestId, _Submission] = {}
        self.streams = 0  # open Submit calls

    def is_open(self, request_id: RequestId) -> bool:
        """Its fate is decided here: D has not got it, and it is not over."""
        submission = self._submissions.get(request_id)
        return submission is not None and submission.open

    async def follow(
        self, arrived: ev.RequestArrived, prompt: bytes, decode_address: Callable[[], str], context: Any
    ) -> AsyncIterator[request_pb2.RequestEvent]:
        """Hand the request to the planner; then its events. A refusal that comes before any event is raised."""
        request_id = arrived.request_id
        if request_id in self._submissions:
            raise BadRequest(
                f"request_id {request_id!r} is in use; give each request its own",
                param="request_id",
                detail="request_id_in_use",
            )
        submission = self._submissions[request_id] = _Submission(prompt, hashlib.sha256(prompt).digest())
        self.streams += 1
        context.add_done_callback(
            lambda _: self._left(request_id, submission)
        )  # notices a client that leaves, wherever we wait
        self._post(arrived)
        begun = False
        async for publication in submission.outbox.sending():
            if isinstance(publication, ev.PublishFailure) and not begun:
                raise publication.failure.error()
            begun = True
            yield wire.request_event(publication, decode_address())

    def prompt(self, request_id: RequestId) -> bytes:
        return self._submissions[request_id].prompt

    def prompt_hash(self, request_id: RequestId) -> bytes:
        return self._submissions[request_id].prompt_hash

    # ---- effects
    def publish(self, effect: wire.Publication) -> None:
        submission = self._submissions[effect.request_id]
        submission.outbox.put(effect)
        if isinstance(effect, LAST):
            submission.open = False
            submission.outbox.close()

    def forget(self, effect: ev.RequestGone) -> None:
        del self._submissions[effect.request_id]

    def _left(self, request_id: RequestId, submission: _Submission) -> None:
        self.streams -= 1
        submission.outbox.close()
        if submission.open:
            submission.open = False
            self._post(ev.CancelRequested(request_id, "the client went away"))
