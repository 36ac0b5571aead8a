"""Rounds by replay against eager ones, with an emulation of graphs: what was captured is done again with the values that the
host code had then. A number that the host takes from who lives, where a graph would freeze it, shows as a wrong token."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import pytest
from torch import Tensor

from k3mesh.errors import Internal
from services.worker.cache.slots import SlotStates
from services.worker.device import CPU
from services.worker.round_check import CheckedRounds
from services.worker.round_graphs import Replay
from tests.lib.drafted import Checkpoints, SpeculativeRank
from tests.lib.graph_rounds import capture, play, replay
from tests.lib.static_ops import static

T = TypeVar("T")


class Emulated:
    """services.worker.round_graphs.Recorder on a CPU."""

    def record(self, body: Callable[[], T]) -> tuple[Replay, T]:
        out = body()
        return lambda: fill(out, body()), out

    def lend(self, tensor: Tensor) -> Tensor:
        return tensor


def fill(old: Any, new: Any) -> None:
    """The tensors of `old`, wherever they are in it, get the values of those of `new`."""
    if isinstance(old, Tensor):
        assert old.shape == new.shape, "a graph has one shape"
        old.copy_(new)
    elif is_dataclass(old):
        for field in fields(old):
            fill(getattr(old, field.name), getattr(new, field.name))
    elif isinstance(old, tuple | list):
        for one, other in zip(old, new, strict=True):
            fill(one, other)
    elif isinstance(old, dict):
        for key, one in old.items():
            fill(one, new[key])
    elif hasattr(old, "__dict__"):
        fill({key: value for key, value in vars(old).items() if isinstance(value, Tensor | dict)}, vars(new))


@pytest.fixture(params=["plain", "dspark", "nextn"])
def pair(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> tuple[SpeculativeRank, SpeculativeRank]:
    """Two ranks of one model, one of them by ops that a graph could hold."""
    kinds = {
        "plain": (checkpoints.target, None),
        "dspark": (checkpoints.target, checkpoints.dspark("1,3,5", "attn_res", True)),
        "nextn": (checkpoints.target, checkpoints.target, "MTP", 4),
    }
    given = kinds[request.param]
    return SpeculativeRank(*given), SpeculativeRank(*given, change=static)


def test_replays_are_eager_rounds_whoever_lives_and_however_wide(pair: tuple[SpeculativeRank, SpeculativeRank]):
    graphs = capture(pair[1], Emulated(), CPU)
    assert play(pair, 24, seed=1) > 60
    states = SlotStates(pair[1].caches)
    replay(pair[1], CheckedRounds(graphs, pair[1].decode.part, states))
    assert play(pair, 8, seed=2) > 10


def test_a_replay_that_differs_is_told(pair: tuple[SpeculativeRank, SpeculativeRank]):
    rank = pair[1]
    graphs = capture(rank, Emulated(), CPU)
    replay(rank, CheckedRounds(graphs, rank.decode.part, SlotStates(rank.caches)))

    right = graphs.evaluate
    graphs.evaluate = lambda shape: right(shape) + 1000 * right(shape).flip(-1)  # type: ignore[method-assign]
    with pytest.raises(Internal, match=r"a replayed round of .* differs from an eager one in its logits"):
        play((pair[0], rank), 8, seed=3)
