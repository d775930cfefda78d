"""The loop of a run. All that it calls is an actor; all that it decides is in `Config` and `Plan`.

Invariant: a step is generate, train, update; policy version N is the weights after N rollout steps. Where
they overlap, step N + 1 is generated while N trains: by the weights before it, or, fully asynchronous, across
the update. Laptop and cluster run these lines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config import Config
from slime.config.plan import Plan, evaluation_steps
from slime.errors import CheckpointError, SlimeError
from slime.observability.console import RunConsole
from slime.observability.report import evaluation_scores
from slime.observability.trackers import Tracker
from slime.ray.actors import Actors
from slime.ray.batch import RolloutBatch
from slime.ray.checkpoint_writer import CheckpointWriter
from slime.ray.lineage import Trained
from slime.ray.supervision import StopRequested

GAP = "train/train_rollout_logprob_abs_diff"


@dataclass
class RunResult:
    """What a run leaves behind."""

    run_dir: Path
    steps_done: int = 0
    checkpoint: Path | None = None
    hf_folder: Path | None = None
    stopped: bool = False


class Driver:
    """Runs the steps of a plan on the actors of a run."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        actors: Actors,
        console: RunConsole,
        tracker: Tracker,
        run_dir: Path,
        trained: Trained,
    ) -> None:
        """`trained` is what the weights were trained on before this run."""
        self._config = config
        self._plan = plan
        self._actors = actors
        self._console = console
        self._tracker = tracker
        self._evaluate_at = set(
            evaluation_steps(config.evaluation, plan.first_rollout_step, plan.rollout_steps)
        )
        self._saved_at: int | None = None
        self._synced = plan.first_rollout_step
        self._trained = trained
        model = config.model
        self._checkpoints = CheckpointWriter(Path(model.save), model.keep_checkpoints) if model.save else None
        self._calls: dict[int, Any] = {}
        self._evaluations: dict[int, Any] = {}
        self._batches: dict[int, RolloutBatch] = {}
        self._failure: SlimeError | None = None
        self.result = RunResult(run_dir, steps_done=plan.first_rollout_step)

    def run(self) -> RunResult:
        """All steps; on a requested stop, saves what is finished and returns."""
        first, last = self._plan.first_rollout_step, self._plan.rollout_steps
        try:
            self._evaluate(first)
            for step in range(first, last):
                self._step(step)
                self.result.steps_done = step + 1
                self._save(step, last=step + 1 == last)
                self._raise_failure()
                self._actors.raise_if_stopped()
                self._evaluate(step + 1)
            self._tell_evaluations(wait=True)
        except StopRequested:
            self.result.stopped = True
            self._console.note("stopping: saving what is finished (Ctrl-C again to leave at once)")
            for done in self._evaluations:
                self._console.note(f"the evaluation after {done} steps is given up")
            if self._actors.trains and self.result.steps_done > first:
                self._save_weights(self.result.steps_done - 1)
        return self.result

    def _step(self, step: int) -> None:
        started = time.perf_counter()
        self._tell_evaluations(wait=False)
        actors, plan = self._actors, self._plan
        self._console.phase(f"step {step}: rollout", plan.prompts_per_rollout_step)
        batch = self._batch_of(step)
        self._begin(step + 1)
        metrics = batch.metrics | {"rollout/policy_version": float(self._synced)}
        if actors.trains:
            what = "critic only" if step < plan.critic_only_rollout_steps else "training"
            self._console.phase(f"step {step}: {what} on {len(batch.samples)} samples")
            update = actors.train(step, batch.samples)
            self._trained = self._trained.after(batch.samples)
            metrics |= update.metrics()
            if (step + 1 - plan.first_rollout_step) % self._config.weights.update_weights_interval == 0:
                metrics |= self._synchronise(step + 1)
        metrics["perf/step_time"] = time.perf_counter() - started
        self._tracker.log(metrics | {"rollout/step": float(step)}, step)
        self._console.step(step, metrics)
        self._warn_of_gap(step, metrics)

    def _synchronise(self, done: int) -> dict[str, float]:
        """Give the engines the weights after so many steps, once the batch that older ones make is there.

        A stop that is asked meanwhile (engines may be started anew then) ends the run behind the step, which
        has trained and must count.
        """
        if not self._has_next_batch(done):
            return {}
        self._console.phase(f"step {done - 1}: weights")
        try:
            metrics = self._actors.synchronise(done)
        except StopRequested:
            return {}
        self._synced = done
        return metrics

    def _begin(self, step: int) -> None:
        """Let a step be generated while the one before trains."""
        if self._config.overlaps and self._actors.trains and step < self._plan.rollout_steps:
            self._calls[step] = self._actors.begin_generate(step)

    def _has_next_batch(self, step: int) -> bool:
        """Wait for a batch that is made by the weights before the update. False if it fails or a stop is
        asked meanwhile, which ends the run once the step that has trained is logged and saved."""
        if self._config.is_fully_async or step not in self._calls:
            return True
        self._console.phase(f"step {step}: rollout", self._plan.prompts_per_rollout_step)
        try:
            self._batches[step] = self._batch_of(step)
        except StopRequested:
            return False
        except SlimeError as error:
            self._failure = error
            return False
        return True

    def _raise_failure(self) -> None:
        """End the run with what kept the next batch from being made."""
        if self._failure is not None:
            raise self._failure

    def _batch_of(self, step: int) -> RolloutBatch:
        if step in self._batches:
            return self._batches.pop(step)
        call = self._calls.pop(step, None)
        if call is None:
            return self._actors.generate(step, self._console.progress)
        return self._actors.generated(step, call, self._console.progress)

    def _warn_of_gap(self, step: int, metrics: Mapping[str, float]) -> None:
        gap, bound = metrics.get(GAP, 0.0), self._config.run.logprob_gap_warning
        if gap > bound:
            self._console.note(
                f"warning: step {step}: engine and trainer log-probs differ by {gap:.2g} on average, more "
                f"than --logprob-gap-warning {bound:g}: what is trained is not the policy that sampled. Look "
                "for sampling parameters that change the distribution, or correct for it with --use-tis"
            )

    def _evaluate(self, done: int) -> None:
        if done not in self._evaluate_at or not self._actors.generates:
            return
        if self._actors.trains and self._synced != done and not self._actors.evaluates_aside:
            self._synchronise(done)
        if self._actors.evaluates_aside:
            self._tell_evaluations(wait=True)
            self._evaluations[done] = self._actors.begin_evaluate(done)
            return
        self._console.phase(f"evaluation after {done} steps")
        self._tell_evaluation(done, self._actors.evaluate(done))

    def _tell_evaluations(self, *, wait: bool) -> None:
        """Log the evaluations on an engine of their own that have ended, or all."""
        for done, call in list(self._evaluations.items()):
            if wait or self._actors.is_done(call):
                del self._evaluations[done]
                self._tell_evaluation(done, self._actors.evaluated(done, call))

    def _tell_evaluation(self, done: int, metrics: dict[str, float]) -> None:
        self._tracker.log(metrics, done)
        scores = evaluation_scores([{"step": done, **metrics}])
        shown = ", ".join(f"{name} {points[0][1]:.3f}" for name, points in scores.items())
        self._console.note(f"evaluation after {done} steps: {shown}")

    def _save(self, step: int, *, last: bool) -> None:
        """Save what the interval or the end asks for; a failure ends the run only at the end, and hides none
        that ends it already.

        The data position is written after every step, since only then is it the position of that step: a
        later stop saves weights, and finds the position that belongs to them.
        """
        if not self._actors.trains:
            return
        every = self._config.model.save_interval
        try:
            if self._checkpoints is not None:
                self._checkpoints.take_position(step, self._actors.save_data_position(step))
            if last or (every and (step + 1) % every == 0):
                self._save_weights(step)
        except SlimeError as error:
            if self._failure is None and (last or not isinstance(error, CheckpointError)):
                raise
            self._console.note(f"warning: checkpoint of step {step} not saved, going on: {error}")

    def _save_weights(self, step: int) -> None:
        if self._saved_at == step:
            return
        self._console.phase(f"step {step}: saving")
        model = self._config.model
        if self._checkpoints is not None:
            folder = self._checkpoints.begin(step)
            parts = self._actors.save(folder)
            self._checkpoints.commit(step, parts, policy_version=step + 1, trained=self._trained)
            self.result.checkpoint = folder
        if model.save_hf:
            self.result.hf_folder = Path(model.save_hf.replace("{rollout_id}", str(step)))
            self._actors.save_hf(self.result.hf_folder)
        if self._config.critic.save:
            self._actors.save_critic(Path(self._config.critic.save.replace("{rollout_id}", str(step))))
        self._saved_at = step
