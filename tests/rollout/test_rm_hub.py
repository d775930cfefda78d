import asyncio
import types

import numpy as np
import pytest
from aiohttp import web

from slime.errors import ConfigError, HookError, RewardError
from slime.rollout.rm_hub import async_rm, batched_async_rm, check_reward_source
from slime.rollout.rm_hub import http as reward_http
from slime.rollout.rm_hub.pool import close_shared_pools
from slime.rollout.rm_hub.validity import checked_reward
from slime.utils.types import Sample
from tests.rollout.test_hooks import HERE
from tests.utils.test_http_utils import with_server


@pytest.fixture(scope="module", autouse=True)
def no_process_left():
    yield
    close_shared_pools()


def reward(sample, **args):
    return asyncio.run(async_rm(types.SimpleNamespace(**args), sample))


def rewards(samples, **args):
    return asyncio.run(batched_async_rm(types.SimpleNamespace(**args), samples))


@pytest.mark.parametrize(
    "rm_type, response, label, expected",
    [
        ("math", r"so \boxed{5}", "5", 1.0),
        ("math", r"so \boxed{6}", "5", 0.0),
        ("math", "so 5", "5", 0.0),
        ("math", r"so \boxed{7}", 7, 1.0),
        ("boxed_math", r"so \boxed{5}", "5", 1.0),
        ("boxed_math", "so 5", "5", 0.0),
        ("f1", "the cat sat", "a cat sat down", 0.8),
        ("boxed_f1", r"many words \boxed{cat}", "cat", 1.0),
        ("boxed_f1", "cat", "cat", 0.0),
    ],
)
def test_built_in_types(rm_type, response, label, expected):
    value = reward(Sample(response=response, label=label), rm_type=rm_type)
    assert value == pytest.approx(expected)


def test_random_is_zero_or_one():
    assert {reward(Sample(), rm_type="random") for _ in range(64)} == {0.0, 1.0}


def test_type_of_the_sample_beats_the_flag():
    sample = Sample(response="cat", label="cat", metadata={"rm_type": "f1"})
    assert reward(sample, rm_type="math") == 1.0


def test_unknown_type_names_the_nearest():
    with pytest.raises(ConfigError, match="'boxed_maths'; did you mean 'math'"):
        reward(Sample(label="1"), rm_type="boxed_maths")


def test_no_reward_configured_names_the_flags():
    with pytest.raises(ConfigError, match="--rm-type or --custom-rm-path"):
        reward(Sample())


@pytest.mark.parametrize("label", [None, "", "  "])
def test_missing_label_is_an_error_and_not_zero(label):
    with pytest.raises(RewardError, match="sample 3 .* no label"):
        reward(Sample(index=3, response=r"\boxed{1}", label=label), rm_type="math")


def test_hung_check_is_an_error_with_sample_and_reason_while_others_go_on():
    samples = [Sample(index=n, response=r"\boxed{4}", label="4") for n in range(4)]
    samples[1].response = r"\boxed{\int_0^1 \frac{\sin(x^2)}{1+e^x+\ln(x+1)} dx}"
    samples[1].label = "1/2"

    async def main():
        args = types.SimpleNamespace(rm_type="math", reward_timeout=2.0)
        return await asyncio.gather(*(async_rm(args, s) for s in samples), return_exceptions=True)

    results = asyncio.run(main())
    assert [results[n] for n in (0, 2, 3)] == [1.0] * 3
    assert isinstance(results[1], RewardError)
    assert "sample 1" in str(results[1])
    assert "did not finish within 2 s" in str(results[1])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1.0", ["1"], object()])
def test_invalid_value_names_hook_sample_and_value(value):
    sample = Sample(index=8, label=value)
    with pytest.raises(RewardError) as caught:
        reward(sample, custom_rm_path=HERE + "reward_from_label")
    text = str(caught.value)
    assert "sample 8" in text
    assert "reward_from_label" in text
    assert repr(value) in text


@pytest.mark.parametrize("value", [1, True, 0.5, np.float32(0.5), np.int64(2), -3.0])
def test_valid_numbers_become_floats(value):
    result = reward(Sample(label=value), custom_rm_path=HERE + "reward_from_label")
    assert type(result) is float
    assert result == float(value)


@pytest.mark.parametrize(
    "value, keys, message",
    [
        ({"score": 1.0}, {}, "--reward-key"),
        ({"score": 1.0}, {"reward_key": "acc"}, "without 'acc'"),
        ({"acc": float("nan")}, {"reward_key": "acc"}, "finite"),
        ({"acc": {}}, {"reward_key": "acc"}, "finite"),
    ],
)
def test_dict_reward_needs_a_finite_number_under_its_key(value, keys, message):
    with pytest.raises(RewardError, match=message):
        reward(Sample(label=value), custom_rm_path=HERE + "reward_from_label", **keys)


def test_dict_reward_is_kept_whole():
    args = types.SimpleNamespace(reward_key="acc", eval_reward_key="score")
    value = {"acc": True, "pred": "x"}
    assert checked_reward(value, source="f", sample=Sample(), args=args) == {"acc": 1.0, "pred": "x"}


def test_hook_of_the_sample_wins_alone_and_in_a_batch():
    own = Sample(index=1, custom_rm_path=HERE + "reward_half")
    assert reward(own, custom_rm_path=HERE + "reward_raises") == 0.5
    samples = [Sample(index=0), own, Sample(index=2)]
    assert rewards(samples, custom_rm_path=HERE + "reward_group", group_rm=True) == [2.0, 0.5, 2.0]
    samples = [Sample(index=0, label=0.25), own]
    assert rewards(samples, custom_rm_path=HERE + "reward_from_label") == [0.25, 0.5]


def test_hook_gets_a_list_only_under_group_rm():
    samples = [Sample(index=n) for n in range(3)]
    assert rewards(samples, custom_rm_path=HERE + "reward_half") == [0.5] * 3
    assert rewards(samples, custom_rm_path=HERE + "reward_group", group_rm=True) == [3.0] * 3


def test_fan_out_groups_are_rewarded_in_flat_order():
    nested = [[Sample(label=0.0), Sample(label=1.0)], [Sample(label=2.0)]]
    assert rewards(nested, custom_rm_path=HERE + "reward_from_label") == [0.0, 1.0, 2.0]
    assert rewards(nested, custom_rm_path=HERE + "reward_group", group_rm=True) == [3.0] * 3


def test_group_hook_must_reward_every_sample():
    samples = [Sample(index=n, group_index=6) for n in range(3)]
    with pytest.raises(RewardError, match=r"group 6 .* 1 rewards for a group of 3"):
        rewards(samples, custom_rm_path=HERE + "reward_group_short", group_rm=True)


@pytest.mark.parametrize(
    "name, message",
    [
        ("reward_raises", "raised KeyError: 'gone'"),
        ("reward_sleeps", r"did not finish within 0\.1 s"),
    ],
)
def test_hook_that_fails_is_a_reward_error_with_its_cause(name, message):
    with pytest.raises(RewardError, match=message) as caught:
        reward(Sample(index=4), custom_rm_path=HERE + name, reward_timeout=0.1)
    assert "sample 4" in str(caught.value)


def test_hook_that_cannot_take_the_call_is_a_hook_error():
    with pytest.raises(HookError, match="--custom-rm-path"):
        reward(Sample(), custom_rm_path=HERE + "generate")


def remote(handler, sample, **args):
    async def client(url, seen):
        return await async_rm(types.SimpleNamespace(rm_type="remote_rm", rm_url=url, **args), sample)

    return with_server(handler, client)


def test_remote_reward_gets_prompt_response_and_label():
    async def judge(request, count):
        body = await request.json()
        assert body == {"prompt": "p", "response": "r", "label": "l"}
        return web.json_response(0.75)

    assert remote(judge, Sample(prompt="p", response="r", label="l")) == 0.75


def test_remote_reward_is_retried_then_an_error(monkeypatch):
    monkeypatch.setattr(reward_http, "backoff_seconds", lambda attempt: 0.001)
    counts = []

    async def busy(request, count):
        counts.append(count)
        return web.Response(status=503, text="judge is loading")

    with pytest.raises(RewardError, match="judge is loading"):
        remote(busy, Sample(index=1))
    assert len(counts) == 10


def test_remote_reward_has_a_deadline():
    async def slow(request, count):
        await asyncio.sleep(30)

    with pytest.raises(RewardError, match="within 0.2 s"):
        remote(slow, Sample(index=1), reward_timeout=0.2)


def test_remote_null_is_no_reward():
    async def null(request, count):
        return web.json_response(None)

    with pytest.raises(RewardError, match="returned None"):
        remote(null, Sample(index=1))


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (web.json_response("good"), "no_number", "returned 'good'"),
        (web.json_response({"reward": 1.0}), "no_key", "--reward-key"),
        (web.Response(text="<html>", content_type="text/html"), "http", "not JSON: '<html>'"),
        (web.Response(status=404, text="no such route"), "http", "status 404: no such route"),
    ],
)
def test_remote_answer_that_is_no_reward_is_a_failure_with_its_reason(answer, reason, message):
    async def odd(request, count):
        assert count == 1
        return answer

    with pytest.raises(RewardError, match=message) as caught:
        remote(odd, Sample(index=1))
    assert caught.value.reason == reason


def test_remote_dict_is_a_reward_under_its_key():
    async def scored(request, count):
        return web.json_response({"reward": 1, "why": "so"})

    assert remote(scored, Sample(), reward_key="reward") == {"reward": 1.0, "why": "so"}


def test_remote_reward_that_nobody_serves_names_the_url(monkeypatch):
    monkeypatch.setattr(reward_http, "backoff_seconds", lambda attempt: 0.001)
    with pytest.raises(RewardError, match=r"POST http://127\.0\.0\.1:9/x: Client\w+: .*10 tries"):
        reward(Sample(index=1), rm_type="remote_rm", rm_url="http://127.0.0.1:9/x")


def test_remote_rewards_share_64_connections():
    most = now = 0

    full = asyncio.Event()

    async def slow(request, count):
        nonlocal most, now
        now += 1
        most = max(most, now)
        if now == reward_http.CONNECTIONS:
            full.set()
        await full.wait()
        await asyncio.sleep(0.02)
        now -= 1
        return web.json_response(1.0)

    async def client(url, seen):
        args = types.SimpleNamespace(rm_type="remote_rm", rm_url=url)
        return await asyncio.gather(*(async_rm(args, Sample(index=n)) for n in range(150)))

    assert with_server(slow, client) == [1.0] * 150
    assert most == reward_http.CONNECTIONS == 64


def test_waiting_between_tries_doubles_up_to_half_a_minute():
    waits = [reward_http.backoff_seconds(attempt) for attempt in range(9)]
    floors = [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert all(floor <= wait < floor + 1 for floor, wait in zip(floors, waits, strict=True))


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "metadata", "expected"),
    [
        ("deepscaler", r"<think></think> \boxed{4}", "4", {}, 1.0),
        ("boxed_deepscaler", r"<think></think> \boxed{4}", "4", {}, 1.0),
        ("gpqa", "The answer is B", "B", {}, 1.0),
        ("gpqa", "The answer is B", None, {"correct_letter": "B", "unread": object()}, 1.0),
        ("boxed_gpqa", r"A or \boxed{B}", "B", {}, 1.0),
        ("boxed_gpqa", "The answer is B", "B", {}, 0.0),
        ("ifbench", "no", None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, 1.0),
        ("boxed_ifbench", r"a, \boxed{b}", {"instruction_id_list": ["punctuation:no_comma"]}, {}, 1.0),
        ("boxed_random", "x", None, {}, 0.0),
    ],
)
def test_built_in_types_in_the_pool(rm_type, response, label, metadata, expected):
    sample = Sample(index=0, response=response, label=label, metadata=metadata)
    assert reward(sample, rm_type=rm_type) in ((0.0, 1.0) if rm_type == "boxed_random" else (expected,))


@pytest.mark.parametrize(
    ("rm_type", "response", "right"),
    [("dapo", "Answer: 4", True), ("boxed_dapo", r"so \boxed{4}", True), ("boxed_dapo", "Answer: 4", False)],
)
def test_dapo_is_a_dict_under_its_key(rm_type, response, right):
    found = reward(Sample(response=response, label="4"), rm_type=rm_type, reward_key="score")
    assert (found["score"], found["acc"]) == (1.0 if right else -1.0, right)


def test_an_instruction_without_a_checker_is_a_failure_that_names_it():
    sample = Sample(index=2, response="x", metadata={"instruction_id_list": ["words:start_verb"]})
    with pytest.raises(RewardError, match="'words:start_verb'") as caught:
        reward(sample, rm_type="ifbench")
    assert (caught.value.reason, caught.value.place) == ("unknown_instruction", "sample 2 (rollout None)")


def test_remote_reward_without_address_names_the_flag():
    with pytest.raises(ConfigError, match="--rm-url"):
        reward(Sample(), rm_type="remote_rm")


def check_source(samples, **args):
    check_reward_source(types.SimpleNamespace(**args), samples)


SOURCES = "slime.rollout.data_source."


@pytest.mark.parametrize(
    ("samples", "args"),
    [
        ([], {"rm_type": "boxed_f1"}),
        ([Sample()], {"custom_rm_path": "a.b", "rm_type": "of my own"}),
        ([Sample()], {"rollout_function_path": "a.b", "rm_type": "of my own"}),
        ([Sample()], {"custom_generate_function_path": "a.b"}),
        ([Sample()], {"rollout_sample_hook_path": ["a.b"]}),
        ([Sample(), Sample(metadata={"rm_type": "math"})], {}),
        ([Sample(), Sample(custom_rm_path="a.b", metadata={"rm_type": "of my own"})], {}),
        (None, {"data_source_path": "a.b"}),
    ],
)
def test_a_run_that_can_get_a_reward_may_start(samples, args):
    check_source(samples, **args)


@pytest.mark.parametrize(
    ("samples", "args", "message"),
    [
        ([Sample()], {"rm_type": "maths"}, "--rm-type: unknown reward type 'maths'; did you mean 'math'"),
        (
            [Sample(metadata={"rm_type": "mth"})],
            {},
            "metadata.rm_type of --prompt-data: unknown .*'mth'.* 'math'",
        ),
        ([Sample()], {"rm_type": "boxed_judge", "judge_model": "m"}, "--judge-url"),
        (
            [Sample()],
            {"rm_type": "judge", "judge_url": "u", "judge_model": "m", "judge_api_key_env": "UNSET_KEY"},
            "UNSET_KEY",
        ),
        ([Sample()], {}, "no reward is configured, and no row"),
        (None, {"data_source_path": SOURCES + "RolloutDataSourceWithBuffer"}, "no reward is configured"),
        (
            [Sample()],
            {"rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout"},
            "no reward is configured",
        ),
    ],
)
def test_a_run_without_any_reward_does_not_start(samples, args, message):
    with pytest.raises(ConfigError, match=message):
        check_source(samples, **args)


def test_built_in_checks_run_in_as_many_processes_as_the_flag_says_by_default():
    from slime.config.sections import RewardConfig
    from slime.rollout.rm_hub.builtin import DEFAULT_WORKERS

    assert RewardConfig().reward_num_workers == DEFAULT_WORKERS
