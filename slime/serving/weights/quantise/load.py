"""How transformers loads a folder of quantised weights as the weights that they mean.

Invariant: the model that comes out is the one of the folder dequantised; it knows of no quantisation any
more, and what is saved of it is plain. Knows auto classes; knows no architectures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.serving.weights.quantise.folder import WeightFolder


def from_folder(kind: Any, folder: str | Path, config: Any, **options: Any) -> Any:
    """`kind.from_pretrained` of a folder, whose weights may be quantised.

    Args:
        kind: an auto class of transformers.
        config: the folder's Hugging Face config; it loses its `quantization_config`.

    Raises:
        ModelError: quantised weights that cannot be read, naming what is supported.
    """
    if getattr(config, "quantization_config", None) is None:
        return kind.from_pretrained(folder, config=config, **options)
    weights = WeightFolder(folder).lazy_weights()
    del config.quantization_config
    # Auto classes themselves take no state dict.
    model = kind._model_mapping[type(config)]
    return model.from_pretrained(None, config=config, state_dict=weights, **options)
