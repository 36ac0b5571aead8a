"""Builds one rank's part of the drafter and binds it to the target's stage."""

from pathlib import Path

import torch

from k3mesh.errors import ConfigError
from kernels.ops import Ops
from services.contracts.draft import Draft, DraftConfig, taps_in
from services.contracts.draft_sharding import DraftPart
from services.contracts.model import ModelConfig
from services.contracts.sharding import Share
from services.contracts.topology import RankPlace, Topology
from services.worker.model.batch import ExpertDispatcher, LayerCaches, TensorParallel
from services.worker.model.decoder import DecoderStage
from services.worker.speculative.context_producer import DSparkContextProducer
from services.worker.speculative.drafter import Drafter, DSparkDrafter
from services.worker.speculative.dspark import K3DSparkModel
from services.worker.speculative.nextn import NextNDrafter, NextNModel
from services.worker.speculative.weights import load_dspark, load_nextn


def build_drafter(
    folder: str | Path,
    draft: Draft,
    model: ModelConfig,
    topology: Topology,
    place: RankPlace,
    stage: DecoderStage,
    caches: LayerCaches,
    tp: TensorParallel,
    experts: ExpertDispatcher,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Drafter | None:
    """The rank's part after its target stage is loaded, None where it has none. ConfigError as load_dspark and load_nextn.

    DSpark has a part on every stage, for the context sum passes through all of them; NextN on the last alone.
    """
    last = place.stage == topology.last_stage
    if len(caches.draft) != (draft.cache_layers if last else 0):
        raise ConfigError(
            f"stage {place.stage} of {topology.stages} has {len(caches.draft)} draft cache layers; the last stage has all "
            f"{draft.cache_layers} and no other has any",
            detail="DRAFT_OWNERSHIP",
        )
    pools = [caches.draft[layer] for layer in sorted(caches.draft)]
    if isinstance(draft, DraftConfig):
        part, share = DraftPart.of(draft, topology, place), Share(place.tp, topology.tp_size)
        weights = load_dspark(Path(folder), draft, part, share, dtype, device)
        taps = taps_in(draft.taps(topology.num_layers), place.window)
        network = K3DSparkModel(draft, taps, weights, pools, tp, ops, device)
        network.configure_target(stage)
        return DSparkDrafter(network, DSparkContextProducer(network, first=place.stage == 0))
    if not last:
        return None
    weights = load_nextn(Path(folder), draft, model, topology, place, dtype, device)
    layer = NextNModel(model, weights, pools[0], tp, experts, ops)
    layer.configure_target(stage)
    return NextNDrafter(layer)
