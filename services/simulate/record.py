"""What is noted of each simulated request."""

from dataclasses import dataclass
from math import inf

from services.simulate.workload import Asked


@dataclass(slots=True)
class Record:
    """One request's life, in virtual seconds; infinite for what did not happen."""

    number: int
    asked: Asked
    sent: float = inf  # by its client
    reserved: float = inf  # D has a place for it
    started: float = inf  # its first chunk was launched
    prefilled: float = inf
    transferred: float = inf  # all of its cache is on D
    first_token: float = inf  # at the client, as the next
    finished: float = inf
    tokens: int = 0
    bytes: int = 0  # sent to D, over all ranks
    chunks: int = 0
    failure: str = ""  # code of why it did not end well

    @property
    def ttft(self) -> float:
        return self.first_token - self.sent

    @property
    def tpot(self) -> float:
        """Seconds between its tokens on average; of one with a single token there is none."""
        return (self.finished - self.first_token) / (self.tokens - 1) if self.tokens > 1 else inf
