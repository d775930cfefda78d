import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slime.utils.dp_schedule
from slime.errors import ConfigError, DataError
from slime.train.dp_schedule import OversizedSample, build_dp_schedule
from slime.train.flops import SampleFlops

FLOPS = SampleFlops(linear=1000, quadratic=3)


@st.composite
def batches(draw):
    """Keyword arguments of a valid call: rollouts of 1 to 4 samples, in any order."""
    cuts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=16))
    rollout_ids = [7 * rollout - 20 for rollout, number in enumerate(cuts) for _ in range(number)]
    rollout_ids = draw(st.permutations(rollout_ids))
    dynamic = draw(st.booleans())
    return {
        "rollout_ids": rollout_ids,
        "total_lengths": [draw(st.integers(1, 300)) for _ in rollout_ids],
        "dp_size": draw(st.integers(1, 5)),
        "cp_size": draw(st.integers(1, 2)),
        "global_batch_size": draw(st.integers(1, 9)),
        "micro_batch_size": draw(st.integers(1, 4)),
        "use_dynamic_batch_size": dynamic,
        "max_tokens_per_gpu": draw(st.integers(20, 600) if dynamic else st.none() | st.integers(20, 600)),
        "microbatch_group_size_per_vp_stage": draw(st.none() | st.integers(1, 3)),
        "balance_data": draw(st.booleans()),
        "balance_by_flops": draw(st.booleans()),
        "flops": FLOPS,
        "incomplete": draw(st.sampled_from(["train", "carry"])),
    }


def micro_batches(step):
    return [batch for rank in step.ranks for batch in rank]


def samples_of(step):
    return [sample for batch in micro_batches(step) for sample in batch.samples]


@given(batches())
def test_every_sample_is_in_one_micro_batch_or_carried(call):
    schedule = build_dp_schedule(**call)
    trained = [sample for step in schedule.steps for sample in samples_of(step)]
    assert sorted([*trained, *schedule.carried]) == list(range(len(call["rollout_ids"])))


@given(batches())
def test_rollouts_are_whole_in_one_step_or_carried_in_order_of_their_ids(call):
    schedule = build_dp_schedule(**call)
    ids = call["rollout_ids"]
    for step in schedule.steps:
        assert {ids[sample] for sample in samples_of(step)} == set(step.rollout_ids)
    assert {ids[sample] for sample in schedule.carried} == set(schedule.carried_rollout_ids)
    in_order = [rollout for step in schedule.steps for rollout in step.rollout_ids]
    assert [*in_order, *schedule.carried_rollout_ids] == sorted(set(ids))


@given(batches())
def test_steps_are_full_and_a_last_incomplete_one_is_trained_or_carried_as_declared(call):
    schedule = build_dp_schedule(**call)
    size, rollouts = call["global_batch_size"], len(set(call["rollout_ids"]))
    rest = rollouts % size
    full = [size] * (rollouts // size)
    trains = call["incomplete"] == "train"
    assert [len(step.rollout_ids) for step in schedule.steps] == full + ([rest] if rest and trains else [])
    assert len(schedule.carried_rollout_ids) == (0 if trains else rest)


@given(batches())
def test_micro_batches_respect_cap_and_number_and_what_is_over_the_cap_is_alone_and_reported(call):
    schedule = build_dp_schedule(**call)
    tokens = call["max_tokens_per_gpu"]
    cap = None if tokens is None else tokens * call["cp_size"]
    over = set()
    for batch in (batch for step in schedule.steps for batch in micro_batches(step)):
        assert batch.tokens == sum(call["total_lengths"][sample] for sample in batch.samples)
        assert batch.cost == sum(FLOPS(call["total_lengths"][sample]) for sample in batch.samples)
        assert call["use_dynamic_batch_size"] or len(batch.samples) <= call["micro_batch_size"]
        if cap is not None and batch.tokens > cap:
            assert len(batch.samples) == 1
            over.add(batch.samples[0])
    assert {found.sample for found in schedule.oversized} == over
    assert all(found.cap == cap and found.tokens > cap for found in schedule.oversized)


@given(batches())
def test_ranks_have_equal_numbers_of_micro_batches_in_groups_and_none_empty_without_need(call):
    schedule = build_dp_schedule(**call)
    for step in schedule.steps:
        assert len(step.ranks) == call["dp_size"]
        assert {len(rank) for rank in step.ranks} == {step.num_microbatches}
        assert step.num_microbatches % (call["microbatch_group_size_per_vp_stage"] or 1) == 0
        slots = step.num_microbatches * call["dp_size"]
        assert step.empty_microbatches == max(0, slots - len(samples_of(step)))


@given(batches(), st.randoms(use_true_random=False))
def test_permutation_of_the_input_changes_nothing_but_names(call, chance):
    def contents(schedule, ids, lengths):
        return [
            [[[(ids[k], lengths[k]) for k in batch.samples] for batch in rank] for rank in step.ranks]
            for step in schedule.steps
        ] + [Counter((ids[k], lengths[k]) for k in schedule.carried)]

    order = chance.sample(range(len(call["rollout_ids"])), len(call["rollout_ids"]))
    permuted = call | {name: [call[name][k] for k in order] for name in ("rollout_ids", "total_lengths")}
    assert contents(build_dp_schedule(**call), call["rollout_ids"], call["total_lengths"]) == contents(
        build_dp_schedule(**permuted), permuted["rollout_ids"], permuted["total_lengths"]
    )


@given(batches())
def test_the_form_of_the_training_data_says_the_same(call):
    schedule = build_dp_schedule(**call)
    for rank in range(call["dp_size"]):
        data = schedule.rank_data(rank)
        assert data["global_batch_sizes"] == [len(step.rollout_ids) for step in schedule.steps]
        assert data["num_microbatches"] == [step.num_microbatches for step in schedule.steps]
        assert sum(data["num_microbatches"]) == len(data["micro_batch_indices"])
        named = [tuple(data["partition"][k] for k in batch) for batch in data["micro_batch_indices"]]
        assert named == [batch.samples for step in schedule.steps for batch in step.ranks[rank]]
        assert sorted(k for batch in data["micro_batch_indices"] for k in batch) == list(
            range(len(data["partition"]))
        )


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=80), st.integers(1, 8))
def test_without_binding_limits_the_heaviest_rank_is_below_twice_the_lower_bound(lengths, dp_size):
    schedule = build_dp_schedule(
        rollout_ids=range(len(lengths)),
        total_lengths=lengths,
        dp_size=dp_size,
        global_batch_size=len(lengths),
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=sum(lengths),
        flops=FLOPS,
    )
    (step,) = schedule.steps
    costs = [FLOPS(length) for length in lengths]
    heaviest = max(sum(batch.cost for batch in rank) for rank in step.ranks)
    mean = sum(costs) / dp_size
    assert heaviest <= mean + (1 - 1 / dp_size) * max(costs) + 1e-6 * mean
    assert heaviest <= 2 * max(mean, max(costs))
    assert step.imbalance == pytest.approx(heaviest / mean - 1)


@pytest.mark.parametrize("by_flops", [True, False])
def test_a_thousand_lengths_on_32_ranks_are_balanced_to_three_per_mille(by_flops):
    draw = random.Random(1)
    schedule = build_dp_schedule(
        rollout_ids=[k // 4 for k in range(1024)],
        total_lengths=[min(16384, int(draw.lognormvariate(8, 1)) + 64) for _ in range(1024)],
        dp_size=32,
        global_batch_size=256,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
        cp_size=2,
        balance_by_flops=by_flops,
        flops=SampleFlops(linear=15_000_000_000, quadratic=300_000),
    )
    assert schedule.steps[0].imbalance <= 0.003


def test_more_rollouts_than_asked_make_more_steps_and_fan_out_does_not():
    def sizes(cuts):
        ids = [rollout for rollout, number in enumerate(cuts) for _ in range(number)]
        schedule = build_dp_schedule(
            rollout_ids=ids, total_lengths=[5] * len(ids), dp_size=2, global_batch_size=4, micro_batch_size=8
        )
        return schedule.rank_data(0)["global_batch_sizes"]

    assert sizes([1] * 4) == sizes([3] * 4) == [4]
    assert sizes([1] * 9) == sizes([1, 5, 2] * 3) == [4, 4, 1]


def test_fewer_rollouts_than_a_step_are_all_carried_if_so_declared():
    schedule = build_dp_schedule(
        rollout_ids=[5, 3, 5],
        total_lengths=[1, 2, 3],
        dp_size=1,
        global_batch_size=3,
        incomplete="carry",
    )
    assert (schedule.steps, schedule.carried, schedule.carried_rollout_ids) == ((), (1, 0, 2), (3, 5))
    assert schedule.rank_data(0)["partition"] == []


def test_no_samples_make_no_step():
    schedule = build_dp_schedule(rollout_ids=[], total_lengths=[], dp_size=2, global_batch_size=4)
    assert (schedule.steps, schedule.carried) == ((), ())


def test_fewer_samples_than_ranks_leave_empty_micro_batches_that_are_counted():
    schedule = build_dp_schedule(rollout_ids=[0], total_lengths=[9], dp_size=4, global_batch_size=1)
    assert schedule.steps[0].empty_microbatches == 3
    assert [schedule.rank_data(rank)["micro_batch_indices"] for rank in range(4)] == [[[0]], [[]], [[]], [[]]]


def test_a_sample_over_the_cap_is_reported_with_its_rollout_and_the_cap():
    schedule = build_dp_schedule(
        rollout_ids=[4, 6],
        total_lengths=[100, 30],
        dp_size=1,
        cp_size=2,
        global_batch_size=2,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=32,
    )
    assert schedule.oversized == (OversizedSample(sample=0, rollout_id=4, tokens=100, cap=64),)
    assert [batch.samples for batch in schedule.steps[0].ranks[0]] == [(0,), (1,)]


def test_without_balance_ranks_take_turns_in_order_of_rollouts():
    schedule = build_dp_schedule(
        rollout_ids=[3, 1, 2, 0],
        total_lengths=[1, 1000, 5, 2],
        dp_size=2,
        global_batch_size=4,
        micro_batch_size=2,
        balance_data=False,
    )
    assert [schedule.rank_data(rank)["partition"] for rank in range(2)] == [[3, 2], [1, 0]]


@pytest.mark.parametrize(("by_flops", "costs"), [(True, [10800, 10000]), (False, [13600, 7200])])
def test_balance_by_flops_evens_out_the_cost_of_micro_batches_instead_of_their_tokens(by_flops, costs):
    schedule = build_dp_schedule(
        rollout_ids=range(4),
        total_lengths=[100, 60, 60, 60],
        dp_size=1,
        global_batch_size=4,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=180,
        balance_by_flops=by_flops,
        flops=lambda length: length**2,
    )
    assert [batch.cost for batch in schedule.steps[0].ranks[0]] == costs


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"dp_size": 0}, ConfigError, "dp_size is 0"),
        ({"global_batch_size": 0}, ConfigError, "global_batch_size is 0"),
        ({"microbatch_group_size_per_vp_stage": 0}, ConfigError, "per_vp_stage is 0"),
        ({"use_dynamic_batch_size": True}, ConfigError, "no token cap"),
        ({"balance_by_flops": True}, ConfigError, "cost of a sample is not known"),
        ({"incomplete": "drop"}, ConfigError, "'drop'"),
        ({"flops": lambda length: length - 3}, ConfigError, r"flops\(3\) is 0"),
        ({"flops": lambda length: float("nan")}, ConfigError, "is nan"),
        ({"total_lengths": [1]}, DataError, "2 rollout_ids for 1 total_lengths"),
        ({"total_lengths": [4, 0]}, DataError, "rollout 8: .* length 0"),
    ],
)
def test_what_cannot_be_scheduled_is_named(wrong, error, words):
    call = {"rollout_ids": [7, 8], "total_lengths": [4, 3], "dp_size": 1, "global_batch_size": 2}
    with pytest.raises(error, match=words):
        build_dp_schedule(**call | wrong)


def test_the_public_name_is_the_function_and_costs_no_heavy_import():
    assert slime.utils.dp_schedule.build_dp_schedule is build_dp_schedule
    code = "import sys, slime.utils.dp_schedule, slime.train.flops; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
