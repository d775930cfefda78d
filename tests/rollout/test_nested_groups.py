"""In real steps, hooks that see groups get them as the reference has them: flat, or nested for fan-out."""

import copy

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub import DynamicFilterOutput
from slime.rollout.groups import flatten
from slime.rollout.loop import run_blocking
from slime.rollout.sglang_rollout import GenerateState, eval_rollout, generate, generate_rollout
from slime.utils.types import Sample
from tests.rollout.kit import HOOKS, ListSource, engine_args, scripted, state_for

HERE = "tests.rollout.test_nested_groups."
SEEN = {}
FORMS = [("default_generate", 1), ("fans_out", 2)]


@pytest.fixture(autouse=True)
def forget():
    SEEN.clear()
    yield
    GenerateState.clear_instance()


def note(name, groups):
    SEEN.setdefault(name, []).append([[form(member) for member in group] for group in groups])


def form(member):
    return len(member) if isinstance(member, list) else "sample"


def dynamic_filter(args, group, **kwargs):
    note("filter", [group])
    drops = next(flatten(group)).group_index == 0
    return DynamicFilterOutput(keep=not drops, reason="first")


def sample_filter(args, groups):
    note("sample filter", groups)
    for sample in flatten(groups[0]):
        sample.remove_sample = True


def all_samples(args, groups, data_source):
    note("all samples", groups)


def sample_hook(args, sample, *, rollout_id, evaluation):
    assert isinstance(sample, Sample) and sample.reward is None
    sample.metadata["hooked"] = (rollout_id, evaluation)


async def group_reward(args, samples, **kwargs):
    SEEN.setdefault("group reward", []).append([type(sample) for sample in samples])
    return [1.0] * len(samples)


async def own_reward(args, sample, **kwargs):
    assert isinstance(sample, Sample)
    return 7.0


def newest_first(args, rollout_id, buffer, num_samples):
    note("buffer", buffer)
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def step(server, source, number=0, **values):
    args = engine_args(server.url, n_samples_per_prompt=2, **values)
    state_for(args)
    return generate_rollout(args, number, source)


@pytest.mark.parametrize(("hook", "rows"), FORMS)
def test_filters_and_sample_hooks_see_the_form_that_the_generate_hook_gives(hook, rows):
    members = ["sample" if rows == 1 else rows] * 2
    with scripted() as server:
        output = step(
            server,
            ListSource(),
            custom_generate_function_path=HOOKS + hook,
            dynamic_sampling_filter_path=HERE + "dynamic_filter",
            rollout_sample_filter_path=HERE + "sample_filter",
            rollout_all_samples_process_path=HERE + "all_samples",
            rollout_sample_hook_path=[HERE + "sample_hook"],
        )
    assert SEEN["filter"] == [[members]] * 3
    assert SEEN["sample filter"] == [[members] * 2]
    assert SEEN["all samples"] == [[members] * 3]
    samples = list(flatten(output.samples))
    assert len(samples) == 4 * rows
    assert {sample.metadata["hooked"] for sample in samples} == {(0, False)}
    assert {sample.remove_sample for sample in flatten(output.samples[0])} == {True}
    assert output.metrics["rollout/dynamic_filter/drop_first"] == 1


@pytest.mark.parametrize(("hook", "rows"), FORMS)
def test_a_group_reward_gets_flat_samples_and_own_rewards_win(hook, rows):
    def prepare(sample):
        sample.custom_rm_path = HERE + "own_reward" if sample.index % 2 else None

    with scripted() as server:
        output = step(
            server,
            ListSource(prepare=prepare),
            custom_generate_function_path=HERE + "keeps_own" if rows == 1 else HERE + "keeps_own_twice",
            custom_rm_path=HERE + "group_reward",
            group_rm=True,
        )
    assert SEEN["group reward"] == [[Sample] * rows] * 2
    for group in output.samples:
        assert [[s.reward for s in flatten(member)] for member in group] == [[1.0] * rows, [7.0] * rows]


async def keeps_own(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)


async def keeps_own_twice(args, sample, sampling_params):
    sample = await keeps_own(args, sample, sampling_params)
    sibling = copy.deepcopy(sample)
    sibling.loss_mask = [0] * sibling.response_length
    return [sample, sibling]


@pytest.mark.parametrize(("hook", "rows"), FORMS)
def test_buffer_filters_choose_among_groups_of_both_forms(hook, rows, tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"input": "p{number}"}}\n' for number in range(50)))
    values = {
        "prompt_data": str(data),
        "over_sampling_batch_size": 6,
        "custom_generate_function_path": HOOKS + hook,
        "buffer_filter_path": HERE + "newest_first",
    }
    with scripted() as server:
        args = engine_args(server.url, **values)
        source = RolloutDataSourceWithBuffer(args)
        trained = []
        for number in range(4):
            output = step(server, source, number, **values)
            trained += [next(flatten(group)).group_index for group in output.samples]
    assert len(trained) == len(set(trained)) == 8
    finished = "sample" if rows == 1 else rows
    assert any(finished in group for call in SEEN["buffer"] for group in call)


@pytest.mark.parametrize(("hook", "rows"), FORMS)
def test_evaluations_count_rollouts_in_both_forms(hook, rows, tmp_path):
    data = tmp_path / "held_out.jsonl"
    data.write_text('{"input": "q"}\n' * 3)
    with scripted() as server:
        args = engine_args(
            server.url,
            eval_prompt_data=["held_out", str(data)],
            n_samples_per_eval_prompt=2,
            custom_generate_function_path=HOOKS + hook,
            rollout_sample_hook_path=[HERE + "sample_hook"],
        )
        state_for(args)
        entry = run_blocking(eval_rollout(args, 3)).data["held_out"]
    assert len(entry["rewards"]) == len(entry["truncated"]) == 6
    assert len(entry["samples"]) == 6 * rows
    assert {sample.metadata["hooked"] for sample in entry["samples"]} == {(3, True)}
