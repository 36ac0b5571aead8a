"""Ranks of random tiny checkpoints, without a drafter and with each kind. A module may have others by the same names."""

import pytest

from tests.lib.drafted import Checkpoints, SpeculativeRank


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> SpeculativeRank:
    return SpeculativeRank(checkpoints.target, None)


@pytest.fixture(scope="module")
def dspark(checkpoints: Checkpoints) -> SpeculativeRank:
    return SpeculativeRank(checkpoints.target, checkpoints.dspark("1,3,5", "attn_res", True))


@pytest.fixture(scope="module")
def nextn(checkpoints: Checkpoints) -> SpeculativeRank:
    return SpeculativeRank(checkpoints.target, checkpoints.target, "MTP", width=4)
