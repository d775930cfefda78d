"""The scripted engine: answers of a policy, faults, and the record of what was done to it."""

import http.client
import json
import urllib.error

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import EngineUnavailableError
from slime.serving.embedded.request import Request, SamplingParams
from slime.serving.script import script_of
from slime.serving.scripted import (
    ScriptedAnswer,
    ScriptedEngine,
    scripted_logprob,
    start_scripted_server,
)
from tests.serving.wire import POOL, call, events, later, load, ok, running, wait_for
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def serve(policy, **options):
    return start_scripted_server(policy, TOKENIZER, **options)


def generate(server, text="hello", stream=False, **params):
    body = {"text": text, "sampling_params": {"max_new_tokens": 64} | params, "return_logprob": True}
    return call(server.url, "/generate", body | {"stream": stream})


def test_a_policy_sees_the_prompt_and_its_number():
    with serve(lambda call: ScriptedAnswer(text=f"{call.number}:{call.prompt}")) as server:
        texts = [generate(server, text)[1]["text"] for text in ("a", "b")]
    assert texts == ["0:a", "1:b"]
    assert [call.input_ids for call in server.engine.calls] == [(67,), (68,)]


def test_given_ids_and_log_probs_come_back_as_they_are():
    answer = ScriptedAnswer(token_ids=[70, 71, 2], logprobs=[-1.0, -2.0, -3.0])
    with serve(lambda call: answer) as server:
        _, got = generate(server)
    assert got["meta_info"]["output_token_logprobs"] == [[-1.0, 70, None], [-2.0, 71, None], [-3.0, 2, None]]
    assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_made_up_log_probs_depend_on_the_token_only():
    with serve(lambda call: ScriptedAnswer(text="ab")) as server:
        triples = generate(server)[1]["meta_info"]["output_token_logprobs"]
    assert triples == [[scripted_logprob(token), token, None] for token in (67, 68, 2)]


def test_limits_and_stops_apply():
    with serve(lambda call: ScriptedAnswer(text="one two")) as server:
        cut = generate(server, max_new_tokens=3)[1]
        stopped = generate(server, stop=["e t"])[1]
        kept = generate(server, stop=["e t"], no_stop_trim=True)[1]
    assert (cut["text"], cut["meta_info"]["finish_reason"]) == ("one", {"type": "length", "length": 3})
    assert (stopped["text"], stopped["meta_info"]["finish_reason"]["matched"]) == ("on", "e t")
    assert kept["text"] == "one t"


def test_an_answer_that_does_not_end_stops_without_a_match():
    with serve(lambda call: ScriptedAnswer(text="ab", ends=False)) as server:
        assert generate(server)[1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}


def test_cached_tokens_are_the_common_prefix_unless_given():
    with serve(
        lambda call: ScriptedAnswer(text="x", cached_tokens=3 if call.number == 2 else None)
    ) as server:
        counts = [generate(server, text)[1]["meta_info"]["cached_tokens"] for text in ("abcd", "abce", "zz")]
        ok(server.url, "/flush_cache", {})
        counts.append(generate(server, "abcd")[1]["meta_info"]["cached_tokens"])
    assert counts == [0, 3, 3, 0]


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_an_error_answers_with_its_status(status):
    with serve(lambda call: ScriptedAnswer(error=(status, "as scripted"))) as server:
        assert generate(server) == (status, {"error": {"message": "as scripted"}})
        assert call(server.url, "/health")[0] == 200


def test_an_error_before_the_first_token_of_a_stream_has_its_status():
    with serve(lambda call: ScriptedAnswer(error=(500, "as scripted"))) as server:
        assert generate(server, stream=True) == (500, {"error": {"message": "as scripted"}})


def test_an_error_in_a_stream_is_an_event():
    with serve(lambda call: ScriptedAnswer(text="hello", token_latency=60)) as server:
        future = POOL.submit(events, server.url, "/generate", {"text": "a", "stream": True})
        wait_for(lambda: load(server.url)["num_used_tokens"] == 2)
        server.engine.shutdown()
        *_, error, done = future.result()
    assert json.loads(error) == {"error": {"message": "the engine was shut down"}}
    assert done == "[DONE]"


def test_a_policy_that_raises_fails_its_request_only():
    def policy(call):
        return ScriptedAnswer(text=str(1 // call.number))

    with serve(policy) as server:
        status, answer = generate(server)
        assert status == 500
        assert "ZeroDivisionError" in answer["error"]["message"]
        assert generate(server)[1]["text"] == "1"


def test_a_hanging_request_ends_by_abort_only():
    with serve(lambda call: ScriptedAnswer(hang=call.number == 0)) as server:
        body = {"text": "hello", "rid": "stuck"}
        future = later(server.url, "/generate", body)
        wait_for(lambda: running(server.url) == 1)
        assert generate(server)[0] == 200
        ok(server.url, "/abort_request", {"rid": "stuck"})
        assert future.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.engine.events == ["abort:stuck"]


def test_a_death_resets_connections_and_closes_the_port():
    with serve(lambda call: ScriptedAnswer(text="hello", die_after=2)) as server:
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            generate(server)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            call(server.url, "/health")
        with pytest.raises(EngineUnavailableError):
            server.engine.abort("x")


def test_a_dead_engine_behind_a_living_server_is_503():
    with serve(lambda call: ScriptedAnswer()) as server:
        server.engine.shutdown()
        assert [call(server.url, path)[0] for path in ("/health", "/ready", "/health_generate")] == [503] * 3
        status, answer = generate(server)
        assert status == 503
        assert "not running" in answer["error"]["message"]
        assert call(server.url, "/pause_generation", {})[0] == 503


def test_requests_in_flight_at_shutdown_are_503():
    with serve(lambda call: ScriptedAnswer(hang=True)) as server:
        future = later(server.url, "/generate", {"text": "a"})
        wait_for(lambda: running(server.url) == 1)
        server.engine.shutdown()
        with pytest.raises(AssertionError, match="shut down"):
            future.result()


def test_stop_ends_requests_in_flight():
    with serve(lambda call: ScriptedAnswer(hang=True)) as server:
        future = later(server.url, "/generate", {"text": "a"})
        wait_for(lambda: running(server.url) == 1)
    with pytest.raises((OSError, http.client.HTTPException)):
        future.result()


def test_control_calls_are_recorded_in_order():
    with serve(lambda call: ScriptedAnswer()) as server:
        for path in ("/pause_generation", "/release_memory_occupation", "/resume_memory_occupation"):
            ok(server.url, path, {})
        ok(server.url, "/update_weight_version", {"new_version": "3"})
        ok(server.url, "/continue_generation", {})
        ok(server.url, "/flush_cache", {})
    expected = ["pause:abort", "release", "resume_memory", "version:3", "resume", "flush"]
    assert server.engine.events == expected


def test_health_probes_do_not_reach_the_policy():
    with serve(lambda call: ScriptedAnswer()) as server:
        ok(server.url, "/health_generate")
    assert server.engine.calls == []


def test_policy_log_probs_that_are_too_few_are_named():
    engine = ScriptedEngine(lambda call: ScriptedAnswer(text="ab", logprobs=[-1.0]), TOKENIZER)
    engine.start()
    updates = []
    engine.submit(Request(rid="r", input_ids=[5]), updates.append)
    engine.shutdown()
    assert "1 logprobs for 3 tokens" in updates[-1].finish_reason["message"]


@given(st.lists(st.integers(0, 258), max_size=20), st.integers(0, 20), st.booleans())
def test_a_script_is_a_prefix_of_its_answer_within_the_limit(ids, limit, ignore_eos):
    params = SamplingParams(max_new_tokens=limit, ignore_eos=ignore_eos)
    script = script_of(ScriptedAnswer(token_ids=ids), params, TOKENIZER)
    count = len(script.token_ids)
    assert script.token_ids == ids[:count]
    assert count <= limit
    assert len(script.logprobs) == count
    if not ignore_eos:
        assert 2 not in script.token_ids[:-1]
    if script.ending["type"] == "length":
        assert count == limit


def test_images_are_told_to_the_policy_where_the_engine_takes_them():
    with serve(lambda call: ScriptedAnswer(token_ids=[70]), takes_images=True) as server:
        for images in (["a", "b"], "a", None):
            ok(server.url, "/generate", {"input_ids": [5], "image_data": images})
        batch = {"input_ids": [[5], [6]], "image_data": [["a"], ["b", "c"]]}
        ok(server.url, "/generate", batch)
        told = [call.images for call in server.engine.calls]
        assert told == [("a", "b"), ("a",), (), ("a",), ("b", "c")]
        assert ok(server.url, "/model_info")["has_image_understanding"]
        status, answer = call(server.url, "/generate", {"input_ids": [5], "image_data": [3]})
        assert status == 400 and "image_data must be a URL or a list of URLs" in str(answer)
