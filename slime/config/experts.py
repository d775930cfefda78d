"""Checks of what only a mixture of experts can do.

Knows the model folder by its config.json; knows nothing of torch or engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime.config.problem import Problem

if TYPE_CHECKING:
    from slime.config import Config


def experts(config: Config, given: frozenset[str]) -> Iterator[Problem]:
    """Routes can be replayed where there are any."""
    folder = config.model.hf_checkpoint
    if not config.algorithm.use_rollout_routing_replay or not (Path(folder or "") / "config.json").is_file():
        return
    from slime.utils.routes import shape_of_folder

    if shape_of_folder(folder) is None:
        yield Problem(
            "--use-rollout-routing-replay", "needs a mixture of experts; this model has none", "leave it out"
        )
