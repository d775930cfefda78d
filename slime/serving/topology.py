"""Which models are served, by which groups of servers, on how many GPUs: the values of a topology.

Invariant: a `Topology` that exists can be laid out; what is wrong with a file is told where it is read
(topology_yaml.py). Pure: knows no processes, no addresses and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, TypeAlias, get_args

from slime.serving.endpoint import WorkerType

GroupType: TypeAlias = Literal["regular", "prefill", "decode", "encoder", "placeholder"]
GROUP_TYPES: tuple[GroupType, ...] = get_args(GroupType)
DEFAULT_MODEL = "default"


@dataclass(frozen=True, kw_only=True)
class ServerGroup:
    """Servers of one kind; a placeholder is none, and only keeps GPUs free.

    Attributes:
        num_gpus: of the whole group; a multiple of `num_gpus_per_engine`.
        overrides: settings of its servers by name of the field, above all flags.
        place: where it was said, for errors.
    """

    worker_type: GroupType
    num_gpus: int
    num_gpus_per_engine: int = 1
    overrides: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def num_engines(self) -> int:
        """Servers of the group."""
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine

    @property
    def engine_type(self) -> WorkerType:
        """What each of its servers is; no placeholder has one."""
        assert self.worker_type != "placeholder"
        return self.worker_type


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model with a router of its own.

    Attributes:
        update_weights: whether the trainer's weights go to its servers.
        groups: may be empty: then there is a router, and others register servers at it.
    """

    name: str
    model_path: str
    update_weights: bool = True
    groups: tuple[ServerGroup, ...] = ()
    place: str = ""

    @property
    def is_disaggregated(self) -> bool:
        """Whether prompts are computed by other servers than answers."""
        return any(group.worker_type in ("prefill", "decode") for group in self.groups)

    @property
    def num_engines(self) -> int:
        """Its servers."""
        return sum(group.num_engines for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All models, in the order in which they take GPUs. The first is what rollouts ask by default."""

    models: tuple[ServedModel, ...]

    @property
    def num_gpus(self) -> int:
        """GPU slots, placeholders among them."""
        return sum(group.num_gpus for model in self.models for group in model.groups)

    @property
    def num_engines(self) -> int:
        """Servers of all models."""
        return sum(model.num_engines for model in self.models)

    @property
    def default(self) -> ServedModel:
        """The model that rollouts ask unless they name another."""
        return self.models[0]

    def line(self) -> str:
        """The topology as a person reads it."""
        return "; ".join(f"{model.name}: {_groups_line(model)}" for model in self.models)


def single_model(
    model_path: str, *, num_gpus: int, num_gpus_per_engine: int = 1, prefill_engines: int = 0
) -> Topology:
    """The topology without a file: one model, and regular servers or `prefill_engines` before decoding ones.

    The counts must fit: see `topology_problems.count_problems`.
    """
    prefill = prefill_engines * num_gpus_per_engine
    shares: list[tuple[GroupType, int]] = [("prefill", prefill), ("decode", num_gpus - prefill)]
    if not prefill_engines:
        shares = [("regular", num_gpus)]
    groups = tuple(
        ServerGroup(worker_type=kind, num_gpus=count, num_gpus_per_engine=num_gpus_per_engine)
        for kind, count in shares
        if count
    )
    return Topology(models=(ServedModel(name=DEFAULT_MODEL, model_path=model_path, groups=groups),))


def _groups_line(model: ServedModel) -> str:
    groups = [
        f"{group.num_engines} {group.worker_type} of {_gpus(group.num_gpus_per_engine)}"
        for group in model.groups
        if group.worker_type != "placeholder"
    ]
    return (", ".join(groups) or "no engine") + (", updated" if model.update_weights else ", frozen")


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def same_folder(first: str | None, second: str | None) -> bool:
    """Whether two model paths are written for the same folder."""
    return first is not None and second is not None and PurePath(first) == PurePath(second)
