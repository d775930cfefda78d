"""Evaluation: every eval data set through the same runner as training, with its own sampling parameters.

Invariant: one entry a rollout in `rewards` and `truncated`, however many samples it has; a failed rollout is
counted and left out, never scored as 0.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from slime.errors import RolloutFailedError
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.failures import FailureBudget
from slime.rollout.hooks import load_hook
from slime.rollout.outcome import MemberGroup, Rollout, Truncated
from slime.rollout.rm_hub.validity import reward_key
from slime.rollout.runner import Call, RolloutRunner
from slime.rollout.tasks import all_of
from slime.utils.data import Dataset
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
MakeRunner = Callable[[int | None], RolloutRunner]
"""(most tokens of prompt and response, or None for the rollout's limit) -> runner."""
_datasets: dict[str, Dataset] = {}


async def evaluate(args: Any, step: int, make_runner: MakeRunner) -> RolloutFnEvalOutput:
    """Evaluate on all data sets at once.

    Raises:
        RolloutFailedError: no rollout of a data set succeeded.
        DataError, ConfigError: a data set that cannot be used.
    """
    configs = build_eval_dataset_configs(args)
    outputs = await all_of(_evaluate(args, step, config, make_runner) for config in configs)
    data = {config.name: entry for config, (entry, _) in zip(configs, outputs, strict=True)}
    metrics = {f"eval/{c.name}/failed": float(f) for c, (_, f) in zip(configs, outputs, strict=True)}
    return RolloutFnEvalOutput(data=data, metrics=metrics)


def check_eval_hooks(configs: Iterable[EvalDatasetConfig]) -> None:
    """Load the data sets' own hooks, so that a bad one is found before the first rollout.

    Raises:
        HookError: one does not import, or has the wrong signature.
    """
    for config in configs:
        for dest in ("custom_rm_path", "custom_generate_function_path"):
            path = getattr(config, dest)
            if path:
                load_hook(path, dest)


async def _evaluate(
    args: Any, step: int, config: EvalDatasetConfig, make_runner: MakeRunner
) -> tuple[dict[str, Any], int]:
    """The result of one data set, and how many rollouts failed."""
    runner = make_runner(config.max_context_len)
    call = eval_call(args, step, config)
    groups = eval_groups(eval_dataset(args, config), config)
    finished = await all_of(runner.run_group(group, call) for group in groups)
    rollouts = [rollout for group in finished for rollout in group]
    budget = FailureBudget(max_ratio=1.0, planned=len(rollouts), step=step)
    budget.record(rollouts)
    valid = [rollout for rollout in rollouts if rollout.valid]
    if not valid:
        raise RolloutFailedError(
            f"none of {len(rollouts)} rollouts succeeded{budget.summary()}", place=f"evaluation {config.name}"
        )
    if budget.failed:
        logger.warning(
            "evaluation %s: %d of %d rollouts failed and are left out%s",
            config.name,
            budget.failed,
            len(rollouts),
            budget.summary(),
        )
    return _entry(args, config, valid), budget.failed


def _entry(args: Any, config: EvalDatasetConfig, rollouts: list[Rollout]) -> dict[str, Any]:
    return {
        "rewards": [eval_reward(rollout, args) for rollout in rollouts],
        "truncated": [isinstance(rollout.outcome, Truncated) for rollout in rollouts],
        "rollout_ids": [rollout.rollout_id for rollout in rollouts],
        "samples": [sample for rollout in rollouts for sample in rollout.samples],
        "pass_threshold": config.pass_threshold,
    }


def eval_reward(rollout: Rollout, args: Any) -> float:
    """The reward of a valid rollout, under ``--eval-reward-key`` where that is set."""
    return rollout.reward(SimpleNamespace(reward_key=reward_key(args, evaluation=True)[1]))


def eval_call(args: Any, step: int | None, config: EvalDatasetConfig) -> Call:
    """What the rollouts of one data set have in common."""
    seed = getattr(args, "rollout_seed", None)
    return Call(step=step, sampling_params=eval_sampling_params(config), evaluation=True, seed=seed)


def eval_sampling_params(config: EvalDatasetConfig) -> dict[str, Any]:
    """Sampling parameters of one data set; what is unset is left to the engine."""
    params = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "min_new_tokens": config.min_new_tokens,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "repetition_penalty": config.repetition_penalty,
        "skip_special_tokens": config.skip_special_tokens,
        "no_stop_trim": True if config.no_stop_trim is None else config.no_stop_trim,
        "spaces_between_special_tokens": False,
    }
    return {name: value for name, value in params.items() if value is not None}


def eval_groups(dataset: Dataset, config: EvalDatasetConfig, limit: int | None = None) -> list[MemberGroup]:
    """`n_samples_per_eval_prompt` fresh samples a prompt, with ids and the data set's own hooks.

    Args:
        limit: only the first prompts.
    """
    count = config.n_samples_per_eval_prompt
    return [
        [_sample(dataset[prompt], config, prompt, prompt * count + repeat) for repeat in range(count)]
        for prompt in range(len(dataset) if limit is None else min(limit, len(dataset)))
    ]


def eval_dataset(args: Any, config: EvalDatasetConfig) -> Dataset:
    """The prompts of one data set; read once a process."""
    needs_tokenizer = config.apply_chat_template or config.max_prompt_len is not None
    model = getattr(args, "hf_checkpoint", None) if needs_tokenizer else None
    read = (config.path, model, config.max_prompt_len, config.apply_chat_template)
    keys = (config.input_key, config.label_key, config.tool_key, config.metadata_key)
    key = repr((read, keys, sorted(config.apply_chat_template_kwargs.items())))
    if key not in _datasets:
        _datasets[key] = Dataset(
            config.path,
            load_tokenizer(model) if needs_tokenizer else None,
            None,
            config.max_prompt_len,
            prompt_key=config.input_key,
            label_key=config.label_key,
            tool_key=config.tool_key,
            metadata_key=config.metadata_key,
            apply_chat_template=config.apply_chat_template,
            apply_chat_template_kwargs=config.apply_chat_template_kwargs,
        )
    return _datasets[key]


def _sample(prompt: Sample, config: EvalDatasetConfig, group_index: int, index: int) -> Sample:
    sample = copy.deepcopy(prompt)
    sample.group_index = group_index
    sample.index = sample.rollout_id = index
    sample.custom_rm_path = config.custom_rm_path
    sample.generate_function_path = config.custom_generate_function_path
    if config.rm_type:
        sample.metadata["rm_type"] = config.rm_type
    return sample
