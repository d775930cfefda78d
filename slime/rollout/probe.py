"""A few short answers to prompts of the data, by which engine and trainer are compared before training.

Invariant: the data source gives the same prompts afterwards as if it had not been asked.
"""

from __future__ import annotations

import copy
from typing import Any

from slime.errors import DataError
from slime.rollout.convert import to_train_samples
from slime.rollout.loop import run_blocking
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.rollout.tasks import all_of
from slime.train.batch import TrainSample
from slime.utils.types import Sample

PROBES = 4
NEW_TOKENS = 16


def probe_samples(args: Any, data_source: Any) -> list[TrainSample]:
    """Sample `PROBES` short answers with the default generation; their reward is 0.0 and means nothing.

    Raises:
        DataError: the data source has no prompts to probe with.
        EngineError, DeadlineError: the engine does not answer as it should.
    """
    prompts = _prompts(data_source)
    params = GenerateState(args).sampling_params | {"max_new_tokens": NEW_TOKENS}
    samples = run_blocking(all_of(generate(args, prompt, dict(params)) for prompt in prompts))
    for sample in samples:
        sample.reward = 0.0
    return to_train_samples([[sample] for sample in samples], args)


def _prompts(data_source: Any) -> list[Sample]:
    """Copies of the first prompts of the data set, or of a data source's first groups, which go back."""
    dataset = getattr(data_source, "dataset", None)
    if dataset is not None:
        prompts = [dataset[position] for position in range(min(PROBES, len(dataset)))]
    else:
        groups = data_source.get_samples(PROBES)
        data_source.add_samples(groups)
        prompts = [group[0] for group in groups]
    prompts = [prompt for prompt in prompts if prompt.prompt]
    if not prompts:
        raise DataError(
            "no prompts to compare engine and trainer with",
            place="start-up check",
            remedy="--no-startup-check, where the rollout function makes its own prompts",
        )
    return [_numbered(copy.deepcopy(prompt), number) for number, prompt in enumerate(prompts)]


def _numbered(prompt: Sample, number: int) -> Sample:
    prompt.group_index = prompt.index = prompt.rollout_id = number
    return prompt
