import base64
import json
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.types import Sample

STOP = {"finish_reason": {"type": "stop"}, "weight_version": "3", "cached_tokens": 4, "prompt_tokens": 9}


def grown(*calls):
    sample = Sample(index=7, tokens=[1, 2])
    for call in calls:
        sample.append_response_tokens(**call)
    return sample


def sampled(tokens, **more):
    return {"tokens": tokens, "log_probs": [-0.5] * len(tokens), **more}


def given_by_tool(tokens, **more):
    return {"tokens": tokens, "log_probs": None, "trainable": False, **more}


def test_sampled_tokens_train_and_others_do_not():
    sample = grown(sampled([5, 6], text="ab"), given_by_tool([7], text="c"), sampled([8], text="d"))
    assert sample.tokens == [1, 2, 5, 6, 7, 8]
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.5, 0.0, -0.5]
    assert (sample.response_length, sample.response, sample.prompt_length) == (4, "abcd", 2)
    assert sample.effective_response_length == 3


def test_a_response_may_begin_with_a_tool():
    sample = grown(given_by_tool([7]), sampled([8]))
    assert sample.loss_mask == [0, 1]
    assert sample.rollout_log_probs == [0.0, -0.5]


def test_mask_of_an_earlier_response_is_filled_with_ones():
    sample = Sample(tokens=[1, 2, 3], response_length=2, rollout_log_probs=[-1.0, -1.0])
    sample.append_response_tokens(**given_by_tool([4]))
    assert sample.loss_mask == [1, 1, 0]


@pytest.mark.parametrize(
    "call, message",
    [
        (
            {"tokens": [1], "log_probs": None},
            "trainable response tokens require rollout log probabilities",
        ),
        (
            {"tokens": [1], "log_probs": [0.0], "trainable": False},
            "non-trainable response tokens should not pass rollout log probabilities",
        ),
        ({"tokens": [1, 2], "log_probs": [0.0]}, "sample 7: log_probs has length 1, tokens has length 2"),
    ],
)
def test_log_probs_that_do_not_fit_are_refused_and_change_nothing(call, message):
    sample = grown(sampled([5]))
    before = sample.to_dict()
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**call)
    assert sample.to_dict() == before


def test_log_probs_cannot_be_added_behind_a_response_without_them():
    sample = Sample(index=7, tokens=[1, 2], response_length=1)
    with pytest.raises(ValueError, match="rollout_log_probs is missing for the 1 response tokens"):
        sample.append_response_tokens(**sampled([3]))


@pytest.mark.parametrize("field", ["loss_mask", "rollout_log_probs", "teacher_log_probs"])
def test_length_mismatch_names_sample_field_and_both_lengths(field):
    sample = Sample(index=7, tokens=[1, 2, 3], response_length=2, **{field: [1]})
    with pytest.raises(ValueError, match=f"sample 7: {field} has length 1, response_length is 2"):
        sample.validate_lengths()


@pytest.mark.parametrize(
    "reason, status",
    [("stop", "completed"), ("length", "truncated"), ("abort", "aborted"), ("other", "pending")],
)
def test_finish_reason_gives_the_status(reason, status):
    for form in (reason, {"type": reason}):
        assert grown(sampled([5], meta_info={"finish_reason": form})).status.value == status


def test_terminal_info_is_summed_over_calls_and_can_be_left_out():
    sample = grown(sampled([5], meta_info=STOP), sampled([6], meta_info={**STOP, "weight_version": "4"}))
    assert sample.weight_versions == ["3", "4"]
    assert sample.prefix_cache_info.prefix_cache_hit_rate == pytest.approx(8 / 18)
    silent = grown(sampled([5], meta_info=STOP, update_terminal_info=False))
    assert (silent.status, silent.weight_versions) == (Sample.Status.PENDING, [])
    assert silent.prefix_cache_info == Sample.PrefixCacheInfo()


def test_speculative_counters_only_under_their_flag():
    meta = {**STOP, "spec_verify_ct": 2, "completion_tokens": 5}
    args = types.SimpleNamespace(sglang_speculative_algorithm="EAGLE")
    assert grown(sampled([5], meta_info=meta)).spec_info.spec_verify_ct == 0
    assert grown(sampled([5], meta_info=meta, args=args)).spec_info.spec_accept_length == 2.5


def test_speculative_counters_have_the_names_that_engines_give_them():
    newer = {"spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 8, "spec_verify_ct": 4}
    older = {"spec_accept_token_num": 1, "spec_draft_token_num": 2, "spec_verify_ct": 1}
    info = Sample.SpecInfo()
    for meta in ({**newer, "completion_tokens": 10}, {**older, "completion_tokens": 2}):
        info.add(meta)
    info.add({"completion_tokens": 1})  # one token, of the prefill: nothing was verified
    assert (info.spec_accept_rate, info.spec_accept_length) == (0.7, 2.4)
    assert Sample.SpecInfo.total([info, info]).spec_verify_ct == 10


def test_top_p_spans_follow_the_tokens_and_are_empty_for_tools():
    meta = {"top_p_token_ids": [10, 11, 12], "top_p_offsets": [0, 2, 3]}
    sample = grown(sampled([5, 6], meta_info=meta), given_by_tool([7]), sampled([5, 6], meta_info=meta))
    assert sample.rollout_top_p_token_ids == [10, 11, 12, 10, 11, 12]
    assert sample.rollout_top_p_offsets == [0, 2, 3, 3, 5, 6]


def test_top_p_offsets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must start at 0, have length 2 and end at 1"):
        grown(sampled([5], meta_info={"top_p_token_ids": [1], "top_p_offsets": [0, 2]}))


def encoded(routes):
    return base64.b64encode(np.array(routes, dtype=np.int32).tobytes()).decode()


def test_routed_experts_are_decoded_and_replaced_from_their_start():
    sample = grown(sampled([5], meta_info={"routed_experts": encoded([1, 2, 3, 4])}))
    meta = {"routed_experts": encoded([7, 8, 9, 10]), "routed_experts_start_len": 1}
    sample.append_response_tokens(**sampled([6], meta_info=meta))
    assert sample.rollout_routed_experts.tolist() == [1, 2, 7, 8, 9, 10]
    whole = {"routed_experts": encoded(range(8))}
    sample.append_response_tokens(**sampled([7], meta_info=whole))
    assert sample.rollout_routed_experts.tolist() == list(range(8))


def test_routed_experts_have_the_models_shape_where_it_is_known(tmp_path):
    sizes = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 3}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    args = types.SimpleNamespace(hf_checkpoint=str(tmp_path))
    sample = grown(sampled([5], args=args, meta_info={"routed_experts": encoded(range(12))}))
    assert sample.rollout_routed_experts.shape == (2, 2, 3)
    sample.append_response_tokens(**given_by_tool([6], args=args))
    meta = {"routed_experts": encoded(range(50, 62)), "routed_experts_start_len": 2}
    sample.append_response_tokens(**sampled([7], args=args, meta_info=meta))
    assert sample.rollout_routed_experts.reshape(-1).tolist() == [*range(12), *range(50, 62)]
    assert sample.rollout_routed_experts.shape == (4, 2, 3)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"routed_experts": encoded([1, 2, 3])}, "3 numbers, which are no routes of 2 tokens"),
        ({"routed_experts": encoded([1]), "routed_experts_start_len": 1}, "no routes before it are held"),
    ],
)
def test_routed_experts_of_another_row_are_refused(meta, message):
    with pytest.raises(ValueError, match=message):
        grown(sampled([5], meta_info=meta))


def test_reward_value_by_key_names_what_is_missing():
    args = types.SimpleNamespace(reward_key="acc")
    assert Sample(reward={"acc": 1.0}).get_reward_value(args) == 1.0
    assert Sample(reward=0.5).get_reward_value(object()) == 0.5
    with pytest.raises(KeyError, match="--reward-key"):
        Sample(reward={"score": 1.0}).get_reward_value(args)


calls = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 999), max_size=5)), max_size=6)


@given(calls, st.sampled_from(list(Sample.Status)), st.dictionaries(st.text(), st.integers()))
def test_dict_and_json_round_trip(calls, status, metadata):
    sample = grown(*(sampled(ids) if own else given_by_tool(ids) for own, ids in calls))
    sample.status, sample.metadata = status, metadata
    sample.spec_info.add({"spec_verify_ct": 1})
    sample.validate_lengths()
    assert Sample.from_dict(sample.to_dict()) == sample
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
    assert sample.to_dict()["status"] == status.value


def test_unknown_keys_become_attributes_and_survive():
    sample = Sample.from_dict({"prompt": "x", "trace": {"events": [1]}})
    assert sample.trace == {"events": [1]}
    assert Sample.from_dict(sample.to_dict()).trace == {"events": [1]}
