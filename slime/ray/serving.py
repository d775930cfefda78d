"""From flags to what serves rollouts: topology, seats on GPUs, routers, the pool of engines.

Invariant: everything that is wrong with a topology or with external engines is told before a process starts.
Knows no trainer, and nothing of what happens in a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from slime.config import Config
from slime.config.device_sharing import DeviceSharing, share_devices
from slime.config.weight_movement import choose_transport, weight_movement
from slime.errors import ConfigError
from slime.ray.delivery import Way
from slime.ray.engine_pool import EnginePool
from slime.ray.hands import Hands
from slime.ray.layout import EngineSlots, Layout, check_shared_gpus
from slime.ray.placement import Placement, is_placed, layout_of_run, place
from slime.ray.ports import own_address
from slime.ray.routers import Routers
from slime.ray.supervision import Supervisor
from slime.serving.endpoint import EngineKind
from slime.serving.engine_specs import EngineSpec, plan_engines
from slime.serving.external import Expected, ExternalEngine, discover
from slime.serving.launch import LaunchSettings
from slime.serving.topology import Topology, single_model
from slime.serving.topology_flags import topology_of_run
from slime.serving.weights.sync import UpdatePause
from slime.serving.yaml_nodes import raise_problems

ROLLOUT, EVALUATION = "rollout", "evaluation"
_DECODE = ("regular", "decode")


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What will serve.

    Attributes:
        config: with the threads that each engine and the trainer get.
        externals: engines that run already, instead of ours.
    """

    config: Config
    kind: EngineKind
    sharing: DeviceSharing
    layout: Layout
    is_placed: bool
    topology: Topology
    externals: tuple[ExternalEngine, ...] = ()

    @property
    def specs(self) -> tuple[EngineSpec, ...]:
        """Engines that are to be started."""
        if self.externals or not self.generates:
            return ()
        return plan_engines(self.topology, first_gpu=self.layout.rollout_offset)

    @property
    def sharers(self) -> int:
        """Engines that share the rollouts of the default model; of a disaggregated one those that decode, as
        each request is at one of them from start to end."""
        engines = [(spec.model, spec.worker_type) for spec in self.specs]
        engines += [(one.endpoint.model, one.endpoint.worker_type) for one in self.externals]
        return sum(model == self.topology.default.name and kind in _DECODE for model, kind in engines)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Models that take no weights of the trainer."""
        trained = {spec.model for spec in self.specs if spec.update_weights}
        return tuple(sorted({spec.model for spec in self.specs} - trained))

    @property
    def generates(self) -> bool:
        """Whether anything serves."""
        return not self.config.train_only

    @property
    def one_machine(self) -> bool:
        """Whether engines and trainer share memory, as far as is known."""
        return not self.externals and not self.is_placed

    @property
    def pause(self) -> UpdatePause:
        """What becomes of requests in flight at an update: where rollouts go on over it they continue, with
        keys and values of the older weights at the embedded engine, and with new ones at SGLang, whose cache
        of prefixes would else serve older weights to later requests."""
        if not self.config.is_fully_async or self.config.rollout.update_in_flight == "wait":
            return "abort"
        return "in_place" if self.kind == "embedded" else "retract"

    @property
    def engine_dtype(self) -> str:
        """What the engines compute in, as far as the flags say."""
        if self.kind == "embedded":
            return self.config.engine.dtype
        dtype = str(self.config.sglang.get("dtype", "auto"))
        return "bfloat16" if dtype == "auto" else dtype

    def way(self, pool: str) -> Way:
        """How weights reach a pool."""
        takes_turns = pool == ROLLOUT and not self.config.overlaps
        aliases = self.kind == "embedded" and self.one_machine and takes_turns
        one_machine = self.one_machine or (pool == ROLLOUT and self._shares_gpus)
        return Way(pool=pool, kind=self.kind, one_machine=one_machine, aliases=aliases)

    @property
    def _shares_gpus(self) -> bool:
        """Whether each engine is on GPUs of the trainer, and so on its machine, where no NCCL group can be of
        both: it takes one rank a GPU."""
        return self.is_placed and self.sharing.colocate and self.layout.rollout_gpus <= self.layout.train_gpus


def plan_serving(config: Config) -> ServingPlan:
    """Look at flags, files, external engines and the cluster.

    Raises:
        ConfigError: a topology that cannot be, engines that do not fit, too few GPUs.
        EngineUnavailableError: an external engine does not answer.
    """
    topology, _ = topology_of_run(config)
    sharing = replace(share_devices(config), rollout_gpus=topology.num_gpus)
    layout = layout_of_run(config, sharing)
    placed = is_placed(layout, config.serving.place_on_gpus)
    sharing = replace(share_devices(config, on_gpus=placed), rollout_gpus=topology.num_gpus)
    kind = cast(EngineKind, config.serving.rollout_engine)
    externals = _externals(config)
    if externals:
        kind = externals[0].endpoint.kind
        config = of_kind(config, kind)
    engines = topology.num_engines
    if kind == "embedded" and not placed:
        config = _on_shared_cores(config, max(1, engines))
    plan = ServingPlan(
        config=config,
        kind=kind,
        sharing=sharing,
        layout=layout,
        is_placed=placed,
        topology=topology,
        externals=externals,
    )
    if placed:
        one_machine = plan.way(ROLLOUT).one_machine
        check_shared_gpus(layout, choose_transport(config.weights, one_machine=one_machine))
    return plan


def of_kind(config: Config, kind: EngineKind) -> Config:
    """The configuration of a run whose engines were found to be of this kind.

    Raises:
        ConfigError: they cannot take weights as the flags say.
    """
    if config.serving.rollout_engine == kind:
        return config
    config = replace(config, serving=replace(config.serving, rollout_engine=kind))
    raise_problems(weight_movement(config, frozenset()), f"weights of engines that are {kind}")
    return config


def take_gpus(
    plan: ServingPlan, supervisor: Supervisor, deadline: float, note: Callable[[str], None]
) -> Placement | None:
    """The GPUs of the run; None where it takes none.

    Raises:
        DeadlineError: the cluster did not have them in time.
    """
    if not plan.is_placed:
        return None
    serving = plan.config.serving
    slots = [EngineSlots(name=one.name, first=one.first_gpu, gpus=one.num_gpus) for one in plan.specs]
    placement = place(
        plan.layout,
        slots if plan.specs else [],
        name=f"slime-{os.getpid()}",
        ranks_per_node=plan.config.train.actor_num_gpus_per_node,
        gpus_per_node=serving.num_gpus_per_node,
        supervisor=supervisor,
        deadline=deadline,
        note=note,
    )
    note("\n".join(placement.lines()))
    return placement


def make_pool(plan: ServingPlan, hands: Hands, logs: Path, placement: Placement | None) -> EnginePool:
    """The engines that rollouts ask."""
    config = plan.config
    restarts = config.serving.rollout_engine_restarts
    replaces = config.serving.use_fault_tolerance
    routers = Routers(
        config,
        plan.topology,
        plan.kind,
        logs,
        host=own_address() if plan.is_placed else None,
        restarts=restarts if replaces else None,
    )
    return EnginePool(
        config.serving,
        launch_settings(plan, logs),
        plan.specs,
        hands,
        routers,
        externals=plan.externals,
        replaces=replaces,
        placement=placement,
    )


def make_evaluation_pool(plan: ServingPlan, hands: Hands, logs: Path) -> EnginePool | None:
    """An engine that only evaluates, where one is wanted."""
    config = plan.config
    if not config.evaluation.eval_own_engine or config.run.debug_rollout_only:
        return None
    if plan.is_placed and plan.kind == "sglang":
        raise ConfigError(
            "an engine that only evaluates has no GPU of its own here",
            place="--eval-own-engine",
            remedy="leave it out: evaluations then ask the engines of rollouts",
        )
    model = single_model(config.model.hf_checkpoint or "", num_gpus=1)
    specs = [replace(spec, name=EVALUATION) for spec in plan_engines(model)]
    settings = launch_settings(plan, logs)
    settings = replace(settings, embedded=replace(settings.embedded, port=None))
    return EnginePool(config.serving, settings, specs, hands, None, label="evaluation engine")


def launch_settings(plan: ServingPlan, logs: Path) -> LaunchSettings:
    """What all engines of the run have in common."""
    config = plan.config
    embedded = config.engine
    if config.train.deterministic_mode:
        embedded = replace(embedded, enable_deterministic_inference=True)
    return LaunchSettings(
        kind=plan.kind,
        log_dir=logs,
        embedded=embedded,
        sglang=config.sglang,
        python=config.serving.sglang_python,
        seed=config.model.seed,
        memory_saver=plan.is_placed and plan.sharing.offload_rollout,
        routed_experts=config.algorithm.use_rollout_routing_replay,
    )


def _externals(config: Config) -> tuple[ExternalEngine, ...]:
    addresses = config.serving.rollout_external_engine_addrs
    if addresses is None or config.train_only:
        return ()
    expected = Expected(
        model_path=config.model.hf_checkpoint,
        context_length=config.rollout.rollout_max_context_len,
        settings=config.sglang,
        num_gpus=config.serving.rollout_num_gpus,
        takes_weights=not config.run.debug_rollout_only,
    )
    return discover(addresses, expected)


def _on_shared_cores(config: Config, engines: int) -> Config:
    """Each engine its share of the cores, and half of them for all where trainer and engines compute at once:
    pools of threads that are larger together than the machine stand in each other's way."""
    cores, ranks = len(os.sched_getaffinity(0)), config.train.actor_num_gpus_per_node
    if not config.overlaps and engines == 1:
        return config
    shared = max(1, cores // 2) if config.overlaps else cores
    engine = replace(config.engine, num_threads=config.engine.num_threads or max(1, shared // engines))
    if not config.overlaps:
        return replace(config, engine=engine)
    threads = config.train.train_num_threads or max(1, shared // ranks)
    return replace(config, engine=engine, train=replace(config.train, train_num_threads=threads))
