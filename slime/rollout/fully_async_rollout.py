"""The fully asynchronous rollout function: rollouts go on over steps, weight updates and training.

The scheduler, runner, hooks and accounting are those of `sglang_rollout`; only the policy differs. Invariant:
a batch holds no token older than ``--max-staleness`` updates, and nothing is dropped to keep it so.
"""

from __future__ import annotations

import math
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import check_can_take_back
from slime.rollout.group_source import Source
from slime.rollout.hooks import check_hooks
from slime.rollout.loop import run_blocking
from slime.rollout.policy import FullyAsynchronous
from slime.rollout.session import SESSION
from slime.rollout.sglang_rollout import eval_rollout, limits_of, make_scheduler, output_of
from slime.rollout.state import GenerateState, slots_of

MAX_STALENESS = 2
"""The bound where ``--max-staleness`` sets none."""
LATE_PERCENTILE = 0.98
"""What is late, where ``--late-percentile`` does not say."""


def generate_rollout_fully_async(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The next `rollout_batch_size` groups, of those that finish first and of all that are due.

    Rollouts stay in flight when it returns; `slime.rollout.session.SESSION.close` ends them.

    Args:
        rollout_id: number of the step; steps count up by one.

    Raises:
        As `slime.rollout.sglang_rollout.generate_rollout`.
    """
    if evaluation:
        return run_blocking(eval_rollout(args, rollout_id))
    return run_blocking(_collect(args, rollout_id, data_source))


async def _collect(args: Any, step: int, source: Source) -> RolloutFnTrainOutput:
    state = GenerateState(args)
    state.reset()
    scheduler = SESSION.standing(source)
    if scheduler is None:
        check_hooks(args)
        check_can_take_back(source)
        await _learn_version(state)
        limits = limits_of(args, MAX_STALENESS, LATE_PERCENTILE)
        most = getattr(args, "over_sampling_batch_size", None) or math.ceil(
            slots_of(args) / limits.group_size
        )
        policy = FullyAsynchronous(int(most), waits=getattr(args, "update_in_flight", None) == "wait")
        scheduler = make_scheduler(args, source, state, policy, limits)
        await SESSION.keep_open(scheduler, source)
    batch = await scheduler.collect(step)
    return output_of(batch, state)


async def _learn_version(state: GenerateState) -> None:
    """Ask the engine for its policy version, where nobody has told it."""
    if SESSION.version is None:
        told = str((await state.engine.model_info()).get("weight_version"))
        await SESSION.weights_changed(int(told) if told.isdecimal() else 0)
