"""Contracts of the hooks that see finished samples and groups: filters, sample hooks, rewards of a step,
logs.

Each is tried with flat groups and with nested ones, in which rollouts fan out, through the code that calls it
in a run. Knows nothing of engines.
"""

from __future__ import annotations

import copy
import inspect
import math
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from slime.contracts.finding import NotApplicableError, broken
from slime.contracts.material import FORMS, failed, group, groups, shape, snapshot
from slime.contracts.stage import Stage
from slime.errors import HookError, SlimeError
from slime.rollout.boundary import check_trainable, checked_siblings
from slime.rollout.buffer_filter import take_from_buffer
from slime.rollout.convert import to_train_samples
from slime.rollout.filter_hub import (
    DynamicFilterOutput,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.groups import flatten
from slime.rollout.hooks import Hook, load_hook
from slime.rollout.log_hooks import has_logged
from slime.rollout.reward_shaping import shaped_rewards
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.tasks import bounded, in_thread
from slime.train.batch import TrainSample
from slime.train.rewards import total_reward

_BOTH_FORMS = (
    "a group is a list of Samples, or of lists of siblings where rollouts fan out; "
    "slime.rollout.groups.flatten and rollouts_of read both"
)
_MUTATES = "set remove_sample or metadata; tokens, masks and ids are what was sampled"


@dataclass(frozen=True)
class HookCase:
    """A hook of this kind on a stage."""

    stage: Stage
    dest: str
    path: str

    @property
    def hook(self) -> Hook:
        """The function, its signature checked."""
        return load_hook(self.path, self.dest)

    @property
    def callable_hook(self) -> Hook:
        """The same for contracts that need a hook that loads.

        Raises:
            NotApplicableError: it does not.
        """
        try:
            return self.hook
        except HookError as error:
            raise NotApplicableError("the hook cannot be called") from error

    @property
    def key(self) -> str | None:
        """``--reward-key``."""
        key: str | None = self.stage.args.reward_key
        return key

    def call(self, function: Callable[..., Any], *values: Any) -> Any:
        """Call it in a thread and await what is to be awaited, under the stage's deadline.

        Raises:
            ContractError: it raised something that is no error of slime's.
        """
        try:
            return self.run(_called(function, values))
        except SlimeError:
            raise
        except Exception as error:  # boundary: user code
            last = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} at {last.filename}:{last.lineno}"
            raise broken("an answer", found, _BOTH_FORMS) from error

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The value of `work` under the stage's deadline."""
        seconds = self.stage.seconds
        return self.stage.run(bounded(work, seconds=seconds, what="the hook", place=self.path), seconds)


async def _called(function: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    value = await in_thread(function, *values)
    return await value if inspect.isawaitable(value) else value


def takes_the_call(case: HookCase) -> None:
    """The path loads, and the signature takes slime's call."""
    _ = case.hook


def judges_flat_and_nested_groups(case: HookCase) -> str:
    """It gives a bool or a DynamicFilterOutput for a group of samples and for one whose rollouts are lists,
    with equal rewards and with different ones."""
    hook, kept = case.callable_hook, 0
    for form in FORMS:
        for rewards in ((1.0, 0.0, 1.0, 0.5), (1.0, 1.0), (0.0,)):
            output = _verdict(case, hook, group(form, rewards=rewards, key=case.key))
            kept += not should_drop_dynamic_filter_output(output, 9, 1)
    return f"keeps {kept} of 6 groups"


def judges_by_rollout(case: HookCase) -> None:
    """How rollouts are cut into samples does not change the verdict: siblings share one vote (law 3)."""
    hook = case.callable_hook
    for rewards in ((1.0, 0.0, 1.0, 0.5), (1.0, 1.0)):
        flat, nested = (_verdict(case, hook, group(form, rewards=rewards, key=case.key)) for form in FORMS)
        if flat.keep != nested.keep:
            raise broken(
                "one verdict for the same rollouts, flat or with siblings",
                f"keep={flat.keep} and keep={nested.keep} for rewards {rewards}",
                "count rollouts, by rollout_id (slime.rollout.groups.rollouts_of), not samples",
            )


def leaves_groups_alone(case: HookCase) -> None:
    """It changes neither the groups that it judges nor the samples in them."""
    for form in FORMS:
        made = group(form, key=case.key)
        with _unchanged([made], "the group as it was"):
            _verdict(case, case.callable_hook, made)


def takes_out_of_the_buffer(case: HookCase) -> str:
    """It gives a list of at most num_samples groups of the buffer, and removes just those from it: nothing
    comes twice, and nothing is lost (law 5)."""
    hook = case.callable_hook
    for form in FORMS:
        buffer = groups(form, 5, case.key)
        before = list(buffer)
        for wanted in (0, 2, 9):
            taken = case.call(take_from_buffer, hook, case.stage.args, buffer, wanted)
            before = [item for item in before if not any(item is other for other in taken)]
            if len(before) != len(buffer):
                raise broken(
                    "each group given out, or left in the buffer",
                    f"{len(before) - len(buffer)} that are neither",
                    "leave in the buffer what is not given out; --dynamic-sampling-filter-path drops groups",
                )
    return "flat and nested groups"


def gives_a_sample_or_none(case: HookCase) -> str:
    """For each sample it gives a Sample, or None to keep it: of a single rollout and of siblings alike."""
    _ = case.callable_hook
    args, hooked = case.stage.args.with_values(rollout_sample_hook_path=[case.path]), 0
    for form in FORMS:
        for member in group(form, key=case.key):
            for sample in flatten(member):
                sample.reward = None
            for evaluation in (False, True):
                work = apply_rollout_sample_hooks(args, member, rollout_id=3, evaluation=evaluation)
                result = case.run(work)
                base = next(flatten(member))
                for sample in checked_siblings(result, base, case.path):
                    check_trainable(sample, case.path)
                    hooked += 1
    return f"{hooked} samples"


def marks_samples_only(case: HookCase) -> str:
    """It takes flat and nested groups and returns None; it marks samples (remove_sample), and adds or removes
    none."""
    marked = 0
    for form in FORMS:
        made = groups(form, 3, case.key)
        with _unchanged(made, "the groups as they were, samples marked"):
            result = case.call(case.callable_hook, case.stage.args, made)
        if result is not None:
            raise broken(
                "None", f"{type(result).__name__}, which nobody reads", "set sample.remove_sample = True"
            )
        marked += sum(sample.remove_sample for sample in flatten(made))
    return f"{marked} samples marked"


def sees_all_groups(case: HookCase) -> None:
    """It takes flat and nested groups, with failed rollouts among them, and the data source, and returns."""
    for form in FORMS:
        made = [*groups(form, 2, case.key), [failed(2, 90), failed(2, 91)]]
        with _unchanged(made, "groups as they were"):
            case.call(case.callable_hook, case.stage.args, made, _Source())


def shapes_rewards(case: HookCase) -> str:
    """It gives (raw_rewards, rewards), one finite number of each for every sample, in order."""
    args = case.stage.args.with_values(custom_reward_post_process_path=case.path)
    _ = case.callable_hook
    for form in FORMS:
        samples = list(flatten(groups(form, 3, case.key)))
        with _unchanged([samples], "the samples as they were"):
            case.call(shaped_rewards, samples, args)
    return "of flat and nested groups"


def converts_samples(case: HookCase) -> str:
    """It gives a dict of lists with one entry a row: rows that can train, at least one for every rollout."""
    rows = 0
    for form in FORMS:
        made = groups(form, 3, case.key)
        with _unchanged(made, "the samples as they were"):
            rows += len(_converted(case, made))
    return f"{rows} rows of flat and nested groups"


def converts_by_rollout(case: HookCase) -> None:
    """How rollouts are cut into samples does not change what they are rewarded with (law 3)."""
    flat, nested = (
        {row.rollout_id: row for row in _converted(case, groups(form, 3, case.key))} for form in FORMS
    )
    for rollout, row in flat.items():
        rewards = [total_reward(either.reward) for either in (row, nested[rollout])]
        if not isinstance(row.reward, float) or math.isclose(*rewards, rel_tol=1e-6, abs_tol=1e-9):
            continue
        raise broken(
            "one reward for the same rollout, as one sample or as siblings",
            f"{rewards[0]:g} and {rewards[1]:g} for rollout {rollout}",
            "make rewards of rollouts, by rollout_id (slime.rollout.groups.rollouts_of), not of samples",
        )


def logs_rollouts(case: HookCase) -> str:
    """It takes the samples and metrics of a step, with failures among them, and gives True (it has logged
    them) or False (slime logs as well)."""
    answers = set()
    for form in FORMS:
        made = [*flatten(groups(form, 2, case.key)), failed(2, 90)]
        with _unchanged([made], "the samples as they were"):
            values = (0, case.stage.args, made, {"rollout/x": 1.0}, 1.5)
            answers.add(_logs(case, *values))
    return f"gives {' and '.join(map(str, answers))}"


def logs_evaluations(case: HookCase) -> str:
    """It takes {data set: {rewards, truncated, samples}}, one reward a rollout, and gives True or False."""
    answers = set()
    for form in FORMS:
        samples = list(flatten(groups(form, 2)))
        data = {"held_out": {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": samples}}
        answers.add(_logs(case, 0, case.stage.args, data, {"eval/x": 1.0}))
    return f"gives {' and '.join(map(str, answers))}"


CONTRACTS: dict[str, tuple[Callable[[HookCase], str | None], ...]] = {
    "dynamic_sampling_filter_path": (
        takes_the_call,
        judges_flat_and_nested_groups,
        judges_by_rollout,
        leaves_groups_alone,
    ),
    "buffer_filter_path": (takes_the_call, takes_out_of_the_buffer),
    "rollout_sample_hook_path": (takes_the_call, gives_a_sample_or_none),
    "rollout_sample_filter_path": (takes_the_call, marks_samples_only),
    "rollout_all_samples_process_path": (takes_the_call, sees_all_groups),
    "custom_reward_post_process_path": (takes_the_call, shapes_rewards),
    "custom_convert_samples_to_train_data_path": (takes_the_call, converts_samples, converts_by_rollout),
    "custom_rollout_log_function_path": (takes_the_call, logs_rollouts),
    "custom_eval_rollout_log_function_path": (takes_the_call, logs_evaluations),
}


class _Source:
    """The data source that a hook is shown."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.added: list[Any] = []

    def get_samples(self, num_samples: int) -> list[Any]:
        """No groups."""
        return []

    def add_samples(self, samples: list[Any]) -> None:
        """Take groups."""
        self.added.extend(samples)

    def __len__(self) -> int:
        return 0


class _unchanged:  # noqa: N801 - reads as a statement: with _unchanged(groups, ...)
    """What the body may not change."""

    def __init__(self, made: list[Any], expected: str) -> None:
        self._made, self._expected = made, expected
        self._samples = list(flatten(made))
        self._before = (shape(made), copy.deepcopy(snapshot(self._samples)))

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if shape(self._made) != self._before[0]:
            raise broken(self._expected, "samples added, removed or in another order", _MUTATES)
        if snapshot(self._samples) != self._before[1]:
            raise broken(self._expected, "other tokens, masks, log-probs or ids", _MUTATES)


def _verdict(case: HookCase, hook: Hook, made: Any) -> DynamicFilterOutput:
    output: DynamicFilterOutput = case.call(call_dynamic_filter, hook, case.stage.args, made)
    return output


def _converted(case: HookCase, made: list[Any]) -> list[TrainSample]:
    _ = case.callable_hook
    args = case.stage.args.with_values(custom_convert_samples_to_train_data_path=case.path)
    rows: list[TrainSample] = case.call(to_train_samples, made, args)
    return rows


def _logs(case: HookCase, *values: Any) -> bool:
    _ = case.callable_hook
    args = case.stage.args.with_values(**{case.dest: case.path})
    logged: bool = case.call(has_logged, args, case.dest, *values)
    return logged
