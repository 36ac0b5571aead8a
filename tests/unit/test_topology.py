"""Ranks, groups and leaders of an engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3mesh.errors import ConfigError
from services.contracts.topology import Topology, even_partition

P = Topology("prefill", 4, 1, 8, 8, 93, (24, 23, 23, 23))
D = Topology("decode", 1, 4, 8, 32, 93, (93,))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    stages, dp, tp = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 8]))
    layers = draw(st.integers(stages, 93))
    return Topology("prefill", stages, dp, tp, dp * tp, layers, even_partition(layers, stages))


def test_the_automatic_partition_of_k3_is_the_deployment_guides():
    assert even_partition(93, 4) == (24, 23, 23, 23)
    assert [(w.start, w.stop) for w in P.windows] == [(0, 24), (24, 47), (47, 70), (70, 93)]


@pytest.mark.parametrize("stages", [0, 14])
def test_a_stage_without_a_layer_is_refused_by_flag_and_rule(stages: int):
    with pytest.raises(ConfigError, match=rf"--pipeline-parallel-size {stages}: needs between 1 and 13 stages"):
        even_partition(13, stages)


def test_groups_and_leaders_of_the_two_engines_of_64_gpus():
    assert (P.world_size, P.leaders, P.ep_group(13), P.tp_group(13)) == (32, [0, 8, 16, 24], [*range(8, 16)], [*range(8, 16)])
    assert (D.world_size, D.leaders, D.ep_group(13), D.tp_group(13)) == (32, [0, 8, 16, 24], [*range(32)], [*range(8, 16)])
    assert (P.place_of(13).stage, P.place_of(13).tp) == (1, 5) and (D.place_of(13).dp, D.place_of(13).tp) == (1, 5)


@given(topologies())
def test_every_rank_has_one_place_and_one_group_of_each_kind(topology: Topology):
    ranks = range(topology.world_size)
    for rank in ranks:
        place = topology.place_of(rank)
        assert topology.rank_of(place.stage, place.dp, place.tp) == rank
        assert place.window == topology.windows[place.stage]
        assert rank in topology.tp_group(rank) and set(topology.tp_group(rank)) <= set(topology.ep_group(rank))
        assert {topology.place_of(peer).stage for peer in topology.ep_group(rank)} == {place.stage}
    assert sorted({min(topology.tp_group(rank)) for rank in ranks}) == topology.leaders
    assert [layer for window in topology.windows for layer in window] == list(range(topology.num_layers))
