"""Rollout routing replay: decoder layers take the experts that the engine took, where the batch tells them.

Invariant: a batch without routes, or with the model's own, computes what it would compute anyway, to the
bit: that is checked when it is installed. (arXiv:2510.11370.) Knows layers and plans; knows no samples'
rewards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.backends.torch.forest import PackedBatch, Request, pack_requests
from slime.backends.torch.model import CausalModel, predicting_states, probe_rows
from slime.errors import DataError, ModelError
from slime.train.batch import TrainSample
from slime.train.experts import ExpertChoice, layers_with_experts
from slime.utils.routes import Routes, RouteShape, shape_of_config


@dataclass(frozen=True, slots=True)
class RouteReplay:
    """What can be replayed on a model.

    Attributes:
        layers: indices of the decoder layers that have experts.
    """

    shape: RouteShape
    layers: tuple[int, ...]

    def check(self, samples: Sequence[TrainSample]) -> None:
        """Refuse routes that no router can have chosen.

        Raises:
            DataError: an expert that is not there, or the same one twice for a token (as where an engine
            records
                nothing); names sample and layer.
        """
        for sample in samples:
            routes = sample.routed_experts
            for layer in self.layers if routes is not None and routes.size else ():
                assert routes is not None
                self._check(routes[:, layer], f"sample {sample.index}, layer {layer}")

    def _check(self, routes: Routes, place: str) -> None:
        if routes.max() >= self.shape.experts:
            raise DataError(
                f"routed_experts names expert {routes.max()}, the model has {self.shape.experts}", place=place
            )
        twice = self.shape.top_k > 1 and (routes[:, 0] == routes[:, 1]) & (routes[:, 0] >= 0)
        if np.any(twice):
            raise DataError(
                f"routed_experts names expert {routes[twice][0, 0]} twice for a token",
                place=place,
                remedy="the engine's routes are not those of this model's layers; see "
                "--use-rollout-routing-replay",
            )


def replay_routes(model: CausalModel, folder: str) -> RouteReplay:
    """Let the model's layers take the experts of `AttentionPlan.routes`; nothing else has wrapped them yet.

    Raises:
        ModelError: a model without experts, or whose routers do not choose them in a way that can be
        replayed.
    """
    shape = shape_of_config(model.module.config.to_dict())
    layers = getattr(model.module.base_model, "layers", None)
    if shape is None or layers is None or len(layers) != shape.layers:
        raise _refused(model, "has no layers of experts", folder)
    with_experts = layers_with_experts(layers)
    for index in with_experts:
        layers[index].forward = functools.partial(_forward, layers[index].forward, index, shape)
    replay = RouteReplay(shape, with_experts)
    _check_replay(model, replay, folder)
    return replay


def _forward(forward: Callable[..., Any], index: int, shape: RouteShape, *args: Any, **kwargs: Any) -> Any:
    forest = kwargs.get("forest")
    if forest is None or forest.routes is None:
        return forward(*args, **kwargs)
    with ExpertChoice(shape.experts, shape.top_k, forest.routes[:, index]):
        return forward(*args, **kwargs)


def _check_replay(model: CausalModel, replay: RouteReplay, folder: str) -> None:
    """Watch the routers choose on a few rows, and replay that."""
    shape, rows = replay.shape, probe_rows(model.module.config.vocab_size)
    requests = [Request(row, tuple(range(1, len(row)))) for row in rows]
    batch = pack_requests(requests, share_prefixes=False, device=model.device)
    with torch.no_grad():
        with ExpertChoice(shape.experts, shape.top_k) as watched:
            free = _states(model, batch)
        if len(watched.chosen) != len(replay.layers):
            raise _refused(model, "has routers that do not choose experts by one topk a layer", folder)
        found = np.zeros((batch.input_ids.numel(), shape.layers, shape.top_k), np.int32)
        for layer, chosen in zip(replay.layers, watched.chosen, strict=True):
            found[:, layer] = chosen.cpu().numpy()
        parts = np.split(found, np.cumsum([len(row) - 1 for row in rows])[:-1])
        again = [Request(r.tokens, r.targets, part) for r, part in zip(requests, parts, strict=True)]
        replayed = _states(model, pack_requests(again, share_prefixes=False, device=model.device))
    if not torch.equal(free, replayed):
        raise _refused(model, "computes something else when its own choice of experts is replayed", folder)


def _states(model: CausalModel, batch: PackedBatch) -> torch.Tensor:
    return predicting_states(model.module.base_model, batch, torch.float32)


def _refused(model: CausalModel, reason: str, folder: str) -> ModelError:
    return ModelError(
        f"{type(model.module).__name__} {reason}",
        place=str(Path(folder)),
        remedy="leave --use-rollout-routing-replay out",
    )
