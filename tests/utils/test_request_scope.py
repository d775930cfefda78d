import asyncio
import contextlib

import pytest

from slime.agent.adapters import OpenAIAdapter
from slime.errors import EngineRequestError
from slime.serving.scripted import ScriptedAnswer
from slime.utils.engine_client import EngineClient
from slime.utils.http_utils import HttpError, post
from slime.utils.request_scope import REPEAT_SECONDS, RequestScope, current_scope, entered
from tests.agent.kit import served
from tests.rollout.kit import scripted, until

PARAMS = {"max_new_tokens": 50}
SLOW = ScriptedAnswer(token_ids=[70] * 40, token_latency=0.02)


def in_scope(scope, work):
    async def main():
        with entered(scope):
            return await work

    return main()


def ask(url, rid="one", **options):
    options = {"timeout": 20.0} | options
    return EngineClient(url, backoff=0.01).generate([5, 6], dict(PARAMS), rid=rid, **options)


async def stopped_after(scope, work, condition):
    """The value of `work` in `scope`, which is stopped when the condition holds."""
    task = asyncio.create_task(in_scope(scope, work))
    await until(condition)
    await scope.stop(10.0)
    return await task


def test_a_stop_ends_a_call_at_the_engine_with_the_tokens_that_it_has():
    scope = RequestScope()
    with scripted(lambda call: SLOW) as server:
        answer = asyncio.run(
            stopped_after(scope, ask(server.url), lambda: server.engine.stats.decode_tokens >= 3)
        )
        events = [event for event in server.engine.events if event.startswith("abort:")]
    assert answer.finish_reason == "abort"
    assert 3 <= len(answer.output_ids) == len(answer.log_probs) < 40
    assert events == ["abort:one"]
    assert scope.calls == {}


def test_fields_of_a_scope_are_sent_with_each_call_that_does_not_say_otherwise():
    """Both engines refuse the field by its name, so an answer is one without it."""
    scope = RequestScope(fields={"lora_path": "slime"})
    with scripted() as server:
        url = server.url + "/generate"
        with pytest.raises(EngineRequestError, match="lora_path"):
            asyncio.run(in_scope(scope, ask(server.url)))
        with pytest.raises(HttpError, match="lora_path"):
            asyncio.run(in_scope(scope, post(url, {"input_ids": [5]})))
        answer = asyncio.run(in_scope(scope, post(url, {"input_ids": [5], "lora_path": None})))
    assert answer["output_ids"]


def test_models_that_are_not_trained_get_no_fields_of_a_scope():
    with scripted() as server:
        scope = RequestScope(fields={"lora_path": "slime"}, frozen={server.url})
        answer = asyncio.run(in_scope(scope, post(server.url + "/generate", {"input_ids": [5]})))
        assert answer["output_ids"]
        assert asyncio.run(in_scope(scope, ask(server.url))).output_ids


def test_later_calls_of_a_stopped_scope_get_an_empty_aborted_answer_and_are_not_sent():
    scope = RequestScope(stopped=True)
    with scripted() as server:
        answer = asyncio.run(in_scope(scope, ask(server.url)))
        raw = asyncio.run(in_scope(scope, post(server.url + "/generate", {"input_ids": [5]})))
        assert server.engine.calls == []
    assert answer.output_ids == answer.log_probs == raw["output_ids"] == []
    assert answer.finish_reason == raw["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_abort_that_overtakes_its_request_is_repeated():
    """The first abort does nothing, as at an engine that has not seen the request yet."""
    scope, aborts = RequestScope(), []

    async def main():
        answered = asyncio.Event()

        async def abort(rid):
            aborts.append(rid)
            if len(aborts) == 2:
                answered.set()

        async def call():
            with scope.holding("early", abort, 2):
                await answered.wait()

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        await scope.stop(10 * REPEAT_SECONDS)
        assert task.done() or answered.is_set()
        await task

    asyncio.run(main())
    assert aborts == ["early", "early"]


def test_a_stop_returns_after_its_time_although_the_engine_is_deaf():
    scope = RequestScope()

    async def main():
        async def abort(rid):
            await asyncio.sleep(3600)

        with scope.holding("deaf", abort, 2):
            await scope.stop(0.05)
            assert list(scope.calls) == ["deaf"]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_engine_that_cannot_abort_is_told_and_asked_again(caplog):
    scope = RequestScope()
    with scripted(lambda call: SLOW) as server:
        url = server.url

        async def main():
            task = asyncio.create_task(in_scope(scope, ask(url)))
            await until(lambda: server.engine.stats.decode_tokens >= 1)
            server.kill()
            await scope.stop(0.2)
            with pytest.raises(Exception, match="Unavailable|127.0.0.1"):
                await task

        asyncio.run(main())
    assert scope.calls == {}


def test_a_scope_ends_its_own_calls_and_no_others():
    mine, other = RequestScope(), RequestScope()
    with scripted(lambda call: SLOW) as server:

        async def main():
            kept = asyncio.create_task(in_scope(other, ask(server.url, "kept")))
            ended = await stopped_after(
                mine, ask(server.url, "ended"), lambda: server.engine.stats.decode_tokens >= 4
            )
            return ended, await kept

        ended, kept = asyncio.run(main())
    assert ended.finish_reason == "abort"
    assert kept.finish_reason == "stop"
    assert len(kept.output_ids) == 40


def test_a_post_to_generate_belongs_to_the_scope_and_other_posts_do_not():
    scope, seen = RequestScope(), []
    scope.on_call = seen.append
    with scripted(lambda call: SLOW) as server:
        body = {"input_ids": [5, 6], "sampling_params": PARAMS, "return_logprob": True}
        answer = asyncio.run(
            stopped_after(
                scope,
                post(server.url + "/generate", body),
                lambda: server.engine.stats.decode_tokens >= 2,
            )
        )
        asyncio.run(in_scope(scope, post(server.url + "/flush_cache", {})))
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) >= 2
    (call,) = seen
    assert (call.finish, call.prompt_tokens, call.tokens) == ("abort", 2, len(answer["output_ids"]))
    assert call.versions == ("default",)


def test_the_calls_deadline_is_the_scopes_where_that_is_less():
    scope = RequestScope(timeout=0.2)
    with (
        scripted(lambda call: ScriptedAnswer(hang=True)) as server,
        pytest.raises(Exception, match=r"no answer within 0.2 s"),
    ):
        asyncio.run(in_scope(scope, ask(server.url)))


def test_every_call_is_told_with_its_tokens_versions_and_end():
    seen = []
    scope = RequestScope(on_call=seen.append)
    broken = ScriptedAnswer(error=(500, "out of memory"))
    with scripted(lambda call: ScriptedAnswer(token_ids=[70, 71]) if call.number == 0 else broken) as server:
        server.engine.set_weight_version("7")
        asyncio.run(in_scope(scope, ask(server.url)))
        with pytest.raises(Exception, match="out of memory"):
            asyncio.run(in_scope(scope, ask(server.url, "two")))
    assert [(call.rid, call.tokens, call.finish, call.versions) for call in seen] == [
        ("one", 2, "stop", ("7",)),
        ("two", 0, "EngineError", ()),
    ]
    assert all(call.seconds > 0 for call in seen)


def test_the_scope_follows_tasks_and_ends_with_its_body():
    scope, inner = RequestScope(), RequestScope()

    async def look():
        return current_scope()

    async def main():
        with entered(scope):
            assert await asyncio.create_task(look()) is scope
            with entered(inner):
                assert current_scope() is inner
            assert current_scope() is scope
        assert current_scope() is None

    asyncio.run(main())


def test_an_adapters_session_inherits_the_scope_in_which_it_was_opened():
    """Its requests come on the server's tasks, in no scope; a stop ends them all the same."""
    scope = RequestScope()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
    slow = ScriptedAnswer(text="a long answer " * 3, token_latency=0.05)
    with contextlib.ExitStack() as stack:
        with entered(scope):
            run = stack.enter_context(served(OpenAIAdapter, lambda call: slow))

        async def main():
            request = asyncio.create_task(asyncio.to_thread(run.post, "/v1/chat/completions", body))
            await until(lambda: run.engine.stats.decode_tokens >= 2)
            assert len(scope.calls) == 1
            await scope.stop(10.0)
            return await request

        asyncio.run(main())
        aborts = [event for event in run.engine.events if event.startswith("abort:")]
    assert len(aborts) == 1
    assert scope.calls == {}
