from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.scores import eval_metrics
from tests.rollout.test_metrics import sample

ARGS = SimpleNamespace()


def entry(rewards, samples, **fields):
    return {"gsm": {"rewards": rewards, "truncated": [False] * len(rewards), "samples": samples} | fields}


def test_pass_rates_are_over_prompts_with_enough_rollouts():
    samples = [sample(0), sample(1), sample(2, group=1), sample(3, group=1), sample(4, group=2)]
    metrics = eval_metrics(ARGS, entry([1.0, 0.0, 0.0, 0.0, 1.0], samples))
    assert metrics["eval/gsm"] == 0.4
    assert metrics["eval/gsm-pass@1"] == 0.5
    assert metrics["eval/gsm-pass@2"] == 0.5
    assert metrics["eval/gsm/rollouts"] == 5.0


def test_pass_rates_need_rewards_of_0_or_1_or_a_threshold():
    samples = [sample(0), sample(1)]
    strict = SimpleNamespace(pass_threshold=0.6)
    assert "eval/gsm-pass@1" not in eval_metrics(ARGS, entry([0.5, 1.0], samples))
    assert eval_metrics(strict, entry([0.5, 1.0], samples))["eval/gsm-pass@1"] == 0.5
    own = entry([0.5, 1.0], samples, pass_threshold=0.5)
    assert eval_metrics(strict, own)["eval/gsm-pass@1"] == 1.0


def test_results_of_other_eval_functions_may_lack_samples():
    assert eval_metrics(ARGS, {"gsm": {"rewards": [1, 0]}}) == {"eval/gsm": 0.5}
    assert eval_metrics(ARGS, {"gsm": {"rewards": []}}) == {}


@given(st.lists(st.integers(1, 3), min_size=4, max_size=4), st.permutations(range(4)), st.booleans())
def test_samples_of_a_fan_out_shift_nothing(cuts, order, by_sample):
    """However rollouts are cut, ordered, and whether rewards come a rollout or a sample: same metrics."""
    passed = [1.0, 0.0, 1.0, 1.0]
    rows = {n: [sample(n, group=n // 2, rollout_id=n) for _ in range(cuts[n])] for n in range(4)}
    samples = [row for n in order for row in rows[n]]
    if by_sample:
        result = entry([passed[row.rollout_id] for row in samples], samples)
    else:
        result = entry([passed[n] for n in order], samples)
    metrics = eval_metrics(ARGS, result)
    assert metrics["eval/gsm"] == 0.75
    assert metrics["eval/gsm/rollouts"] == 4.0
    assert metrics["eval/gsm-pass@1"] == 0.75
    assert metrics["eval/gsm-pass@2"] == 1.0
    assert metrics["eval/gsm/response_len/max"] == 2.0 * max(cuts)


def test_responses_without_an_answer_are_counted_once_a_rollout():
    rows = [sample(n, rollout_id=0, metadata={"reward_invalid": "no box"}) for n in range(2)]
    metrics = eval_metrics(ARGS, entry([0.0, 1.0], [*rows, sample(2)]))
    assert metrics["eval/gsm/invalid"] == 1.0


def test_rewards_are_found_by_rollout_id_where_it_is_given():
    samples = [sample(0, rollout_id=0), sample(1, rollout_id=0), sample(2, group=1, rollout_id=1)]
    metrics = eval_metrics(ARGS, entry([1.0, 0.0], samples, rollout_ids=[1, 0]))
    assert metrics["eval/gsm/rollouts"] == 2.0
    assert metrics["eval/gsm-pass@1"] == 0.5
    assert metrics["eval/gsm/response_len/max"] == 4.0
