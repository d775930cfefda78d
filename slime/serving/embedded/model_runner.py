"""The model's one forward (a packed row in, logits of chosen positions out), and the swap of its weights.

Invariant: after `replace_weights` either all weights are the new ones or, with an error, none. A weight that
aliases foreign memory is never written to. Knows nothing of requests, caches or threads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.errors import EngineError
from slime.serving.embedded.attention import PackedBatch, attending
from slime.train.experts import ExpertChoice, layers_with_experts
from slime.utils.routes import Routes, shape_of_config


class ModelRunner:
    """A transformers model whose attention is `packed_attention`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._aliased: set[int] = set()
        self._routes = shape_of_config(model.config.to_dict())
        self._routed = layers_with_experts(model.base_model.layers) if self._routes else ()

    def forward(
        self, batch: PackedBatch, ids: Sequence[int], positions: Sequence[int], keep: Sequence[int]
    ) -> Tensor:
        """Logits [len(keep), vocab] in float32 at the rows `keep` of the packed row; a tensor of its own."""
        rows = torch.tensor(keep, dtype=torch.long)
        options: dict[str, Any] = {"logits_to_keep": rows} if self._selects else {}
        with attending(batch):
            logits: Tensor = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                **options,
            ).logits[0]
        return (logits if self._selects else logits[rows]).float()

    @property
    def has_experts(self) -> bool:
        """Whether tokens have routes."""
        return bool(self._routed)

    def forward_with_routes(
        self, batch: PackedBatch, ids: Sequence[int], positions: Sequence[int], keep: Sequence[int]
    ) -> tuple[Tensor, Routes]:
        """`forward`, and the experts that each token of the row went to, [N, layers, top_k].

        Raises:
            EngineError: the routers do not choose by one topk a layer.
        """
        assert self._routes is not None
        with ExpertChoice(self._routes.experts, self._routes.top_k) as watched:
            logits = self.forward(batch, ids, positions, keep)
        if len(watched.chosen) != len(self._routed):
            raise EngineError(f"{type(self.model).__name__} does not tell its choice of experts")
        found = np.zeros((len(ids), self._routes.layers, self._routes.top_k), np.int32)
        for layer, chosen in zip(self._routed, watched.chosen, strict=True):
            found[:, layer] = chosen.numpy()
        return logits, found

    def replace_weights(self, weights: Mapping[str, Tensor], *, alias: bool) -> None:
        """Take new values for all parameters, by Hugging Face name; tied ones under any of their names.

        Args:
            alias: let parameters be the given tensors themselves where the dtype agrees; else copy.

        Raises:
            EngineError: a name is unknown or missing, or a shape differs. Nothing was changed.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        _check_names(parameters, weights)
        for name, tensor in weights.items():
            parameter = parameters[name]
            if alias and tensor.dtype == parameter.dtype:
                parameter.data = tensor.detach()
                self._aliased.add(id(parameter))
            else:
                self._copy(parameter, tensor)

    def _copy(self, parameter: Tensor, tensor: Tensor) -> None:
        if id(parameter) in self._aliased:
            parameter.data = torch.empty_like(parameter.data)
            self._aliased.discard(id(parameter))
        parameter.data.copy_(tensor)


def _check_names(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    unknown = [name for name in weights if name not in parameters]
    if unknown:
        raise EngineError(f"the model has no weight {_names(unknown)}", remedy="send Hugging Face names")
    given = {id(parameters[name]) for name in weights}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in given]
    if missing:
        raise EngineError(
            f"no new value for weight {_names(missing)}", remedy="send all weights in one update"
        )
    for name, tensor in weights.items():
        if tensor.shape != parameters[name].shape:
            raise EngineError(
                f"weight {name} has shape {list(tensor.shape)}, not {list(parameters[name].shape)}",
                remedy="send weights of the model that is served",
            )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
