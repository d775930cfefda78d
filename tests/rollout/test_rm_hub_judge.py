import asyncio
import contextlib
import json
import types

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import ConfigError, RewardError
from slime.rollout.rm_hub import async_rm
from slime.rollout.rm_hub import http as reward_http
from slime.rollout.rm_hub.judge import JudgeSettings, judge_message, judge_settings, read_score
from slime.serving.scripted import ScriptedAnswer
from slime.utils.types import Sample
from tests.rollout.kit import raw_server, scripted
from tests.tiny import tiny_tokenizer

TASK = Sample(index=3, rollout_id=3, prompt="What is 2+2?", response="It is {label} 4", label="4")


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(reward_http, "backoff_seconds", lambda attempt: 0.001)


def judged(answers, sample=TASK, **flags):
    """The reward by a chat server that gives these answers in turn, and the requests that it got."""
    seen = []

    async def chat(request):
        seen.append((request, await request.json()))
        answer = answers[min(len(seen), len(answers)) - 1]
        if not isinstance(answer, str):
            return answer
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": answer}}]})

    async def main():
        async with raw_server(chat, "/v1/chat/completions") as url:
            args = types.SimpleNamespace(
                **({"rm_type": "judge", "judge_url": url + "/v1", "judge_model": "m"} | flags)
            )
            return await async_rm(args, sample)

    return asyncio.run(main()), seen


@pytest.mark.parametrize(
    ("answer", "scale", "reward"),
    [
        ("It is right.\n<score>10</score>", 10, 1.0),
        ("<score>7.5</score>", 10, 0.75),
        ('{"score": 3, "why": "so"}', 5, 0.6),
        ("<think><score>1</score></think><score>9</score>", 10, 0.9),
        ("<score>1</score> no: <score> 2 </score>", 10, 0.2),
        ("<score>0</score>", 10, 0.0),
    ],
)
def test_the_score_of_an_openai_server_is_its_share_of_the_scale(answer, scale, reward):
    value, seen = judged([answer], judge_scale=scale)
    assert value == pytest.approx(reward)
    (_, body), *rest = seen
    assert not rest
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    text = body["messages"][0]["content"]
    assert all(part in text for part in ("What is 2+2?", "It is {label} 4", f"to {scale} (best)"))


def test_an_answer_without_a_score_is_asked_for_again_and_warmer():
    value, seen = judged(["good!", "<score>eleven</score>", "<score>4</score>"])
    assert value == 0.4
    assert [body["temperature"] for _, body in seen] == [0.0, 0.7, 0.7]


@pytest.mark.parametrize(
    "answer", ["fine", "<score>11</score>", "<score>nan</score>", "<score>-1</score>", ""]
)
def test_no_score_after_all_asks_is_a_failure_and_never_zero(answer):
    with pytest.raises(RewardError, match="sample 3 .*no score from 0 to 10 in 2 answers") as caught:
        judged([answer], judge_asks=2)
    assert caught.value.reason == "judge_unparsable"


def test_the_key_is_sent_and_must_be_there(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    _, ((request, _),) = judged(["<score>1</score>"], judge_api_key_env="JUDGE_KEY")
    assert request.headers["Authorization"] == "Bearer s3cret"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        judged(["<score>1</score>"], judge_api_key_env="JUDGE_KEY")


def test_a_refusal_of_the_server_is_named_with_url_and_body():
    refusal = web.json_response({"error": "no such model"}, status=404)
    with pytest.raises(RewardError, match="chat/completions: status 404: .*no such model") as caught:
        judged([refusal])
    assert caught.value.reason == "http"


def test_an_answer_of_another_protocol_is_a_failure():
    with pytest.raises(RewardError, match="without text") as caught:
        judged([web.json_response({"text": "<score>1</score>"})])
    assert caught.value.reason == "judge_protocol"


def test_a_judge_that_does_not_answer_is_a_failure_at_the_deadline():
    async def main():
        async def sleeps(request):
            await asyncio.sleep(30)

        async with raw_server(sleeps, "/v1/chat/completions") as url:
            args = types.SimpleNamespace(
                rm_type="judge", judge_url=url + "/v1", judge_model="m", reward_timeout=0.2
            )
            await async_rm(args, TASK)

    with pytest.raises(RewardError, match=r"within 0\.2 s") as caught:
        asyncio.run(main())
    assert caught.value.reason == "timeout"


def test_an_engine_is_asked_in_its_own_protocol_through_the_chat_template(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    prompts = []

    def policy(call):
        prompts.append(call.prompt)
        return ScriptedAnswer(text="<score>5</score>" if len(prompts) > 1 else "hm")

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(scripted(policy))
        args = types.SimpleNamespace(
            rm_type="judge",
            judge_url=server.url + "/generate",
            judge_model=str(tmp_path),
            judge_max_tokens=64,
        )
        assert asyncio.run(async_rm(args, TASK)) == 0.5
    expected = tiny_tokenizer().apply_chat_template(
        [{"role": "user", "content": judge_message(judge_settings(args), TASK, TASK.response)}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert prompts == [expected, expected]


def test_only_the_box_is_judged_under_boxed():
    sample = Sample(prompt="p", response=r"long talk \boxed{42}", label="42")
    _, ((_, body),) = judged(["<score>1</score>"], sample=sample, rm_type="boxed_judge")
    text = body["messages"][0]["content"]
    assert "42" in text
    assert "long talk" not in text


def test_a_rubric_is_a_text_or_a_file(tmp_path):
    file = tmp_path / "rubric.txt"
    file.write_text("Is {response} polite? Task: {prompt} {x}")
    for rubric in (str(file), "Is {response} polite? Task: {prompt} {x}"):
        _, ((_, body),) = judged(["<score>1</score>"], judge_rubric=rubric)
        text = body["messages"][0]["content"]
        assert text.startswith("Is It is {label} 4 polite? Task: What is 2+2? {x}")
    with pytest.raises(ConfigError, match="--judge-rubric"):
        judged(["<score>1</score>"], judge_rubric=str(tmp_path / "none.txt"))


def test_messages_are_shown_with_their_roles():
    sample = Sample(prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    text = judge_message(JudgeSettings(url="u", model="m"), sample, "r")
    assert "system: s\n\nuser: u" in text
    assert "(none)" in text


@pytest.mark.parametrize(
    ("missing", "flag"), [("judge_url", "--judge-url"), ("judge_model", "--judge-model")]
)
def test_what_is_not_set_is_named(missing, flag):
    settings = {"judge_url": "http://x", "judge_model": "m"} | {missing: None}
    with pytest.raises(ConfigError, match=flag):
        asyncio.run(async_rm(types.SimpleNamespace(rm_type="judge", **settings), TASK))


@given(st.floats(0, 10), st.text(alphabet="abc<> {}\n", max_size=30))
def test_a_score_is_found_behind_any_text(score, before):
    assert read_score(f"{before}<score>{score!r}</score>", 10.0) == score
    assert read_score(before + "\n" + json.dumps({"score": score}), 10.0) == score


@given(st.text(max_size=200))
def test_what_is_read_is_on_the_scale_or_nothing(text):
    found = read_score(text, 10.0)
    assert found is None or 0.0 <= found <= 10.0
