import asyncio
import types

import pytest

from slime.errors import EngineUnavailableError, HookError
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.hooks import call_generate, check_hooks, check_signature, load_hook
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.types import Sample
from tests.rollout import hooks_for_tests as hooks

HERE = "tests.rollout.hooks_for_tests."


def call(function, evaluation=True):
    return asyncio.run(call_generate(function, None, Sample(index=3), {}, evaluation))


def test_evaluation_is_passed_only_to_a_signature_that_names_it():
    assert call(hooks.generate).response == "generated"
    assert call(hooks.generate_with_evaluation)[0].metadata == {"evaluation": True}
    assert call(hooks.generate_with_kwargs).metadata == {"kwargs": {}}


@pytest.mark.parametrize(
    "function, message",
    [
        (hooks.generate_sync, "not async: it returned Sample"),
        (hooks.generate_text, "returned 'text', expected a Sample or a non-empty list"),
        (hooks.generate_nothing, "non-empty list"),
        (hooks.generate_error, "raised ZeroDivisionError: by zero"),
    ],
)
def test_generate_hook_that_breaks_its_contract_is_named_with_its_flag(function, message):
    with pytest.raises(HookError, match=message) as caught:
        call(function)
    assert f"{HERE}{function.__name__}" in str(caught.value)
    assert caught.value.place == "--custom-generate-function-path"


def test_errors_of_the_engine_pass_through_a_hook_unchanged():
    async def dies(args, sample, sampling_params):
        raise EngineUnavailableError("gone")

    with pytest.raises(EngineUnavailableError):
        call(dies)


@pytest.mark.parametrize(
    "dest, path, messages",
    [
        ("custom_rm_path", "no_such_module.f", ["--custom-rm-path", "no_such_module"]),
        ("custom_rm_path", HERE + "absent", ["--custom-rm-path", "absent"]),
        ("custom_rm_path", HERE + "NOT_A_FUNCTION", ["--custom-rm-path", "type int, not callable"]),
        (
            "custom_generate_function_path",
            HERE + "two_arguments",
            ["--custom-generate-function-path", "(args, sample, sampling_params[", "(args, sample)"],
        ),
        ("data_source_path", HERE + "NoSource", ["--data-source-path", "add_samples, save, load, __len__"]),
        ("data_source_path", HERE + "two_arguments", ["--data-source-path"]),
        ("rollout_function_path", HERE + "two_arguments", ["evaluation=..."]),
        ("rollout_sample_hook_path", [HERE + "replace", HERE + "generate"], ["--rollout-sample-hook-path"]),
    ],
)
def test_wrong_hook_is_found_at_start_with_flag_path_and_signatures(dest, path, messages):
    with pytest.raises(HookError) as caught:
        check_hooks(types.SimpleNamespace(**{dest: path}))
    assert all(message in str(caught.value) for message in messages)


def test_right_hooks_pass():
    check_hooks(
        types.SimpleNamespace(
            custom_generate_function_path=HERE + "generate_with_evaluation",
            custom_rm_path=HERE + "reward_half",
            rollout_sample_hook_path=[HERE + "mark_async", HERE + "mark_sync"],
            buffer_filter_path=HERE + "take_last",
            data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer",
        )
    )
    assert load_hook(HERE + "generate", "custom_generate_function_path") is hooks.generate


def test_extra_arguments_with_defaults_are_no_error():
    def function(args, sample, *, strict=False):
        pass

    check_signature(function, "m.function", ("args", "sample"), "--custom-rm-path")
    with pytest.raises(HookError, match="strict"):
        check_signature(lambda args, *, strict: None, "m.f", ("args",), "--x")


def apply(samples, *names):
    args = types.SimpleNamespace(rollout_sample_hook_path=[HERE + name for name in names])
    return asyncio.run(apply_rollout_sample_hooks(args, samples, rollout_id=4, evaluation=True))


def test_sample_hooks_run_in_order_and_see_only_what_they_name():
    sample = apply(Sample(), "mark_sync", "mark_async", "replace", "mark_sync")
    assert sample.response == "replaced"
    assert sample.metadata == {"seen": [("sync", 4)]}
    assert apply(Sample(), "mark_sync", "mark_async").metadata["seen"] == [("sync", 4), ("async", 4, True)]


def test_sample_hooks_see_every_leaf_and_keep_the_nesting():
    result = apply([Sample(index=0), [Sample(index=1), Sample(index=2)]], "replace")
    assert [result[0].index, [s.index for s in result[1]]] == [0, [1, 2]]
    assert result[1][1].response == "replaced"


def test_sample_hook_that_returns_another_type_is_a_type_error():
    with pytest.raises(TypeError, match="expected Sample or None"):
        apply(Sample(), "wrong_type")


def test_sample_hook_that_raises_is_named():
    with pytest.raises(HookError, match="--rollout-sample-hook-path: .*reward_raises raised KeyError"):
        apply(Sample(), "reward_raises")


def test_no_sample_hooks_keep_the_sample():
    sample = Sample()
    assert asyncio.run(apply_rollout_sample_hooks(object(), sample)) is sample


def test_bare_results_of_rollout_functions_are_wrapped():
    groups = [[Sample()]]
    assert call_rollout_fn(lambda n, evaluation: groups, 1, evaluation=False).samples is groups
    assert call_rollout_fn(lambda n, evaluation: {"a": {}}, 1, evaluation=True).data == {"a": {}}
    for output in (RolloutFnTrainOutput(groups), RolloutFnEvalOutput({})):
        evaluation = isinstance(output, RolloutFnEvalOutput)
        assert call_rollout_fn(lambda o, evaluation: o, output, evaluation=evaluation) is output


@pytest.mark.parametrize("evaluation", [True, False])
def test_other_results_of_rollout_functions_are_refused(evaluation):
    with pytest.raises(HookError, match="returned NoneType, expected Rollout"):
        call_rollout_fn(lambda evaluation: None, evaluation=evaluation)
