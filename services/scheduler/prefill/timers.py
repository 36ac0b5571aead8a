"""The next request whose time comes."""

import heapq
from collections.abc import Iterator
from math import inf

from services.scheduler.prefill.request import Request


class Timers:
    """Wakes up for each request no later than its `due`. A due time that moved away is looked at once too often, which
    costs less than finding its old entry."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._entries = 0

    def arm(self, request: Request) -> None:
        """Call it when the request's due time may have changed."""
        if request.due < request.armed:
            request.armed = request.due
            self._entries += 1
            heapq.heappush(self._heap, (request.armed, self._entries, request))

    def disarm(self, request: Request) -> None:
        """The request is gone; its entries are dropped as they come up."""
        request.armed = -inf

    def next(self) -> float | None:
        while self._heap and self._heap[0][0] != self._heap[0][2].armed:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Iterator[Request]:
        """Requests whose time has come, each once, earliest first. They are armed again before the next is looked at."""
        while (time := self.next()) is not None and time <= now:
            request = heapq.heappop(self._heap)[2]
            request.armed = inf
            if request.due <= now:
                yield request
            if request.armed == inf:
                self.arm(request)
