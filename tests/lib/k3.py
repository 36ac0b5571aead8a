"""The full K3 shape, as a configuration without a checkpoint."""

import json
from pathlib import Path

from services.contracts.model import ModelConfig, parse_model_config

K3_FOLDER = Path(__file__).parents[2] / "models" / "k3"
K3_DSPARK = K3_FOLDER / "dspark" / "config.json"
MLA_LAYERS = (*range(3, 92, 4), 92)  # 0-based
CONFIG = json.loads((K3_FOLDER / "config.json").read_text())["text_config"]


def k3_model() -> ModelConfig:
    return parse_model_config(json.loads((K3_FOLDER / "config.json").read_text()), "K3")
