"""Credits: the right to hold a staging frame. What bounds an agent's memory and keeps one peer from taking it all (pure)."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NewType, TypeVar

FrameId = NewType("FrameId", int)  # index of a staging frame

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Ring(Generic[K]):
    """Staging frames 0..frames-1. An owner (a link) holds at most `window` of them, so a slow one leaves room for others."""

    def __init__(self, frames: int, window: int):
        if frames < 1 or window < 1:
            raise ValueError(f"a ring of {frames} frames with a window of {window}: both must be at least 1")
        self.frames = frames
        self.window = window
        self._free = [FrameId(n) for n in range(frames - 1, -1, -1)]
        self._owners: dict[FrameId, K] = {}
        self._held: dict[K, int] = {}

    @property
    def used(self) -> int:
        return len(self._owners)

    def can_take(self, owner: K) -> bool:
        return bool(self._free) and self._held.get(owner, 0) < self.window

    def take(self, owner: K) -> FrameId:
        assert self.can_take(owner), f"no credit left for {owner}"
        frame = self._free.pop()
        self._owners[frame] = owner
        self._held[owner] = self._held.get(owner, 0) + 1
        return frame

    def give_back(self, frame: FrameId) -> None:
        owner = self._owners.pop(frame)
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._free.append(frame)

    def check(self) -> None:
        """Every frame is free once or held once, and no owner is over its window."""
        assert sorted([*self._free, *self._owners]) == list(range(self.frames)), "a staging frame is lost or given twice"
        assert all(0 < held <= self.window for held in self._held.values()), f"windows overrun: {self._held}"
        assert sum(self._held.values()) == len(self._owners)


class FairQueue(Generic[K, T]):
    """A first-in-first-out queue for each key; keys that may go take turns."""

    def __init__(self) -> None:
        self._queues: dict[K, deque[T]] = {}  # in order of turns; no queue is empty

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, key: K, item: T) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def turn(self, may_go: Callable[[K], bool]) -> tuple[K, T] | None:
        """Take the first item of the next key that may go; its other items wait for its next turn."""
        for key, queue in self._queues.items():
            if may_go(key):
                item = queue.popleft()
                del self._queues[key]
                if queue:
                    self._queues[key] = queue
                return key, item
        return None

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        kept = {key: deque(item for item in queue if not unwanted(item)) for key, queue in self._queues.items()}
        self._queues = {key: queue for key, queue in kept.items() if queue}
