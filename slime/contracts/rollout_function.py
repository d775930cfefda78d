"""Contracts of a rollout function and of an eval function: whole steps on the scripted engine.

The data source is watched, so that every group it gave is found again in the batch, or back in the source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from slime.config.args_view import ArgsView
from slime.contracts.data_source import prompt_file
from slime.contracts.finding import NotApplicableError, broken
from slime.contracts.group_hooks import HookCase
from slime.errors import SlimeError
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.convert import to_train_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.groups import flatten, rollouts_of
from slime.serving.scripted import ScriptedAnswer
from slime.utils.types import Sample

DEST = "rollout_function_path"
EVAL_DEST = "eval_function_path"
REWARD = "slime.contracts.rollout_function.length_reward"
_DATA_SET = "check"
_FILTERS = (
    "buffer_filter_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
)
"""Hooks with contracts of their own, which could leave a step without a group."""
_BOOKS = ("rollout/accounting/filtered", "rollout/accounting/failed")
_OF_THE_SCHEDULER = ("rollout/accounting/", "rollout/dynamic_filter/", "rollout/retried/")
_VOID = (Sample.Status.FAILED, Sample.Status.ABORTED)


async def length_reward(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """Where the user names no reward: the length of the response, under --reward-key if that is set."""
    reward = float(sample.response_length)
    return {args.reward_key: reward} if args.reward_key else reward


class WatchedSource(RolloutDataSourceWithBuffer):
    """The shipped data source, which remembers what it gave.

    Attributes:
        given: prompts of the groups that are out.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.given: dict[int | None, str] = {}

    def get_samples(self, num_samples: int) -> list[Any]:
        """The next groups."""
        groups = super().get_samples(num_samples)
        self.given |= {_index(group): str(next(flatten(group)).prompt) for group in groups}
        return groups

    def add_samples(self, samples: list[Any]) -> None:
        """Groups that come back."""
        super().add_samples(samples)
        for group in samples:
            self.given.pop(_index(group), None)


@dataclass(frozen=True)
class FunctionCase(HookCase):
    """A rollout function, or with `EVAL_DEST` an eval function."""

    @functools.cached_property
    def args(self) -> ArgsView:
        """With a reward, prompts and an evaluation data set where the user names none."""
        args = self.stage.args
        values: dict[str, Any] = dict.fromkeys(_FILTERS)
        if not args.prompt_data:
            values |= {"prompt_data": str(prompt_file(self.stage.folder)), "label_key": "label"}
        if not (args.custom_rm_path or args.rm_type):
            values["custom_rm_path"] = REWARD
        if not (args.eval_prompt_data or args.eval_config):
            data = values.get("prompt_data", args.prompt_data)
            values["eval_prompt_data"] = [_DATA_SET, data]
        return args.with_values(**values)

    @functools.cached_property
    def source(self) -> WatchedSource:
        """The data source of all steps."""
        return WatchedSource(self.args)

    @functools.cached_property
    def step(self) -> RolloutFnTrainOutput:
        """The first step."""
        return self.ask(0)

    def ask(self, number: int) -> RolloutFnTrainOutput:
        """A step; under the stage's deadline, in a thread of its own as in a run."""
        function, args, source = self.callable_hook, self.args, self.source
        output: RolloutFnTrainOutput = self.call(
            lambda: call_rollout_fn(function, args, number, source, evaluation=False)
        )
        return output

    def evaluate(self) -> RolloutFnEvalOutput:
        """An evaluation."""
        function, args, source = self.callable_hook, self.args, self.source
        output: RolloutFnEvalOutput = self.call(
            lambda: call_rollout_fn(function, args, 0, source, evaluation=True)
        )
        return output


def takes_the_call(case: FunctionCase) -> None:
    """The path loads, and the function takes (args, rollout_id, data_source, evaluation=...)."""
    _ = case.hook


def gives_a_batch(case: FunctionCase) -> str:
    """It gives a RolloutFnTrainOutput, or a bare list, of --rollout-batch-size groups."""
    groups = case.step.samples
    if len(groups) != case.args.rollout_batch_size:
        raise broken(
            f"{case.args.rollout_batch_size} groups (--rollout-batch-size)",
            f"{len(groups)}",
            "return a list of groups, each a list of Samples or of siblings",
        )
    return f"{len(groups)} groups, {sum(1 for _ in flatten(groups))} samples"


def gives_rows_that_train(case: FunctionCase) -> str:
    """Every sample can train, with reward, mask and log-probs, or says that it failed."""
    rows = to_train_samples(_of_step(case).samples, case.args)
    voting = [row for row in rows if row.votes]
    if not voting:
        raise broken("samples that train", "failures only", "see metadata['failure'] of the samples")
    bare = [row for row in voting if row.rollout_log_probs is None and any(row.loss_mask)]
    if bare:
        raise broken("rollout_log_probs on trained rows", f"{len(bare)} rows without", "keep the engine's")
    return f"{len(voting)} of {len(rows)} rows train"


def gives_whole_groups(case: FunctionCase) -> None:
    """A group has --n-samples-per-prompt rollouts and one group_index; no rollout_id is in two groups."""
    seen: dict[int | None, int | None] = {}
    for group in _of_step(case).samples:
        rollouts = rollouts_of(group)
        if len(rollouts) != case.args.n_samples_per_prompt:
            found = f"{len(rollouts)} in group {_index(group)}"
            raise broken(
                f"{case.args.n_samples_per_prompt} rollouts a group", found, "keep failed ones in it"
            )
        for sample in flatten(group):
            if sample.group_index != _index(group) or seen.setdefault(
                sample.rollout_id, _index(group)
            ) != _index(group):
                raise broken(
                    "ids as the source gave them",
                    f"group {sample.group_index}, rollout {sample.rollout_id}",
                    "leave the ids alone",
                )


def loses_no_group(case: FunctionCase) -> str:
    """Every group that it took is in a batch, or back in the data source, or counted as dropped in the
    metrics (law 5)."""
    steps = (_of_step(case), case.ask(1))
    case.stage.end_rollouts()
    trained = {_index(group) for step in steps for group in step.samples}
    lost = [number for number in case.source.given if number not in trained]
    size = case.args.n_samples_per_prompt
    told = sum(_dropped_rollouts(step, size) for step in steps)
    if len(lost) * size > told:
        raise broken(
            "each group in the batch or back in the source",
            f"that groups {lost} are gone, and {told:g} rollouts counted as dropped",
            "give data_source.add_samples what it does not return",
        )
    return f"{len(case.source.given)} groups, {len(trained)} trained"


def fails_with_the_engine(case: FunctionCase) -> str:
    """When the engine is broken, it raises, or its samples are FAILED or ABORTED and have no reward (law
    4)."""
    _of_step(case)
    with case.stage.playing(lambda call: ScriptedAnswer(error=(500, "the engine is broken"))):
        try:
            output = case.ask(2)
        except SlimeError as error:
            return f"raised {type(error).__name__}"
    good = [s for s in flatten(output.samples) if s.status not in _VOID or s.reward is not None]
    if good and case.stage.served:
        raise broken("no sample that counts", f"{len(good)} that do", "set status FAILED, and no reward")
    return "all samples failed"


def evaluates(case: FunctionCase) -> str:
    """With evaluation=True it gives a RolloutFnEvalOutput or a dict: for each data set rewards, truncated and
    samples, with one reward a rollout."""
    output = case.evaluate()
    for name, entry in output.data.items():
        missing = sorted({"rewards", "truncated", "samples"} - set(entry))
        if missing:
            raise broken("rewards, truncated and samples", f"no {', '.join(missing)} in {name}", "add them")
        rollouts = len(rollouts_of(entry["samples"]))
        if not len(entry["rewards"]) == len(entry["truncated"]) == rollouts:
            found = (
                f"{len(entry['rewards'])} rewards, {len(entry['truncated'])} truncated, {rollouts} rollouts"
            )
            raise broken(f"one of each a rollout in {name}", found, "count rollouts, not samples")
    if not output.data:
        raise broken("an entry a data set", "none", "evaluate on args.eval_prompt_data")
    return ", ".join(f"{name}: {len(entry['rewards'])} rewards" for name, entry in output.data.items())


CONTRACTS: tuple[Callable[[FunctionCase], str | None], ...] = (
    takes_the_call,
    gives_a_batch,
    gives_rows_that_train,
    gives_whole_groups,
    loses_no_group,
    fails_with_the_engine,
)
EVAL_CONTRACTS: tuple[Callable[[FunctionCase], str | None], ...] = (takes_the_call, evaluates)


def _of_step(case: FunctionCase) -> RolloutFnTrainOutput:
    """The first step; nothing more than `gives_a_batch` says where it fails."""
    try:
        return case.step
    except SlimeError as error:
        raise NotApplicableError("there is no batch") from error


def _dropped_rollouts(step: RolloutFnTrainOutput, group_size: int) -> float:
    """How many rollouts the metrics count as filtered or failed, beside those in the batch.

    Books in rollouts (``rollout/accounting/``) say all that slime's scheduler dropped; any other metric with
    "drop" or "failed" in its name counts groups.
    """
    metrics = step.metrics or {}
    books = [float(metrics[name]) for name in _BOOKS if name in metrics]
    in_batch = sum(siblings[0].status in _VOID for group in step.samples for siblings in rollouts_of(group))
    kept_apart = _OF_THE_SCHEDULER if books else ()
    groups = sum(
        float(value)
        for name, value in metrics.items()
        if ("drop" in name or "failed" in name)
        and not name.startswith(kept_apart)
        and isinstance(value, Real)
    )
    return max(sum(books) - in_batch, 0.0) + group_size * groups


def _index(group: Any) -> int | None:
    return next(flatten(group)).group_index
