"""A few short answers to prompts of the data, by which engine and trainer are compared before training.

Invariant: the data source gives the same prompts afterwards as if it had not been asked; a prompt that cannot
be answered is passed over, since the run itself would only lose that one rollout.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

from slime.errors import DataError, DeadlineError, EngineError, EngineUnavailableError, ModelError
from slime.rollout.convert import to_train_samples
from slime.rollout.loop import run_blocking
from slime.rollout.outcome import Failed, Rollout
from slime.rollout.runner import Call, RolloutRunner
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.rollout.tasks import all_of
from slime.train.batch import TrainSample
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
PROBES = 4
LOOKED_AT = 32
"""Prompts that are tried at most."""
NEW_TOKENS = 16
PLACE = "start-up check"
_HOPELESS = (EngineUnavailableError, DeadlineError, ModelError)
"""Errors that another prompt cannot help."""


def probe_samples(args: Any, data_source: Any) -> list[TrainSample]:
    """Sample `PROBES` short answers with the default generation; their reward is 0.0 and means nothing.

    Raises:
        DataError: the data source has no prompts to probe with, or none of them can be answered.
        EngineError, DeadlineError: the engine does not answer as it should.
    """
    answered = run_blocking(_answered(args, _prompts(data_source)))
    names = ("hf_checkpoint", "use_rollout_routing_replay")
    settings = SimpleNamespace(**{name: getattr(args, name, None) for name in names})
    return to_train_samples([[sample] for sample in answered], settings)


async def _answered(args: Any, prompts: list[Sample]) -> list[Sample]:
    state = GenerateState(args)
    call = Call(step=None, sampling_params=state.sampling_params | {"max_new_tokens": NEW_TOKENS})
    settings = SimpleNamespace(
        rollout_timeout=getattr(args, "rollout_timeout", None),
        hf_checkpoint=getattr(args, "hf_checkpoint", None),
        update_weight_transport=getattr(args, "update_weight_transport", None),
        rollout_engine=getattr(args, "rollout_engine", None),
    )

    async def default(_: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        return await generate(args, sample, sampling_params)

    runner = RolloutRunner(settings, generate=default, slots=state.semaphore)
    good: list[Sample] = []
    bad: list[Rollout] = []
    waiting = list(prompts)
    while waiting and len(good) < PROBES:
        now, waiting = waiting[: PROBES - len(good)], waiting[PROBES - len(good) :]
        for rollout in await all_of(runner.run(prompt, call) for prompt in now):
            if rollout.valid and rollout.response_length:
                good.append(rollout.samples[0])
            else:
                bad.append(_passed_over(rollout))
    if not good:
        raise _none_answered(bad)
    return good


def _passed_over(rollout: Rollout) -> Rollout:
    """Log why a prompt gives no probe; raise what no other prompt would help."""
    if isinstance(rollout.error, _HOPELESS):
        raise rollout.error
    logger.warning("%s: prompt %s is passed over: %s", PLACE, rollout.rollout_id, _reason(rollout))
    return rollout


def _none_answered(bad: list[Rollout]) -> DataError | EngineError:
    kind = EngineError if isinstance(bad[0].error, EngineError) else DataError
    return kind(
        f"none of the first {len(bad)} prompts could be answered; the first: {_reason(bad[0])}", place=PLACE
    )


def _reason(rollout: Rollout) -> str:
    if isinstance(rollout.outcome, Failed):
        return rollout.outcome.detail
    return "the engine gave no token" if rollout.valid else "the engine aborted it"


def _prompts(data_source: Any) -> list[Sample]:
    """Copies of the first prompts of the data set, or of a data source's first groups, which go back."""
    dataset = getattr(data_source, "dataset", None)
    if dataset is not None:
        prompts = [dataset[position] for position in range(min(LOOKED_AT, len(dataset)))]
    else:
        groups = data_source.get_samples(LOOKED_AT)
        data_source.add_samples(groups)
        prompts = [group[0] for group in groups]
    prompts = [prompt for prompt in prompts if prompt.prompt]
    if not prompts:
        raise DataError(
            "no prompts to compare engine and trainer with",
            place=PLACE,
            remedy="--no-startup-check, where the rollout function makes its own prompts",
        )
    return [_probe(copy.deepcopy(prompt), number) for number, prompt in enumerate(prompts)]


def _probe(prompt: Sample, number: int) -> Sample:
    """Only for the default generation: no hook of its own, and a reward already."""
    prompt.group_index = prompt.index = prompt.rollout_id = number
    prompt.generate_function_path, prompt.reward = None, 0.0
    return prompt
