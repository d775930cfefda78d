import json
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import ConfigError
from slime.rollout.curriculum import CurriculumDataSource
from slime.rollout.filter_hub.pass_rate import PassRates, check_pass_rate
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.serving.scripted import ScriptedAnswer
from tests.rollout.kit import engine_args, scripted, state_for

FILTER = "slime.rollout.filter_hub.pass_rate.check_pass_rate"


@pytest.fixture(autouse=True)
def fresh_rates():
    PassRates.clear_instance()
    yield
    PassRates.clear_instance()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curriculum")
    for name in ("a", "b"):
        rows = "".join(json.dumps({"input": f"{name}{n}"}) + "\n" for n in range(6))
        (folder / f"{name}.jsonl").write_text(rows)
    return folder


def args(folder, files=("a",), **values):
    defaults = {
        "prompt_data": [str(folder / f"{file}.jsonl") for file in files],
        "save": str(folder),
        "load": str(folder),
        "n_samples_per_prompt": 2,
        "dynamic_sampling_filter_path": FILTER,
        "rollout_shuffle": True,
        "curriculum_floor": 0.1,
        "reward_key": None,
    }
    return SimpleNamespace(**(defaults | values))


def learn(source, groups, rewards):
    """Have every group judged; `rewards` gives those of a prompt."""
    for group in groups:
        for sample, reward in zip(group, rewards(group[0].prompt), strict=True):
            sample.reward = reward
        check_pass_rate(source.args, group)


def solved_are(*solved):
    return lambda prompt: (1.0, 1.0) if prompt in solved else (1.0, 0.0)


def test_prompts_at_a_useful_rate_are_preferred_and_none_is_starved(folder):
    source = CurriculumDataSource(args(folder))
    learn(source, source.get_samples(6), solved_are("a0", "a1", "a2"))
    counts = Counter(group[0].prompt for group in source.get_samples(600))
    useful = [counts[f"a{n}"] for n in (3, 4, 5)]
    solved = [counts[f"a{n}"] for n in (0, 1, 2)]
    assert min(useful) > 4 * max(solved)
    assert min(solved) > 0
    told = source.metrics()
    assert told["rollout/curriculum/passed_over"] > 0
    assert told["rollout/curriculum/useful"] == told["rollout/curriculum/high"] == 3.0
    assert told["rollout/curriculum/untried"] == told["rollout/curriculum/low"] == 0.0


def test_where_no_prompt_is_useful_the_source_still_gives(folder):
    source = CurriculumDataSource(args(folder, curriculum_floor=1e-9))
    learn(source, source.get_samples(6), solved_are(*(f"a{n}" for n in range(6))))
    assert len(source.get_samples(12)) == 12


def test_shares_of_a_mixture_hold_under_a_curriculum(folder):
    source = CurriculumDataSource(args(folder, ("a", "b"), prompt_data_weights=[3, 1]))
    learn(source, source.get_samples(12), solved_are("a0", "a1", "a2", "b3"))
    counts = Counter(group[0].metadata["slime_dataset"] for group in source.get_samples(40))
    assert counts == {"a": 30, "b": 10}


def test_prompts_with_the_same_text_are_different_prompts(folder, tmp_path):
    (tmp_path / "twins.jsonl").write_text(2 * (json.dumps({"input": "same"}) + "\n"))
    source = CurriculumDataSource(args(folder, prompt_data=str(tmp_path / "twins.jsonl")))
    first, _ = source.get_samples(2)
    learn(source, [first], solved_are("same"))
    assert PassRates().counts(0.05, 0.95) == {"high": 1}


def test_rows_may_name_their_own_ids(folder, tmp_path):
    row = {"input": "x", "metadata": {"prompt_id": "mine"}}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    source = CurriculumDataSource(args(folder, prompt_data=str(tmp_path / "own.jsonl")))
    learn(source, source.get_samples(1), solved_are())
    assert PassRates().rate("own:mine") == 0.5


@settings(max_examples=20)
@given(before=st.integers(0, 12), learned=st.integers(0, 12), after=st.integers(1, 20))
def test_a_curriculum_resumes_exactly(folder, before, learned, after):
    PassRates.clear_instance()
    source = CurriculumDataSource(args(folder, ("a", "b")))
    groups = source.get_samples(before)
    learn(source, groups[:learned], solved_are("a0", "a1", "b2"))
    source.save(before)
    expected = source.get_samples(after)
    learn(source, groups[learned:], solved_are("b3"))
    rates = PassRates().state()["results"]
    PassRates.clear_instance()
    resumed = CurriculumDataSource(args(folder, ("a", "b")))
    resumed.load(before)
    for group in expected:
        for sample in group:
            assert sample.reward is None
    assert resumed.get_samples(after) == expected
    learn(resumed, groups[learned:], solved_are("b3"))
    assert PassRates().state()["results"] == rates


def test_hopeless_prompts_are_passed_over_in_real_steps(folder):
    """Through scheduler, filter and engine: what the filter saw decides what is asked next."""

    def policy(call):
        passes = call.prompt not in ("a0", "a1", "a2") and call.params.sampling_seed % 2
        return ScriptedAnswer(token_ids=[70, 71] if passes else [70])

    with scripted(policy) as server:
        values = vars(args(folder, curriculum_floor=1e-9, rollout_shuffle=False))
        settings = engine_args(server.url, **values, pass_threshold=2.0, rollout_batch_size=3)
        state_for(settings)
        source = CurriculumDataSource(settings)
        outputs = [generate_rollout(settings, step, source) for step in range(3)]
        asked = [call.prompt for call in server.engine.calls]
    GenerateState.clear_instance()
    assert outputs[0].metrics["rollout/dynamic_filter/drop_pass_rate_low"] == 3.0
    assert not any("rollout/dynamic_filter/drop_pass_rate_low" in o.metrics for o in outputs[1:])
    assert Counter(asked[12:]) == {"a3": 4, "a4": 4, "a5": 4}


def test_a_curriculum_that_nobody_tells_anything_is_refused(folder):
    with pytest.raises(ConfigError, match="nothing records pass rates"):
        CurriculumDataSource(args(folder, dynamic_sampling_filter_path=None))
    with pytest.raises(ConfigError, match="needs a data set"):
        CurriculumDataSource(args(folder, prompt_data=None))
