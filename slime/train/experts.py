"""The choice of experts in a forward pass: watched, or taken from routes.

Invariant: a router that is given its own choice computes what it would have computed, to the bit; given
another, its weights are those of its own scores for the chosen experts, and their gradients flow to it.
(Rollout routing replay, arXiv:2510.11370.) Knows the call by which routers choose; knows no models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, torch.Tensor.topk)


def layers_with_experts(layers: Iterable[torch.nn.Module]) -> tuple[int, ...]:
    """Which of the decoder layers of a Hugging Face model route their tokens."""
    return tuple(
        index
        for index, layer in enumerate(layers)
        if any(name.rpartition(".")[2] == "experts" for name, _ in layer.named_modules())
    )


class ExpertChoice(TorchFunctionMode):
    """Sees every ``topk`` by which a router of `experts` chooses `top_k` of them for a token.

    Attributes:
        chosen: [N, top_k] of each router, in their order.
    """

    def __init__(self, experts: int, top_k: int, routes: Tensor | None = None) -> None:
        """`routes` [N, top_k], int64, are chosen instead; where they are negative, the router's own."""
        super().__init__()
        self.chosen: list[Tensor] = []
        self._experts = experts
        self._top_k = top_k
        self._routes = routes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK or result.indices.ndim != 2:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[1] != self._experts or result.indices.shape[1] != self._top_k:
            return result
        chosen, routes = result.indices, self._routes
        if routes is not None:
            chosen = torch.where(routes < 0, chosen, routes)
            result = torch.return_types.topk((scores.gather(1, chosen), chosen))
        self.chosen.append(chosen)
        return result
