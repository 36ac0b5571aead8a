"""The cost model's figures: a JSON file in which each has its unit and its source, so that measurements can replace it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from k3mesh.errors import ConfigError

FOLDER = Path(__file__).with_name("constants")
Points = tuple[tuple[float, float], ...]  # (x, y), x ascending


@dataclass(frozen=True)
class Constants:
    """Named figures. `model`: which cost model they are for."""

    path: str
    name: str
    model: str  # "kernels" | "measured"
    values: Mapping[str, Any]

    def number(self, name: str) -> float:
        value = self._value(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            raise self._error(name, value, "must be a number of at least 0")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._value(name)
        if not isinstance(value, list) or not all(isinstance(it, int | float) for it in cast(list[Any], value)):
            raise self._error(name, value, "must be a list of numbers")
        return tuple(float(it) for it in cast(list[float], value))

    def points(self, name: str) -> Points:
        """A curve; its x ascend."""
        value = self._value(name)
        try:
            points = tuple((float(x), float(y)) for x, y in value)
        except (TypeError, ValueError):
            raise self._error(name, value, "must be a list of [x, y]") from None
        if not points or [x for x, _ in points] != sorted({x for x, _ in points}):
            raise self._error(name, value, "must have at least one point, and its x must ascend")
        return points

    def _value(self, name: str) -> Any:
        entry = self.values.get(name)
        if not isinstance(entry, Mapping) or "value" not in entry:
            raise self._error(name, entry, 'is missing; each constant is {"value": …, "unit": "…", "source": "…"}')
        return cast(Mapping[str, Any], entry)["value"]

    def _error(self, name: str, value: object, rule: str) -> ConfigError:
        return ConfigError(
            f"--constants {self.path}: {name} = {value!r} {rule}; `services/simulate/constants` has complete files",
            param="constants",
        )


def load(path: Path) -> Constants:
    """ConfigError if the file is not readable or names no cost model."""
    try:
        content = json.loads(path.read_text())
        model, values = content["model"], content["constants"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--constants {path}: cannot be read ({error!r}); give a JSON object with name, model and constants",
            param="constants",
        ) from None
    if model not in ("kernels", "measured"):
        raise ConfigError(f"--constants {path}: model = {model!r}: must be kernels or measured", param="constants")
    return Constants(str(path), str(content.get("name", path.stem)), model, values)


def interpolate(points: Points, x: float) -> float:
    """Linear between points, proportional to x beyond the last, constant before the first."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    last_x, last_y = points[-1]
    return last_y * x / last_x
