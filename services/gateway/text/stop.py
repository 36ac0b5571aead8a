"""Stop strings, wherever token and chunk borders fall."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a text that arrives in pieces at the first stop string that becomes complete.

    What could still be the beginning of one is held back, so nothing of a stop string is ever shown. The cut does not
    depend on how the text was split: it falls where a reader of single characters would first see a stop string whole.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that is safe to show and was not shown before. After a match: nothing."""
        if not self._stops or not text:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        found = self._first_match()
        if found is not None:
            start, self.matched = found
            shown, self._held = self._held[:start], ""
            return shown
        keep = self._unfinished()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back; no more text follows."""
        shown, self._held = self._held, ""
        return shown

    def _first_match(self) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first; of those that end together, the longest."""
        matches = [(start, stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        return min(matches, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)

    def _unfinished(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
