"""The plan: everything that follows from the flags, computed once, in units that are named.

Invariant: no other module derives a batch quantity from flags again.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from slime.config.sections import DataConfig, EvalConfig, RolloutConfig
from slime.config.training_sections import AlgorithmConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Derived quantities of a run; the unit is in each name."""

    prompts_in_data: int | None
    prompts_per_rollout_step: int
    rollouts_per_prompt: int
    rollouts_per_rollout_step: int
    rollouts_per_optimizer_step: int
    optimizer_steps_per_rollout_step: int
    rollout_steps: int
    first_rollout_step: int
    optimizer_steps: int
    response_tokens_per_rollout_step: int | None
    evaluations: int
    critic_only_rollout_steps: int = 0
    critic_epochs: int = 0
    carries: bool = False

    def actor_steps(self, rollout_steps: int) -> int:
        """The actor's optimizer steps in the rollout steps before this one, from step 0 on."""
        trained = max(rollout_steps - self.critic_only_rollout_steps, 0)
        if self.carries and self.rollouts_per_optimizer_step:
            rollouts, each = trained * self.rollouts_per_rollout_step, self.rollouts_per_optimizer_step
            return math.ceil(rollouts / each) if rollout_steps == self.rollout_steps else rollouts // each
        return trained * self.optimizer_steps_per_rollout_step

    def critic_steps(self, rollout_steps: int) -> int:
        """The same of the critic; 0 where there is none."""
        return rollout_steps * self.optimizer_steps_per_rollout_step * self.critic_epochs

    def lines(self) -> list[str]:
        """The plan as a person reads it."""
        data = "made by the rollout function" if self.prompts_in_data is None else f"{self.prompts_in_data}"
        cap = self.response_tokens_per_rollout_step
        return [
            f"prompts in the data     {data}",
            f"a rollout step          {self.prompts_per_rollout_step} prompts x {self.rollouts_per_prompt} = "
            f"{self.rollouts_per_rollout_step} rollouts"
            + ("" if cap is None else f", at most {cap:,} response tokens"),
            f"an optimizer step       {self.rollouts_per_optimizer_step} rollouts; " + self._steps_line(),
            f"the run                 {self.rollout_steps} rollout steps, "
            f"{self.optimizer_steps} optimizer steps"
            + (f", from step {self.first_rollout_step}" if self.first_rollout_step else ""),
            *self._critic_lines(),
            f"evaluations             {self.evaluations}",
        ]

    def _steps_line(self) -> str:
        if self.carries and self.rollouts_per_rollout_step % self.rollouts_per_optimizer_step:
            return "what fills none waits for the next rollout step"
        return f"{self.optimizer_steps_per_rollout_step} per rollout step"

    def _critic_lines(self) -> list[str]:
        if not self.critic_epochs:
            return []
        steps = self.optimizer_steps_per_rollout_step * self.critic_epochs
        alone = self.critic_only_rollout_steps
        warm_up = f"; alone in the first {alone} rollout steps" if alone else ""
        return [f"the critic              {steps} optimizer steps per rollout step{warm_up}"]


def make_plan(
    data: DataConfig,
    rollout: RolloutConfig,
    evaluation: EvalConfig,
    prompts_in_data: int | None,
    first_rollout_step: int,
    *,
    critic_epochs: int = 0,
    critic_only_rollout_steps: int = 0,
) -> Plan:
    """Derive the plan from validated sections.

    Args:
        prompts_in_data: rows of the prompt data, or None without a data set.
        first_rollout_step: step to start from; after a checkpoint, its step + 1.
        critic_epochs: passes of the critic over a rollout step's optimizer steps; 0 without a critic.
        critic_only_rollout_steps: rollout steps, from step 0 on, in which the actor is not trained.
    """
    prompts = data.rollout_batch_size or 0
    rollouts = prompts * data.n_samples_per_prompt
    per_step = rollouts_per_optimizer_step(data)
    steps_each = math.ceil(rollouts / per_step) if per_step else 0
    rollout_steps = _rollout_steps(data, prompts_in_data)
    cap = rollout.rollout_max_response_len
    plan = Plan(
        prompts_in_data=prompts_in_data,
        prompts_per_rollout_step=prompts,
        rollouts_per_prompt=data.n_samples_per_prompt,
        rollouts_per_rollout_step=rollouts,
        rollouts_per_optimizer_step=per_step,
        optimizer_steps_per_rollout_step=steps_each,
        rollout_steps=rollout_steps,
        first_rollout_step=first_rollout_step,
        optimizer_steps=0,
        response_tokens_per_rollout_step=None if cap is None else rollouts * cap,
        evaluations=len(evaluation_steps(evaluation, first_rollout_step, rollout_steps)),
        critic_only_rollout_steps=critic_only_rollout_steps,
        critic_epochs=critic_epochs,
        carries=data.incomplete_step == "carry",
    )
    steps = plan.actor_steps(rollout_steps) - plan.actor_steps(min(first_rollout_step, rollout_steps))
    return dataclasses.replace(plan, optimizer_steps=steps)


def old_log_probs(algorithm: AlgorithmConfig, optimizer_steps_per_rollout_step: int) -> str:
    """Where the log-probs of the old policy come from, as a person reads it."""
    if algorithm.loss_type == "sft_loss":
        return "none: a policy that is taught has no older one"
    if algorithm.use_rollout_logprobs:
        return "the engine's"
    stale = "the engine's for rollouts of an older policy"
    if algorithm.use_decoupled_loss:
        stale = "likewise for rollouts of an older policy, weighed against the engine's"
    if algorithm.loss_type == "custom_loss":
        return f"computed anew before the first step, for your loss; {stale}"
    if optimizer_steps_per_rollout_step == 1:
        return f"the step's own, since it is the only one of its rollouts; {stale}"
    return f"the first step's own; computed anew before it for the later ones; {stale}"


def rollouts_per_optimizer_step(data: DataConfig) -> int:
    """``--global-batch-size``, or what ``--num-steps-per-rollout`` makes of it, or all rollouts."""
    rollouts = (data.rollout_batch_size or 0) * data.n_samples_per_prompt
    if data.global_batch_size is not None:
        return data.global_batch_size
    return math.ceil(rollouts / (data.num_steps_per_rollout or 1))


def evaluation_steps(evaluation: EvalConfig, first: int, last: int) -> list[int]:
    """Numbers of finished rollout steps at which an evaluation runs: before, on the interval, at the end."""
    if not (evaluation.eval_prompt_data or evaluation.eval_config):
        return []
    every = evaluation.eval_interval
    steps = {done for done in range(first + 1, last + 1) if every and done % every == 0}
    steps |= {last} if last > first else set()
    steps |= set() if evaluation.skip_eval_before_train else {first}
    return sorted(steps)


def _rollout_steps(data: DataConfig, prompts_in_data: int | None) -> int:
    if data.num_rollout is not None:
        return data.num_rollout
    if data.num_epoch is None or prompts_in_data is None or not data.rollout_batch_size:
        return 0
    return math.ceil(prompts_in_data * data.num_epoch / data.rollout_batch_size)
