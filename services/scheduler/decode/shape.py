"""The decode engine as its planner knows it."""

from dataclasses import dataclass

from services.contracts.geometry import rows_ahead
from services.contracts.ids import GlobalRank, Replica, Token
from services.scheduler.block_keys import BlockKeys
from services.scheduler.decode.capacity import max_request_tokens


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Agreed on by all ranks at start. `num_blocks` and `num_slots` are of one replica, the null units included."""

    engine_id: str
    epoch: int
    replicas: int
    tp_size: int
    places: int  # of one replica
    num_blocks: int
    num_slots: int
    verify_width: int
    adaptive: bool  # rounds may be narrower than verify_width
    max_model_len: int
    end_tokens: frozenset[Token]
    buckets: tuple[int, ...]  # captured sizes, ascending
    graphs: bool
    request_timeout: float  # seconds, for requests that bring no deadline
    keys: BlockKeys | None = None  # names cached blocks; None without a prefix cache
    image_blocks: int = 0  # of one rank's host memory for suspended requests; 0: nobody is suspended
    state_blocks: int = 1  # of them, what a KDA state takes

    @property
    def rows_ahead(self) -> int:
        """Positions from an anchor on that one round may write."""
        return rows_ahead(self.verify_width)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and new tokens of one request."""
        return max_request_tokens(self.num_blocks, self.max_model_len, self.rows_ahead)

    def ranks_of(self, replica: Replica) -> tuple[GlobalRank, ...]:
        first = replica * self.tp_size
        return tuple(map(GlobalRank, range(first, first + self.tp_size)))
