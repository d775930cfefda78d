"""Weights in low precision: FP8 and INT4 as checkpoints hold them, out to engines and back from folders."""

from __future__ import annotations

from slime.serving.weights.quantise.folder import WeightFolder, read_config
from slime.serving.weights.quantise.quantiser import Quantiser, quantiser_of

__all__ = ["Quantiser", "WeightFolder", "quantiser_of", "read_config"]
