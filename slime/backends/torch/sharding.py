"""A model's parameters spread over ranks: FSDP2, each parameter cut along its first dimension.

Invariant: the gradient of a parameter is the sum over the ranks of what each computed; weights of rows are of
the whole step, so nothing is divided by the number of ranks. Outside of a call of the model, parameters are
their own shards. Knows modules and parameters; knows no loss and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slime.backends.torch.ranks import Ranks

P = ParamSpec("P")
R = TypeVar("R")


def sharded(module: Any, function: Callable[P, R], ranks: Ranks, device: torch.device) -> Callable[P, R]:
    """`function`, which runs the model, on parameters that from now on are spread over the ranks.

    All ranks call it equally often, each on rows of its own; so does the backward pass. Weights are gathered
    block by block and dropped behind it. One rank gets `function` back, and nothing is changed.

    Args:
        module: holds every parameter that `function` reads; equal on all ranks.
    """
    if ranks.size == 1:
        return function
    mesh = init_device_mesh(device.type, (ranks.size,))
    blocks = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    for block in list(module.modules()):
        if type(block).__name__ in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
    root: Any = _Root(module, function)
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    return cast(Callable[P, R], root)


class _Root(torch.nn.Module):
    """What is called in place of the model, so that the weights of its ends are gathered too."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the rows of all ranks; a call of all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(tensor: torch.Tensor) -> torch.Tensor:
    """The rows that this rank holds, in the storage that they have."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of it only."""
    return isinstance(tensor, DTensor)


def own_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """First row that this rank holds, and the one behind its last; (0, rows) where it holds all."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0], offset[0] + shape[0]


def spread_like(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A tensor spread like `parameter`, of which this rank holds `rows`."""
    if not isinstance(parameter, DTensor):
        return rows
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
