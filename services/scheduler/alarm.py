"""When wrong bytes are no accident any more: an engine whose handoffs keep arriving damaged is unhealthy (spec
cache-and-handoff §15, PD_BYTES). Pure."""

from services.contracts.ids import Room
from services.contracts.messages import Failure

WRONG_BYTES = "PD_BYTES"
STRIKES = 3  # rooms with wrong bytes
SPAN_S = 60.0  # within this; and the alarm is over when so much time has passed without one


class Alarm:
    """Rooms that failed by wrong bytes lately. Every rank may report the same one."""

    def __init__(self) -> None:
        self._rooms: dict[Room, float] = {}  # when each was first reported, oldest first
        self._over_at: float | None = None

    def hear(self, room: Room, failure: Failure | None, now: float) -> None:
        """A room has failed."""
        if failure is None or failure.detail != WRONG_BYTES or room in self._rooms:
            return
        self._rooms = {it: at for it, at in self._rooms.items() if at > now - SPAN_S} | {room: now}
        if len(self._rooms) >= STRIKES or self.raised(now):
            self._over_at = now + SPAN_S

    def raised(self, now: float) -> bool:
        return self._over_at is not None and now < self._over_at

    def reason(self, now: float) -> str:
        """Empty when all is well."""
        if not self.raised(now):
            return ""
        return (
            f"at least {STRIKES} handoffs within {SPAN_S:g} s brought wrong bytes (each was refused); no new requests until "
            f"{SPAN_S:g} s have passed without one; look at memory and network of the ranks that the agents' logs name"
        )

    def next_change(self, now: float) -> float | None:
        return self._over_at if self.raised(now) else None
