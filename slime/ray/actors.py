"""The actors of a run, as one object with the calls that the driver's loop makes.

Owns: which actors a run has (an engine and a rollout manager, a trainer, or both), their start and their end.
Invariant: however the run ends, every process that it started is gone when `close` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from slime.backends.update import RolloutUpdate
from slime.config import Config
from slime.config.plan import Plan
from slime.errors import DeadlineError
from slime.observability.console import RunConsole
from slime.observability.doctor import environment_of
from slime.ray.batch import RolloutBatch
from slime.ray.checkpoints import TRAINER, Checkpoint
from slime.ray.deliveries import Deliveries
from slime.ray.delivery import TrainerSharing
from slime.ray.devices import DeviceTurns, Holder
from slime.ray.engine_pool import EnginePool
from slime.ray.environment import actor_options
from slime.ray.placement import Placement, here, merged
from slime.ray.serving import (
    EVALUATION,
    ROLLOUT,
    ServingPlan,
    make_evaluation_pool,
    make_pool,
    plan_serving,
    take_gpus,
)
from slime.ray.startup_check import check_log_probs
from slime.ray.supervision import StopFlag, StopRequested, Supervisor
from slime.ray.train_group import TrainGroup
from slime.train.batch import TrainSample
from slime.utils.misc import load_function
from slime.utils.parts import Part

STOP_SECONDS = 20.0
"""What an actor gets to end its work: hooks in flight clean up their sandboxes in it."""
MANAGER = "slime.ray.rollout_manager.RolloutManager"


class Actors:
    """Engines, rollout manager and trainer of one run."""

    def __init__(self, config: Config, run_dir: Path, stop: StopFlag) -> None:
        self._config = config
        self._run_dir = run_dir
        self._stop = stop
        self._supervisor = Supervisor(stop)
        self._deadline = config.run.phase_timeout
        self._note: Callable[[str], None] = lambda text: None
        self._manager: Any = None
        self._trainer: TrainGroup | None = None
        self._evaluation_manager: Any = None
        self._placement: Placement | None = None
        self._serving: ServingPlan
        self._pool: EnginePool | None = None
        self._evaluation_pool: EnginePool | None = None
        self._deliveries: Deliveries
        self._turns: DeviceTurns

    @property
    def generates(self) -> bool:
        """Whether there are engines."""
        return not self._config.train_only

    @property
    def trains(self) -> bool:
        """Whether there is a trainer."""
        return not self._config.run.debug_rollout_only

    def start(self, plan: Plan, checkpoint: Checkpoint | None, console: RunConsole) -> None:
        """Start all actors, restore the checkpoint, push the first weights and compare log-probs.

        Raises:
            MismatchError: engine and trainer disagree.
        """
        self._note = console.note
        self._launch(plan)
        if checkpoint is not None:
            self._restore(checkpoint, plan)
        self.synchronise(plan.first_rollout_step)
        if self._pool is not None and self._trainer is not None and self._config.run.startup_check:
            console.note(self._check_log_probs())

    def _launch(self, plan: Plan) -> None:
        """All actors start at the same time, but where engines and trainer share GPUs; the data is waited for
        first, as the likeliest to fail (several ranks of a trainer meet before, which loads nothing).

        An actor is made empty and loads in `start`: an error there keeps its type and its message, while
        Ray turns one in a constructor into the actor's death.
        """
        self._serving = serving = plan_serving(self._config)
        self._config = config = serving.config
        self._turns = DeviceTurns(generates=self.generates, overlaps=config.overlaps)
        logs = self._run_dir / "logs"
        self._placement = take_gpus(serving, self._supervisor, self._deadline, self._note)
        self._manager = self.make("rollout manager", MANAGER, 8, config, str(self._run_dir))
        manager = self._manager.start.remote()
        if self.generates:
            self._pool = make_pool(serving, self, logs, self._placement)
            self._supervisor.look(self._pool.poll)
            self._pool.begin_start()
            if self._shares_gpus:
                self._pool.finish_start()
                self._hold(self._pool)
        if self.generates and self.trains:
            self._evaluation_pool = make_evaluation_pool(serving, self, logs)
        if self.trains:
            self._trainer = TrainGroup(config, plan, self._make_rank)
            sharing = TrainerSharing(
                shares_memory=self._shares_memory,
                engine_dtype=serving.engine_dtype,
                sleeps=serving.sharing.offload_train,
            )
            loaded = self._trainer.call("start", self._meeting(self._trainer), sharing)
        self._deliveries = Deliveries(serving, self._pool, self._trainer, self._supervisor)
        self._wait_at_start("start of the rollout manager", manager)
        if self._pool is not None:
            if not self._shares_gpus:
                self._pool.finish_start(awaits_weights=self.trains)
            addresses = self._pool.addresses()
            connected = self._manager.connect.remote(addresses, serving.sharers, serving.frozen)
            self._wait_at_start("connection to the engines", connected)
        self._launch_evaluation()
        if self._trainer is not None:
            with self._trainer_awake():
                self._wait_at_start("start of the trainer", loaded)

    def _launch_evaluation(self) -> None:
        """A manager that only evaluates, where there is an engine for it."""
        pool = self._evaluation_pool
        if pool is None:
            return
        pool.begin_start()
        self._evaluation_manager = self.make("evaluation manager", MANAGER, 4, self._config)
        loaded = self._evaluation_manager.start.remote()
        pool.finish_start()
        self._wait_at_start("start of the evaluation manager", loaded)
        connected = self._evaluation_manager.connect.remote(pool.addresses(), 1)
        self._wait_at_start("its connection", connected)

    @property
    def _shares_gpus(self) -> bool:
        """Whether engines and trainer cannot be awake at once: then engines come up first, and make room."""
        return self._placement is not None and self._serving.sharing.colocate

    def _trainer_awake(self) -> AbstractContextManager[None]:
        """Around what wakes the trainer besides training."""
        return self._turns.training() if self._shares_gpus else nullcontext()

    @property
    def _shares_memory(self) -> bool:
        """Whether engines map the weights of the trainer."""
        return self._serving.kind == "embedded" and self._serving.one_machine and self.generates

    def _meeting(self, group: TrainGroup) -> int | None:
        """The port where the ranks of the trainer meet; None for one."""
        if len(group.actors) == 1:
            return None
        port: int = self._wait_at_start("meeting of the train processes", group.first.meet.remote())
        return port

    def make(
        self,
        name: str,
        path: str,
        threads: int,
        *arguments: Any,
        placed: Mapping[str, Any] | None = None,
        vital: bool = True,
    ) -> Any:
        """Make an actor of the class at `path`; the end of a vital one ends the run.

        Args:
            threads: calls that run at the same time; `watch` takes one.
            placed: Ray options of its place.
        """
        import ray

        cls = load_function(path)
        options = actor_options(
            threads,
            repeatable=self._config.train.deterministic_mode,
            variables=environment_of(self._run_dir, name),
        )
        actor = ray.remote(cls).options(**merged(options, placed or here())).remote(*arguments)
        if vital:
            self._supervisor.watch(name, actor.watch.remote())
        return actor

    def _make_rank(self, name: str, path: str, threads: int, config: Config, plan: Plan, rank: int) -> Any:
        placed: Mapping[str, Any] = {}
        if self._placement is not None:
            placed = self._placement.train_options(rank, config.train.actor_num_gpus_per_node)
        return self.make(name, path, threads, config, plan, rank, placed=placed)

    def _restore(self, checkpoint: Checkpoint, plan: Plan) -> None:
        """Go on from a checkpoint; from another step than its next, with its weights and nothing else."""
        first = plan.first_rollout_step
        if self._trainer is not None:
            restart_at = None if first == checkpoint.next_step else first
            call = self._trainer.call("load", str(checkpoint.trainer), restart_at)
            self._wait_at_start("loading the checkpoint", call)
        if not self._config.reads_dumps and (self.generates or self._config.learns_from_data):
            self._wait_at_start("loading the data position", self._manager.load.remote(first - 1))

    def _check_log_probs(self) -> str:
        assert self._trainer is not None
        samples = self._wait_at_start("probe of the engine", self._manager.probe.remote())
        if self._pool is not None and self._shares_gpus:
            self._hold(self._pool)
        with self._trainer_awake():
            values = self._wait_at_start("log-probs of the probe", self._trainer.call("log_probs", samples))
        if self._shares_gpus:
            self.synchronise(self._deliveries.version)
        precision = self._wait_at_start("precision", self._trainer.first.precision.remote())
        return check_log_probs(samples, values, {precision, self._serving.engine_dtype})

    def generate(self, step: int, on_progress: Callable[[int], None]) -> RolloutBatch:
        """One rollout step."""
        return self.generated(step, self.begin_generate(step), on_progress)

    def begin_generate(self, step: int) -> Any:
        """Let a rollout step begin; `generated` waits for it."""
        return self._manager.generate.remote(step)

    def generated(self, step: int, call: Any, on_progress: Callable[[int], None]) -> RolloutBatch:
        """The batch of a step that has begun."""

        def tick() -> None:
            on_progress(self._wait("progress", self._manager.progress.remote())[0])
            self._deliveries.mend()

        try:
            batch: RolloutBatch = self._wait(f"rollout step {step}", call, can_give_up=True, on_tick=tick)
        except DeadlineError as error:
            table = self._wait("table of what is in flight", self._manager.describe.remote())
            raise DeadlineError(f"{error.message}; in flight:\n{table}", remedy=error.remedy) from None
        return batch

    def evaluate(self, step: int) -> dict[str, float]:
        """One evaluation."""
        call = self._manager.evaluate.remote(step)
        metrics: dict[str, float] = self._wait(
            f"evaluation after step {step}", call, can_give_up=True, on_tick=self._deliveries.mend
        )
        return metrics

    @property
    def evaluates_aside(self) -> bool:
        """Whether evaluations have an engine of their own."""
        return self._evaluation_pool is not None

    def begin_evaluate(self, step: int) -> Any:
        """Let an evaluation of the trainer's present weights begin on the engine of its own."""
        assert self._evaluation_pool is not None
        report = self._deliveries.deliver(EVALUATION, self._evaluation_pool.endpoints, step, "abort")
        self._deliveries.raise_failures(report)
        return self._evaluation_manager.evaluate.remote(step)

    def evaluated(self, step: int, call: Any) -> dict[str, float]:
        """The metrics of an evaluation that has begun."""
        metrics: dict[str, float] = self._wait(f"evaluation after step {step}", call, can_give_up=True)
        return metrics

    def is_done(self, call: Any) -> bool:
        """Whether a call has ended."""
        import ray

        done, _ = ray.wait([call], timeout=0)
        return bool(done)

    def train(self, step: int, samples: Sequence[TrainSample]) -> RolloutUpdate:
        """All optimizer steps of a rollout step; the engines hold still meanwhile, or have their own
        weights."""
        assert self._trainer is not None
        if self._pool is not None and not self._config.overlaps:
            self._hold(self._pool)
        with self._turns.training():
            update: RolloutUpdate = self._wait("training", self._trainer.call("train", step, samples))
        self._deliveries.version = step + 1
        return update

    def _hold(self, pool: EnginePool) -> None:
        with self._turns.hold():
            pool.hold(release=self._serving.sharing.offload_rollout)

    def synchronise(self, version: int) -> dict[str, float]:
        """Give the trainer's weights to the engines as policy `version`."""
        self._deliveries.version = version
        if self._pool is None or self._trainer is None:
            return {}
        started = time.perf_counter()
        waited = self._manager.before_update.remote()
        # A replacement beside engines that gave up their memory would be the only one that has it.
        mend = None if self._turns.holder is Holder.NOBODY else self._deliveries.mend
        self._wait("rollouts before a weight update", waited, on_tick=mend)
        self._pool.pause_checks()
        endpoints = self._pool.endpoints
        with self._turns.update() as held:
            released = held and self._serving.sharing.offload_rollout
            report = self._deliveries.deliver(
                ROLLOUT, endpoints, version, self._serving.pause, released=released
            )
            self._deliveries.leave_out(report)
            if held:
                self._pool.go_on(released=released)
        self._deliveries.mend()
        self._pool.resume_checks()
        self._wait("news of a weight update", self._manager.weights_changed.remote(version))
        return {**report.metrics, "perf/update_weights_total_time": time.perf_counter() - started}

    def save(self, step_folder: Path) -> list[Part]:
        """Write the state of every process that has one, each into a folder of its own; returns the parts.

        A process writes below its folder what it wants and declares it (`slime.utils.parts.declare`), when it
        is on the disk; the manifest of the step then lists the parts of all.
        """
        parts: list[Part] = self._wait("saving", self._ranks.call("save", str(step_folder / TRAINER)))
        return parts

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self._wait("export", self._ranks.call("save_hf", str(folder)))

    def save_critic(self, folder: Path) -> None:
        """Write a Hugging Face folder of the critic."""
        self._wait("export of the critic", self._ranks.call("save_critic", str(folder)))

    def save_data_position(self, step: int) -> list[Part]:
        """Write the data source's state after `step`; returns its files."""
        parts: list[Part] = self._wait("saving the data position", self._manager.save.remote(step))
        return parts

    def raise_if_stopped(self) -> None:
        """Give up between steps when a stop was requested."""
        if self._stop.requested:
            raise StopRequested("between steps")

    @property
    def _ranks(self) -> TrainGroup:
        assert self._trainer is not None
        return self._trainer

    def close(self) -> None:
        """End every process of the run."""
        import ray

        self._supervisor.unwatch_all()
        pools = [pool for pool in (self._pool, self._evaluation_pool) if pool is not None]
        for pool in pools:
            pool.stop_watching()
        managers = [actor for actor in (self._manager, self._evaluation_manager) if actor is not None]
        for actor in managers:
            ray.wait([actor.stop.remote()], timeout=STOP_SECONDS)
        for pool in pools:
            pool.leave()
        others = [actor for pool in pools for actor in pool.actors]
        others += self._trainer.actors if self._trainer is not None else []
        for actor in others:
            ray.wait([actor.stop.remote()], timeout=STOP_SECONDS)
        for actor in (*managers, *others):
            ray.kill(actor)
        for pool in pools:
            pool.close()
        if self._placement is not None:
            self._placement.remove()

    def _wait_at_start(self, name: str, reference: Any) -> Any:
        return self._wait(name, reference, can_give_up=True)

    def wait_all(self, name: str, calls: Mapping[str, Any]) -> list[Any]:
        """The results of calls of several actors, within the deadline of a phase."""
        return self._supervisor.wait_all(name, calls, self._deadline, can_give_up=True)

    def note(self, text: str) -> None:
        """Tell the user."""
        self._note(text)

    def _wait(self, name: str, reference: Any, deadline: float | None = None, **options: Any) -> Any:
        """The result of a call; of a call of all train processes, what the first of them gave."""
        seconds = deadline or self._deadline
        if isinstance(reference, dict):
            return self._supervisor.wait_all(name, reference, seconds, **options)[0]
        return self._supervisor.wait(name, reference, seconds, **options)
