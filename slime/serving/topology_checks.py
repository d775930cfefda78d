"""What cannot be run about a topology that reads well: names, counts, kinds that need each other.

Invariant: pure functions from a topology to problems, each with its place. Knows nothing of YAML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from slime.config.problem import Problem
from slime.serving.topology import ServedModel, Topology

_NEEDS = {
    "prefill": (("decode",), "somebody who decodes what it prefilled"),
    "decode": (("prefill",), "somebody who prefills for it"),
    "encoder": (("regular", "prefill"), "somebody who asks it"),
}


def check_topology(topology: Topology, *, trains: bool, counted: tuple[int | None, str]) -> list[Problem]:
    """All problems and warnings.

    Args:
        trains: whether a trainer sends weights.
        counted: the number of GPUs that the groups must add up to, if any, and the place of the sum.
    """
    problems = [*_names(topology)]
    for model in topology.models:
        problems += _kinds(model)
    wanted, place = counted
    if wanted is not None and wanted != topology.num_gpus:
        problems.append(
            Problem(
                place,
                f"the groups take {topology.num_gpus} GPUs, and --rollout-num-gpus is {wanted}",
                "make them equal (a placeholder takes GPUs and starts nothing), or leave the flag out",
            )
        )
    return problems + (list(_updates(topology, place)) if trains else [])


def _names(topology: Topology) -> Iterator[Problem]:
    counts = Counter(model.name for model in topology.models)
    for model in topology.models[1:]:
        if counts[model.name] > 1:
            yield Problem(model.place, f"the name {model.name!r} is taken", "each model has its own")
            counts[model.name] -= 1


def _kinds(model: ServedModel) -> Iterator[Problem]:
    kinds = {group.worker_type for group in model.groups}
    for group in model.groups:
        partners, whom = _NEEDS.get(group.worker_type, ((), ""))
        if partners and not kinds.intersection(partners):
            yield Problem(group.place, f"{group.worker_type} needs {whom}", f"add {' or '.join(partners)}")
        if group.worker_type == "regular" and model.is_disaggregated:
            yield Problem(
                group.place,
                "a router before prefill and decode servers takes no regular ones",
                "give them a model of their own",
            )


def _updates(topology: Topology, place: str) -> Iterator[Problem]:
    updated = [model.name for model in topology.models if model.update_weights]
    if not updated:
        yield Problem(
            place,
            "no model takes the trainer's weights, so what samples would never change",
            "update_weights: true for the model that is trained, or leave its model_path out",
        )
    elif not topology.default.update_weights:
        yield Problem(
            topology.default.place,
            f"rollouts ask {topology.default.name} by default, which does not take the trainer's weights",
            f"put {updated[0]} first, or ask it by name (get_model_url)",
            warning=True,
        )
