"""Reads one rank's weights from a released checkpoint: its own ranges only, straight into their place."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from k3mesh.errors import ConfigError
from services.contracts.model import ModelConfig
from services.contracts.sharding import FLOAT32, MODEL, PACKED, PREFIX, Source, Target, stage_targets
from services.contracts.topology import RankPlace, Topology

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")  # what a tensor that is not packed may be stored in


def load_stage_weights(
    path: str | Path,
    model: ModelConfig,
    topology: Topology,
    place: RankPlace,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Weights of the rank at `place`, by the names of `sharding.stage_targets`.

    `path` is a folder with model.safetensors, or with shards and model.safetensors.index.json. ConfigError names the file
    and the tensor that is missing, or has another shape or dtype than the configuration says.
    """
    with open_checkpoint(Path(path)) as checkpoint:
        return read_targets(checkpoint, stage_targets(model, topology, place), PREFIX, dtype, device)


def read_targets(
    checkpoint: "Checkpoint", targets: Iterable[Target], prefix: str, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """The targets by their names; released names are those of the sources after `prefix`. ConfigError as above."""
    dtypes = {MODEL: dtype, FLOAT32: torch.float32, PACKED: torch.uint8}
    weights: dict[str, Tensor] = {}
    for target in targets:
        weights[target.name] = tensor = torch.empty(target.shape, dtype=dtypes[target.dtype], device=device)
        _fill(tensor, target, checkpoint, prefix)
    return weights


class Checkpoint:
    """Where each tensor is. A file is opened when its first tensor is read."""

    def __init__(self, index: Path, files: dict[str, Path], stack: ExitStack):
        self.index = index  # what to name when a tensor is nowhere
        self._files = files
        self._stack = stack
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """All released tensors."""
        return frozenset(self._files)

    def slice_of(self, tensor: str) -> tuple[Any, Path]:
        """The safetensors slice of a released tensor and the file that holds it."""
        file = self._files.get(tensor)
        if file is None:
            raise ConfigError(f"{self.index}: tensor {tensor} is missing; this is not a complete Kimi K3 checkpoint")
        if file not in self._open:
            self._open[file] = self._stack.enter_context(open_safetensors(file))
        try:
            return self._open[file].get_slice(tensor), file
        except SafetensorError as error:
            raise ConfigError(f"{file}: tensor {tensor} is missing, although {self.index.name} names it there") from error


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Its files stay open within the context. ConfigError if it is not readable."""
    with ExitStack() as stack:
        index = folder / INDEX
        if index.is_file():
            yield Checkpoint(index, _read_index(index), stack)
            return
        single = folder / SINGLE
        handle = stack.enter_context(open_safetensors(single))
        yield Checkpoint(single, dict.fromkeys(handle.keys(), single), stack)


def open_safetensors(file: Path) -> Any:
    """An open safetensors file; ConfigError if it is absent or is none."""
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such file; --model must name a folder with {SINGLE} or {INDEX}") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: not a readable safetensors file ({error})") from error


def _read_index(index: Path) -> dict[str, Path]:
    try:
        entries = json.loads(index.read_text())["weight_map"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index}: not a safetensors index: it needs an object weight_map of tensor to file") from error
    return {tensor: index.parent / file for tensor, file in entries}


def _fill(tensor: Tensor, target: Target, checkpoint: Checkpoint, prefix: str) -> None:
    """Copies the sources one below the other; an expert's sources go to its place in the stack."""
    row, expert = 0, None
    for source in target.sources:
        part = _read(source, target.dtype, checkpoint, prefix)
        if source.expert != expert:
            row, expert = 0, source.expert
        place = tensor if expert is None else tensor[expert]
        if len(target.sources) == 1:
            place.copy_(part.reshape(place.shape))
            return
        rows = part.shape[0]
        place[row : row + rows].copy_(part.reshape(rows, *place.shape[1:]))
        row += rows


def _read(source: Source, dtype: str, checkpoint: Checkpoint, prefix: str) -> Tensor:
    tensor = prefix + source.tensor
    stored, file = checkpoint.slice_of(tensor)
    shape, stored_dtype = tuple(stored.get_shape()), stored.get_dtype()
    allowed = ("U8",) if dtype == PACKED else PLAIN_DTYPES
    if stored_dtype not in allowed:
        raise ConfigError(f"{file}: tensor {tensor} has dtype {stored_dtype}, expected {' or '.join(allowed)}")
    if source.padded:
        flat = stored[:].flatten()
        if flat.numel() < source.shape[0]:
            raise ConfigError(f"{file}: tensor {tensor} has shape {list(shape)}, expected at least {source.shape[0]} elements")
        return flat[source.start : source.stop]
    if shape != source.shape:
        raise ConfigError(f"{file}: tensor {tensor} has shape {list(shape)}, expected {list(source.shape)}")
    window = slice(source.start, source.stop)
    return stored[window] if source.dim == 0 else stored[:, window]
