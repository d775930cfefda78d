"""The actors of a run, as one object with the calls that the driver's loop makes.

Owns: which actors a run has (an engine and a rollout manager, a trainer, or both), their start and their end.
Invariant: however the run ends, every process that it started is gone when `close` returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from slime.ray.environment import actor_options
from slime.ray.startup_check import check_log_probs
from slime.ray.supervision import StopFlag, StopRequested, Supervisor
from slime.ray.train_group import TrainGroup
from slime.train.batch import TrainSample
from slime.utils.misc import load_function
from slime.utils.parts import Part

STOP_SECONDS = 20.0
"""What an actor gets to end its work: hooks in flight clean up their sandboxes in it."""


class Actors:
    """Engine, rollout manager and trainer of one run."""

    def __init__(self, config: Config, run_dir: Path, stop: StopFlag) -> None:
        self._config = config = _on_shared_cores(config)
        self._run_dir = run_dir
        self._stop = stop
        self._supervisor = Supervisor(stop)
        self._deadline = config.run.phase_timeout
        self._engine: Any = None
        self._manager: Any = None
        self._trainer: Any = None
        self._evaluation_engine: Any = None
        self._evaluation_manager: Any = None
        self._weights_file = ""

    @property
    def generates(self) -> bool:
        """Whether there is an engine."""
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
        self._launch(plan)
        if checkpoint is not None:
            self._restore(checkpoint, plan)
        self.synchronise(plan.first_rollout_step)
        if self._engine is not None and self._trainer is not None and self._config.run.startup_check:
            console.note(self._check_log_probs())

    def _launch(self, plan: Plan) -> None:
        """All actors start at the same time; the data is waited for first, as the likeliest to fail (several
        ranks of a trainer meet before, which loads nothing).

        An actor is made empty and loads in `start`: an error there keeps its type and its message, while
        Ray turns one in a constructor into the actor's death.
        """
        config = self._config
        path = "slime.ray.rollout_manager.RolloutManager"
        self._manager = self._actor("rollout manager", path, 8, config, str(self._run_dir))
        manager = self._manager.start.remote()
        if self.generates:
            log = str(self._run_dir / "logs" / "engine.log")
            engine_path = "slime.ray.engine_actor.EngineActor"
            self._engine = self._actor("engine", engine_path, 2, config, log, config.overlaps)
            engine = self._engine.start.remote()
            self._launch_evaluation(engine_path, path)
        if self.trains:
            self._trainer = TrainGroup(config, plan, self._actor)
            weights = self._trainer.call("start", self._meeting(self._trainer))
        self._wait_at_start("start of the rollout manager", manager)
        if self._engine is not None:
            url = self._wait_at_start("start of the engine", engine)
            self._wait_at_start("connection to the engine", self._manager.connect.remote(url))
        if self._trainer is not None:
            self._weights_file = self._wait_at_start("start of the trainer", weights)

    def _launch_evaluation(self, engine_path: str, manager_path: str) -> None:
        """An engine and a manager that only evaluate, where they are wanted."""
        config = self._config
        if not (config.evaluation.eval_own_engine and self.trains):
            return
        log = str(self._run_dir / "logs" / "evaluation_engine.log")
        self._evaluation_engine = self._actor("evaluation engine", engine_path, 2, config, log, True)
        self._evaluation_manager = self._actor("evaluation manager", manager_path, 4, config)
        loaded = self._evaluation_manager.start.remote()
        url = self._wait_at_start("start of the evaluation engine", self._evaluation_engine.start.remote())
        self._wait_at_start("start of the evaluation manager", loaded)
        self._wait_at_start("its connection", self._evaluation_manager.connect.remote(url))

    def _meeting(self, group: TrainGroup) -> int | None:
        """The port where the ranks of the trainer meet; None for one."""
        if len(group.actors) == 1:
            return None
        port: int = self._wait_at_start("meeting of the train processes", group.first.meet.remote())
        return port

    def _actor(self, name: str, path: str, threads: int, *arguments: Any) -> Any:
        """Make an actor of the class at `path`, and watch it; `watch` takes one of its `threads`."""
        import ray

        cls = load_function(path)
        options = actor_options(
            threads,
            repeatable=self._config.train.deterministic_mode,
            variables=environment_of(self._run_dir, name),
        )
        actor = ray.remote(cls).options(**options).remote(*arguments)
        self._supervisor.watch(name, actor.watch.remote())
        return actor

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
        samples = self._wait_at_start("probe of the engine", self._manager.probe.remote())
        values = self._wait_at_start("log-probs of the probe", self._trainer.call("log_probs", samples))
        precision = self._wait_at_start("precision", self._trainer.first.precision.remote())
        return check_log_probs(samples, values, {precision, self._config.engine.dtype})

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

        try:
            batch: RolloutBatch = self._wait(f"rollout step {step}", call, can_give_up=True, on_tick=tick)
        except DeadlineError as error:
            table = self._wait("table of what is in flight", self._manager.describe.remote())
            raise DeadlineError(f"{error.message}; in flight:\n{table}", remedy=error.remedy) from None
        return batch

    def evaluate(self, step: int) -> dict[str, float]:
        """One evaluation."""
        call = self._manager.evaluate.remote(step)
        metrics: dict[str, float] = self._wait(f"evaluation after step {step}", call, can_give_up=True)
        return metrics

    @property
    def evaluates_aside(self) -> bool:
        """Whether evaluations have an engine of their own."""
        return self._evaluation_engine is not None

    def begin_evaluate(self, step: int) -> Any:
        """Let an evaluation of the trainer's present weights begin on the engine of its own."""
        call = self._evaluation_engine.update.remote(self._weights_file, step)
        self._wait("weights of the evaluation engine", call)
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
        """All optimizer steps of a rollout step; the engine holds still meanwhile, or has its own weights."""
        if self._engine is not None and not self._config.overlaps:
            self._wait("hold of the engine", self._engine.hold.remote())
        update: RolloutUpdate = self._wait("training", self._trainer.call("train", step, samples))
        return update

    def synchronise(self, version: int) -> dict[str, float]:
        """Give the trainer's weights to the engine as policy `version`."""
        if self._engine is None or self._trainer is None:
            return {}
        started = time.perf_counter()
        self._wait("rollouts before a weight update", self._manager.before_update.remote())
        call = self._engine.update.remote(self._weights_file, version)
        seconds = self._config.run.update_timeout
        metrics: dict[str, float] = self._wait("weight update", call, seconds, flag="--update-timeout")
        self._wait("news of a weight update", self._manager.weights_changed.remote(version))
        return metrics | {"perf/update_weights_total_time": time.perf_counter() - started}

    def save(self, step_folder: Path) -> list[Part]:
        """Write the state of every process that has one, each into a folder of its own; returns the parts.

        A process writes below its folder what it wants and declares it (`slime.utils.parts.declare`), when it
        is on the disk; the manifest of the step then lists the parts of all.
        """
        parts: list[Part] = self._wait("saving", self._trainer.call("save", str(step_folder / TRAINER)))
        return parts

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self._wait("export", self._trainer.call("save_hf", str(folder)))

    def save_critic(self, folder: Path) -> None:
        """Write a Hugging Face folder of the critic."""
        self._wait("export of the critic", self._trainer.call("save_critic", str(folder)))

    def save_data_position(self, step: int) -> list[Part]:
        """Write the data source's state after `step`; returns its files."""
        parts: list[Part] = self._wait("saving the data position", self._manager.save.remote(step))
        return parts

    def raise_if_stopped(self) -> None:
        """Give up between steps when a stop was requested."""
        if self._stop.requested:
            raise StopRequested("between steps")

    def close(self) -> None:
        """End every process of the run."""
        import ray

        self._supervisor.unwatch_all()
        own = (self._manager, self._engine, self._evaluation_manager, self._evaluation_engine)
        actors = [actor for actor in own if actor is not None]
        actors += self._trainer.actors if self._trainer is not None else []
        for actor in actors:
            ray.wait([actor.stop.remote()], timeout=STOP_SECONDS)
        for actor in actors:
            ray.kill(actor)

    def _wait_at_start(self, name: str, reference: Any) -> Any:
        return self._wait(name, reference, can_give_up=True)

    def _wait(self, name: str, reference: Any, deadline: float | None = None, **options: Any) -> Any:
        """The result of a call; of a call of all train processes, what the first of them gave."""
        seconds = deadline or self._deadline
        if isinstance(reference, dict):
            return self._supervisor.wait_all(name, reference, seconds, **options)[0]
        return self._supervisor.wait(name, reference, seconds, **options)


def _on_shared_cores(config: Config) -> Config:
    """Half of the cores each for engine and trainer where they compute at once: two pools of threads that are
    larger together than the machine stand in each other's way."""
    if not config.overlaps:
        return config
    half, ranks = max(1, len(os.sched_getaffinity(0)) // 2), config.train.actor_num_gpus_per_node
    engine = replace(config.engine, num_threads=config.engine.num_threads or half)
    threads = config.train.train_num_threads or max(1, half // ranks)
    return replace(config, engine=engine, train=replace(config.train, train_num_threads=threads))
