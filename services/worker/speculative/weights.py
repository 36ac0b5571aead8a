"""Reads what a rank holds of a drafter's checkpoint (spec speculation §2, §11)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from k3mesh.errors import ConfigError
from services.contracts.draft import Draft, DraftConfig, NextNConfig
from services.contracts.draft_sharding import EMBEDDING, DraftPart, dspark_targets
from services.contracts.model import ModelConfig
from services.contracts.sharding import ALL, PREFIX, Share, nextn_targets
from services.contracts.topology import RankPlace, Topology
from services.worker.model.loader import open_checkpoint, read_targets

DSPARK_PREFIX = "model."  # optional in a DSpark checkpoint
TARGET_EMBEDDING = f"{PREFIX}model.{EMBEDDING}"
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")  # shipped, not used
COMPARED_ROWS = 4096  # of two embeddings at once


def load_dspark(
    folder: Path, draft: DraftConfig, part: DraftPart, tp: Share, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """A rank's weights by the names of dspark_targets. ConfigError names file and tensor: DRAFT_WEIGHTS for one that is
    missing, unexpected or of another shape, DRAFT_EMBED_MISSING. Nothing is skipped silently."""
    targets = dspark_targets(draft, part, tp)
    with _as_draft_error(), open_checkpoint(folder) as checkpoint:
        prefix = DSPARK_PREFIX if any(name.startswith(DSPARK_PREFIX) for name in checkpoint.names) else ""
        found = {name.removeprefix(prefix) for name in checkpoint.names}
        if part.embedding and EMBEDDING not in found:
            raise _no_embedding(checkpoint.index, prefix + EMBEDDING)
        required, optional = _released(draft), {EMBEDDING, *(CONFIDENCE if draft.confidence_head else ())}
        for names, what in ((required - found, "is missing"), (found - required - optional, "belongs to no K3 DSpark drafter")):
            if names:
                raise ConfigError(f"{checkpoint.index}: tensor {prefix}{min(names)} {what}", detail="DRAFT_WEIGHTS")
        return read_targets(checkpoint, targets, prefix, dtype, device)


def load_nextn(
    folder: Path,
    draft: NextNConfig,
    model: ModelConfig,
    topology: Topology,
    place: RankPlace,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """A rank's weights of the NextN layer, names without `model.layers.N.`. Errors as for load_dspark."""
    name, embedding = _nextn(draft), place.stage > 0
    with _as_draft_error(), open_checkpoint(folder) as checkpoint:
        if embedding and f"{PREFIX}{name}{EMBEDDING}" not in checkpoint.names:
            raise _no_embedding(checkpoint.index, f"{PREFIX}{name}{EMBEDDING}")
        weights = read_targets(checkpoint, nextn_targets(model, topology, place, embedding), PREFIX, dtype, device)
    return {target.removeprefix(name): tensor for target, tensor in weights.items()}


def check_embedding(target: Path, drafter: Path, draft: Draft, topology: Topology, place: RankPlace) -> None:
    """Whether a rank's own copy of the embedding has the values of the target's, which every other rank that drafts borrows.
    ConfigError names file and tensor if not: tokens would stay right, and proposals hardly ever be."""
    if place.stage == 0 or place.stage < topology.last_stage:
        return
    with open_checkpoint(drafter) as ours, open_checkpoint(target) as theirs:
        prefixes = ("", DSPARK_PREFIX) if isinstance(draft, DraftConfig) else (PREFIX + _nextn(draft),)
        name = next(name for prefix in prefixes if (name := prefix + EMBEDDING) in ours.names)
        own, file = ours.slice_of(name)
        reference, reference_file = theirs.slice_of(TARGET_EMBEDDING)
        start, stop = Share(place.tp, topology.tp_size).range_of(own.get_shape()[0])
        for first in range(start, stop, COMPARED_ROWS):
            rows = slice(first, min(first + COMPARED_ROWS, stop))
            different = (own[rows].float() != reference[rows].float()).any(1)
            if bool(different.any()):
                token = first + int(different.int().argmax())
                raise ConfigError(
                    f"{file}: tensor {name} is another embedding than {TARGET_EMBEDDING} of {reference_file}, "
                    f"the first time in row {token}; give the drafter that was trained for this target",
                    detail="DRAFT_TARGET_MISMATCH",
                )


def _nextn(draft: NextNConfig) -> str:
    return f"model.layers.{draft.layer}."


def _released(draft: DraftConfig) -> set[str]:
    """Every tensor that a complete checkpoint has, the embedding and the confidence head aside."""
    whole = DraftPart(tuple(range(len(draft.target_layer_ids))), network=True, embedding=False)
    return {part.tensor for target in dspark_targets(draft, whole, ALL) for part in target.sources}


def _no_embedding(file: Path, tensor: str) -> ConfigError:
    return ConfigError(
        f"{file}: tensor {tensor} is missing; the last pipeline stage needs the drafter's own copy of the target's embedding",
        detail="DRAFT_EMBED_MISSING",
    )


@contextmanager
def _as_draft_error() -> Iterator[None]:
    """The loader's refusals get the drafter's code."""
    try:
        yield
    except ConfigError as error:
        if error.detail:
            raise
        raise ConfigError(error.message, detail="DRAFT_WEIGHTS") from error
