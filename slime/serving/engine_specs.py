"""From a topology to the list of engines: names, kinds, GPU slots, the settings that follow from the kind.

Invariant: slots are given out in the order of models and groups, without a gap and without an overlap;
placeholders take theirs and start nothing. Pure; knows neither machines nor processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime.serving.endpoint import EngineEndpoint, EngineKind, WorkerType
from slime.serving.topology import ServedModel, ServerGroup, Topology

_BY_TYPE: Mapping[WorkerType, Mapping[str, Any]] = {
    "regular": {},
    "encoder": {"encoder_only": True},
    "prefill": {"disaggregation_mode": "prefill"},
    "decode": {"disaggregation_mode": "decode"},
}
_PREFERRED: Mapping[WorkerType, Mapping[str, Any]] = {
    "regular": {},
    "encoder": {},
    "prefill": {"load_balance_method": "follow_bootstrap_room"},
    "decode": {"prefill_round_robin_balance": True, "enable_hierarchical_cache": False},
}
"""The room of a request says the rank that prefills it; keys that were sent over are not kept in a hierarchy
a second time. Newer versions of SGLang do some of it by themselves and have no such field."""
_TAKES_ENCODINGS = ("regular", "prefill")


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine to be started.

    Attributes:
        name: unique, e.g. ``default/regular-0``.
        ordinal: its place among all engines of the topology.
        num_gpus: slots that it takes: tensor times pipeline parallel size.
        first_gpu: number of its first slot.
        settings: by name of the field: what its kind is, with the group's overrides on top.
        preferred: what its kind is better with, where the installed version has the field.
    """

    name: str
    model: str
    model_path: str
    worker_type: WorkerType
    ordinal: int
    num_gpus: int
    first_gpu: int
    update_weights: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    preferred: Mapping[str, Any] = field(default_factory=dict)

    def settings_for(self, fields: Collection[str]) -> dict[str, Any]:
        """All settings for an engine that has these fields."""
        return {name: value for name, value in self.preferred.items() if name in fields} | dict(self.settings)

    def endpoint(self, url: str, kind: EngineKind) -> EngineEndpoint:
        """The engine as others see it, once it answers at `url`."""
        return EngineEndpoint(
            name=self.name,
            url=url,
            kind=kind,
            model=self.model,
            worker_type=self.worker_type,
            world_size=self.num_gpus,
            updates_weights=self.update_weights and self.worker_type != "encoder",
        )


def plan_engines(topology: Topology, *, first_gpu: int = 0) -> tuple[EngineSpec, ...]:
    """All engines of a topology, by slot.

    Args:
        first_gpu: slot where the engines begin, e.g. behind those of a trainer.
    """
    specs: list[EngineSpec] = []
    slot = first_gpu
    for model in topology.models:
        counts: Counter[str] = Counter()
        for group in model.groups:
            specs += _of_group(model, group, slot, len(specs), counts)
            slot += group.num_gpus
    return tuple(specs)


def start_waves(specs: Iterable[EngineSpec]) -> Iterator[tuple[EngineSpec, ...]]:
    """The engines by start: those of a wave together, encoders before those who ask them."""
    ordered = list(specs)
    for wants_encoder in (True, False):
        wave = tuple(spec for spec in ordered if (spec.worker_type == "encoder") is wants_encoder)
        if wave:
            yield wave


def with_encoders(spec: EngineSpec, encoders: Sequence[EngineEndpoint]) -> EngineSpec:
    """The engine as one that sends images to the encoders of its model; others are left as they are."""
    urls = [encoder.url for encoder in encoders if encoder.model == spec.model]
    if not urls or spec.worker_type not in _TAKES_ENCODINGS:
        return spec
    return replace(spec, settings={"language_only": True, "encoder_urls": urls} | dict(spec.settings))


def _of_group(
    model: ServedModel, group: ServerGroup, slot: int, ordinal: int, counts: Counter[str]
) -> list[EngineSpec]:
    specs = []
    overrides = {name: value for name, value in group.overrides.items() if name != "model_path"}
    for index in range(group.num_engines):
        kind = group.engine_type
        specs.append(
            EngineSpec(
                name=f"{model.name}/{kind}-{counts[kind]}",
                model=model.name,
                model_path=model.model_path,
                worker_type=kind,
                ordinal=ordinal + index,
                num_gpus=group.num_gpus_per_engine,
                first_gpu=slot + index * group.num_gpus_per_engine,
                update_weights=model.update_weights,
                settings=dict(_BY_TYPE[kind]) | overrides,
                preferred=_PREFERRED[kind],
            )
        )
        counts[kind] += 1
    return specs
