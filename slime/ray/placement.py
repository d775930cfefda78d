"""The GPUs of a run in a Ray cluster: one placement group, waited for by name, and who sits on which of it.

Invariant: a run is placed as a whole or not at all; a run without GPUs has no placement group, and its actors
run on the driver's machine. Knows nothing of engines and trainers but how many GPUs they take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from slime.config import Config
from slime.config.device_sharing import DeviceSharing
from slime.errors import ConfigError, DeadlineError, EngineError
from slime.ray.layout import (
    ENGINE_SHARE,
    TRAIN_SHARE,
    Bundle,
    EngineSeat,
    EngineSlots,
    Layout,
    Mode,
    Seating,
    layout_of,
    moved,
    seat,
)
from slime.ray.supervision import Supervisor

REPORT_SECONDS = 30.0
"""Between two reports of what is missing."""
VISIBLE = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "NCCL_CUMEM_ENABLE": "0"}
"""Ray shows each actor its own GPU alone; engines and ranks need those of their group."""


def layout_of_run(config: Config, sharing: DeviceSharing) -> Layout:
    """The layout that the flags ask for."""
    if config.train_only:
        mode = Mode.TRAIN_ONLY
    elif config.run.debug_rollout_only:
        mode = Mode.ROLLOUT_ONLY
    elif config.serving.rollout_external_engine_addrs is not None:
        mode = Mode.EXTERNAL
    else:
        mode = Mode.COLOCATE if sharing.colocate else Mode.SEPARATE
    return layout_of(mode, train_gpus=sharing.train_gpus, rollout_gpus=sharing.rollout_gpus)


def is_placed(layout: Layout, asked: bool | None) -> bool:
    """Whether a run takes GPUs of the cluster that it is connected to.

    Args:
        asked: ``--place-on-gpus``; by default it does where the cluster has any.

    Raises:
        ConfigError: the cluster has some, and fewer than the run takes; one that may still grow is waited for
            if the user asks.
    """
    if asked is not None:
        return asked and layout.bundles > 0
    nodes = _gpus_by_node()
    total = sum(nodes.values())
    if not total or not layout.bundles:
        return False
    if total < layout.bundles:
        raise ConfigError(
            f"the run takes {layout.line()}, and the cluster has {total}: {_listed(nodes)}",
            place="--actor-num-gpus-per-node, --rollout-num-gpus",
            remedy="lower them or --colocate; --place-on-gpus waits for nodes that are still to come, "
            "--no-place-on-gpus runs on CPUs",
        )
    return True


class Placement:
    """A placement group, and the options of the actors on it."""

    def __init__(
        self, group: Any, layout: Layout, seating: Seating, waiting: _Waiting, gpus_per_node: int
    ) -> None:
        self.layout = layout
        self.train = seating.train
        self.engines = list(seating.engines)
        self._group, self._waiting, self._gpus_per_node = group, waiting, gpus_per_node

    def train_options(self, rank: int, ranks_per_node: int) -> dict[str, Any]:
        """Options of a train actor, for `merged` into its others; it sees the GPUs of its node's ranks."""
        first = rank - rank % ranks_per_node
        return self._options(self.train[rank], TRAIN_SHARE, self.train[first : first + ranks_per_node])

    def engine_options(self, one: EngineSeat, part: int = 0) -> dict[str, Any]:
        """Options of the actor of an engine, or of its part on another node."""
        bundles = one.parts[part]
        return self._options(bundles[0], ENGINE_SHARE, bundles)

    def seat_of(self, name: str) -> EngineSeat:
        """The seat of an engine by its name.

        Raises:
            EngineError: there is none.
        """
        for one in self.engines:
            if one.name == name:
                return one
        raise EngineError(f"has no seat; there are {', '.join(one.name for one in self.engines)}", place=name)

    def relocate(self, name: str) -> EngineSeat:
        """The seat of an engine that has ended, where its bundles are now: Ray gives those of a lost node to
        another one as soon as it has room.

        Raises:
            ConfigError: the engine would be split badly there.
            DeadlineError, StopRequested: see `place`.
        """
        old = self.seat_of(name)
        bundles = _located(self._group, [bundle.index for bundle in old.bundles], self._waiting)
        new = moved(old, bundles, self.layout, self._gpus_per_node)
        self.engines[self.engines.index(old)] = new
        return new

    def lines(self) -> list[str]:
        """Who sits where, as a person reads it."""
        lines = [f"placement               {self.layout.line()}"]
        lines += [f"  train rank {rank}: {_place([bundle])}" for rank, bundle in enumerate(self.train)]
        return lines + [f"  engine {one.name}: {_place(one.bundles)}" for one in self.engines]

    def remove(self) -> None:
        """Give the GPUs back; actors on them end."""
        import ray

        ray.util.remove_placement_group(self._group)

    def _options(self, bundle: Bundle, share: float, visible: Sequence[Bundle]) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ids = ",".join(one.gpu for one in visible)
        return {
            "num_cpus": share,
            "num_gpus": share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle.index
            ),
            "runtime_env": {"env_vars": VISIBLE | {"CUDA_VISIBLE_DEVICES": ids}},
        }


def here() -> dict[str, Any]:
    """Options of an actor without a GPU: it runs on the driver's machine, where its files and hooks are."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}


def merged(options: Mapping[str, Any], placed: Mapping[str, Any]) -> dict[str, Any]:
    """An actor's own options with those of its place; environment variables of both."""
    variables = options.get("runtime_env", {}).get("env_vars", {})
    environment = {"env_vars": variables | placed.get("runtime_env", {}).get("env_vars", {})}
    return {**options, **placed, "runtime_env": {**options.get("runtime_env", {}), **environment}}


def place(
    layout: Layout,
    engines: Sequence[EngineSlots],
    *,
    name: str,
    ranks_per_node: int,
    gpus_per_node: int,
    supervisor: Supervisor,
    deadline: float,
    note: Callable[[str], None],
) -> Placement:
    """Take the GPUs of a run, and seat its ranks and engines.

    Args:
        name: of the placement group, by which others see who holds the GPUs.
        note: told every 30 s what is missing.

    Raises:
        ConfigError: an engine or the ranks of a node would be split badly; see `seat`.
        DeadlineError: the cluster did not have them in time; says what it has, and who holds it.
        StopRequested: the run is to stop.
    """
    import ray

    shape = [{"GPU": 1, "CPU": 1}] * layout.bundles
    waiting = _Waiting(layout, name, supervisor, deadline, note)
    group = ray.util.placement_group(shape, strategy="PACK", name=name)
    with ExitStack() as on_failure:
        on_failure.callback(ray.util.remove_placement_group, group)
        waiting.wait("a placement group", {"": group.ready()})
        bundles = _located(group, range(layout.bundles), waiting)
        seating = seat(layout, engines, bundles, ranks_per_node=ranks_per_node, gpus_per_node=gpus_per_node)
        on_failure.pop_all()
    return Placement(group, layout, seating, waiting, gpus_per_node)


class _Waiting:
    """Waits of a placement group, which tell every 30 s what is missing, and at their deadline."""

    def __init__(
        self,
        layout: Layout,
        name: str,
        supervisor: Supervisor,
        deadline: float,
        note: Callable[[str], None],
    ) -> None:
        self._layout, self._name = layout, name
        self._supervisor, self._deadline, self._note = supervisor, deadline, note
        self._told = time.monotonic()

    def wait(self, what: str, calls: Mapping[str, Any]) -> list[Any]:
        """The results of calls that wait for GPUs.

        Raises:
            DeadlineError, StopRequested: see `place`.
        """
        try:
            return self._supervisor.wait_all(
                what, calls, self._deadline, can_give_up=True, on_tick=lambda: self._tick(what)
            )
        except DeadlineError as error:
            raise DeadlineError(
                f"{error.message}: {missing(self._layout, self._name)}",
                remedy="end what holds them, add nodes, or ask for fewer; --phase-timeout is the deadline",
            ) from None

    def _tick(self, what: str) -> None:
        if time.monotonic() - self._told >= REPORT_SECONDS:
            self._told = time.monotonic()
            self._note(f"waiting for {what}: {missing(self._layout, self._name)}")


def missing(layout: Layout, name: str) -> str:
    """What the run asks, what the cluster has, and who holds it.

    Args:
        name: of the placement group that asks.
    """
    import ray

    nodes = _gpus_by_node()
    free = ray.available_resources().get("GPU", 0.0)
    held = {group: count for group, count in _held_by_groups().items() if group != name}
    others = sum(nodes.values()) - free - sum(held.values())
    if others > 0:
        held["actors and tasks without a placement group"] = others
    holders = ", ".join(f"{count:g} by {who}" for who, count in held.items()) or "none"
    return (
        f"asked are {layout.line()}, with one CPU each; the cluster has {sum(nodes.values()):g}: "
        f"{_listed(nodes)}; {free:g} are free; held are {holders}"
    )


def _located(group: Any, indices: Sequence[int], waiting: _Waiting) -> list[Bundle]:
    """Asks bundles for their node and their GPU, by a task in each; one that lost its node answers from the
    node that it gets next."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    task = ray.remote(num_cpus=0, num_gpus=ENGINE_SHARE)(_where)
    calls = {}
    for index in indices:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        calls[f"bundle {index}"] = task.options(scheduling_strategy=strategy).remote()
    places = waiting.wait("the GPUs of the placement group", calls)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [
        Bundle(index=index, node=node, address=addresses[node], gpu=gpu)
        for index, (node, gpu) in zip(indices, places, strict=True)
    ]


def _where() -> tuple[str, str]:
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()["GPU"][0])


def _gpus_by_node() -> dict[str, float]:
    """GPUs of each living node that has any, by its address and the beginning of its id, in this order."""
    import ray

    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node["Resources"]["GPU"]
        for node in sorted(ray.nodes(), key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        if node["Alive"] and node["Resources"].get("GPU")
    }


def _held_by_groups() -> dict[str, float]:
    """GPUs of the placement groups that have got theirs, by name."""
    import ray

    held: dict[str, float] = {}
    for identity, group in ray.util.placement_group_table().items():
        gpus = sum(bundle.get("GPU", 0.0) for bundle in group["bundles"].values())
        if group["state"] == "CREATED" and gpus:
            who = f"placement group {group['name'] or identity[:8]}"
            held[who] = held.get(who, 0.0) + gpus
    return held


def _listed(nodes: Mapping[str, float]) -> str:
    return ", ".join(f"{gpus:g} on {node}" for node, gpus in nodes.items()) or "no node has any"


def _place(bundles: Sequence[Bundle]) -> str:
    by_node: dict[str, list[str]] = {}
    for bundle in bundles:
        by_node.setdefault(bundle.address, []).append(bundle.gpu)
    return ", ".join(f"GPU {' '.join(gpus)} of {address}" for address, gpus in by_node.items())
