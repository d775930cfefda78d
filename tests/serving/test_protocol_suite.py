"""SGLang's native protocol, held to by the scripted and by the embedded engine alike.

Real servers are held to the same tests (tests/sglang/test_protocol.py), less the differences declared there.
"""

import json
from itertools import pairwise

import pytest

from tests.serving.engines import ENDLESS, LONG, OLD, PROMPT, embedded_server, greedy, scripted_server
from tests.serving.wire import (
    call,
    events,
    later,
    ok,
    running,
    send_and_hang_up,
    wait_for,
)

# Keys, in order, of SGLang 0.5.23's answers.
META_KEYS = [
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions"),
    *("input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"),
    *("reasoning_tokens", "completion_tokens", "cached_tokens", "weight_versions"),
    *("cached_tokens_details", "dp_rank", "e2e_latency", "response_sent_to_client_ts"),
]
LOGPROB_KEYS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
MODEL_INFO_KEYS = {
    *("model_path", "served_model_name", "tokenizer_path", "is_generation", "preferred_sampling_params"),
    *("weight_version", "load_format", "reasoning_parser", "tool_call_parser", "disaggregation_mode"),
    *("has_image_understanding", "has_audio_understanding", "model_type", "architectures"),
}
SERVER_INFO_KEYS = {
    *("model_path", "tokenizer_path", "tokenizer_mode", "skip_tokenizer_init", "load_format"),
    *("trust_remote_code", "context_length", "is_embedding", "dtype", "quantization", "kv_cache_dtype"),
    *("max_running_requests", "max_total_tokens", "chunked_prefill_size", "schedule_policy"),
    *("disable_radix_cache", "version", "internal_states", "max_total_num_tokens", "weight_version"),
}
MODEL_CARD_KEYS = ["id", "object", "created", "owned_by", "root", "parent", "max_model_len"]
LOAD_KEYS = {
    *("timestamp", "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens"),
    *("num_total_tokens", "max_total_num_tokens", "max_running_requests", "token_usage"),
    *("gen_throughput", "cache_hit_rate", "utilization"),
}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@pytest.fixture(scope="module", params=["scripted", "embedded"])
def server(request, tmp_path_factory):
    if request.param == "scripted":
        handle = scripted_server()
    else:
        handle = embedded_server(tmp_path_factory.mktemp("model"))
    with handle:
        yield handle


@pytest.fixture
def url(server):
    yield server.url
    ok(server.url, "/continue_generation", {})
    wait_for(lambda: running(server.url) == 0)


def generate(url, **fields):
    return ok(url, "/generate", {"input_ids": PROMPT, "sampling_params": greedy(8)} | fields)


def known(meta):
    """Keys in their order; a server with metrics has more."""
    return [key for key in meta if key in META_KEYS]


def long_request(tokens=ENDLESS, **fields):
    return {
        "input_ids": PROMPT[:4],
        "sampling_params": greedy(tokens),
        "return_logprob": True,
    } | fields


def test_an_answer_has_sglangs_keys_in_sglangs_order(url):
    answer = generate(url, return_logprob=True)
    assert list(answer) == ["text", "output_ids", "meta_info"]
    meta = answer["meta_info"]
    assert known(meta) == META_KEYS
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["prompt_tokens"] == meta["completion_tokens"] == meta["output_token_logprobs_length"] == 8
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 8}]
    assert meta["input_token_logprobs"] == []
    assert meta["num_retractions"] == meta["reasoning_tokens"] == 0


def test_log_probs_are_triples_of_value_id_and_null(url):
    answer = generate(url, return_logprob=True)
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == answer["output_ids"]
    assert all(value <= 0 and text is None for value, _, text in triples)


def test_text_in_log_probs_comes_only_when_asked_for(url):
    answer = generate(url, return_logprob=True, return_text_in_logprobs=True)
    assert all(isinstance(text, str) for *_, text in answer["meta_info"]["output_token_logprobs"])


def test_without_return_logprob_there_are_no_log_prob_keys(url):
    assert known(generate(url)["meta_info"]) == [key for key in META_KEYS if key not in LOGPROB_KEYS]


def test_prompt_log_probs_start_with_null_at_the_asked_position(url):
    for start in (0, 3):
        meta = generate(url, return_logprob=True, logprob_start_len=start)["meta_info"]
        entries = meta["input_token_logprobs"]
        assert [token for _, token, _ in entries] == PROMPT[start:]
        assert entries[0][0] is None
        assert all(value < 0 for value, *_ in entries[1:])


def test_a_prompt_is_scored_with_no_new_tokens(url):
    answer = generate(url, sampling_params=greedy(0), return_logprob=True, logprob_start_len=0)
    assert answer["output_ids"] == []
    assert answer["text"] == ""
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["weight_versions"][0]["end"] == 0
    assert len(meta["input_token_logprobs"]) == len(PROMPT)


def test_top_log_probs_have_as_many_entries_as_asked_for(url):
    meta = generate(url, return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 8
    assert meta["output_top_logprobs"][0][0][:2] == meta["output_token_logprobs"][0][:2]


def test_a_prompt_seen_before_is_cached_up_to_its_last_token(url):
    prompt = [50 + k for k in range(20)]
    generate(url, input_ids=prompt)
    meta = generate(url, input_ids=prompt)["meta_info"]
    assert meta["cached_tokens"] == 19
    assert meta["cached_tokens_details"] == {"device": 19, "host": 0}


def test_a_flushed_cache_holds_no_prefix(url):
    generate(url)
    assert call(url, "/flush_cache", {})[0] == call(url, "/flush_cache")[0] == 200
    meta = generate(url)["meta_info"]
    assert meta["cached_tokens"] == 0
    assert meta["cached_tokens_details"] is None


def test_text_is_encoded_as_the_tokenizer_does(url):
    assert generate(url, input_ids=None, text="hello")["meta_info"]["prompt_tokens"] == 5


def test_a_stop_token_ends_the_answer_and_is_kept_in_the_ids(url):
    prompts = [[40 + k, *PROMPT] for k in range(30)]
    answers = generate(url, input_ids=prompts, sampling_params=greedy(8))
    prompt, full = next(
        (prompt, answer["output_ids"])
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(set(answer["output_ids"][:2])) == 2
    )
    stopping = greedy(8, stop_token_ids=[full[1]], ignore_eos=False)
    answer = generate(url, input_ids=prompt, sampling_params=stopping)
    assert answer["output_ids"] == full[:2]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": full[1]}


def test_who_ignores_the_end_ignores_stop_tokens_too(url):
    full = generate(url)["output_ids"]
    assert generate(url, sampling_params=greedy(8, stop_token_ids=full))["output_ids"] == full


def test_a_seed_gives_the_same_answer_again(url):
    seeded = greedy(8) | {"temperature": 1, "sampling_seed": 3}
    first, again = (generate(url, sampling_params=seeded)["output_ids"] for _ in range(2))
    assert first == again


def test_a_batch_has_its_own_parameters_for_each_prompt_and_answers_in_order(url):
    answers = generate(
        url,
        input_ids=[PROMPT, PROMPT[:3]],
        sampling_params=[greedy(3), greedy(2)],
        return_logprob=[True, False],
        rid=["left", "right"],
    )
    assert [len(answer["output_ids"]) for answer in answers] == [3, 2]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [8, 3]
    assert [answer["meta_info"]["id"] for answer in answers] == ["left", "right"]
    assert ["output_token_logprobs" in answer["meta_info"] for answer in answers] == [True, False]


def test_a_batch_of_one_answers_with_a_list(url):
    assert len(generate(url, input_ids=[PROMPT])) == 1


def test_n_gives_a_list_of_answers_of_one_prompt(url):
    answers = generate(url, sampling_params=greedy(3, n=2), rid="twice")
    assert len(answers) == 2
    assert answers[0]["output_ids"] == answers[1]["output_ids"]


def test_answers_of_one_prompt_are_named_after_the_request(url):
    answers = generate(url, sampling_params=greedy(3, n=2), rid="twice")
    assert [answer["meta_info"]["id"] for answer in answers] == ["twice_0", "twice_1"]


def test_unknown_top_level_fields_are_ignored(url):
    assert len(generate(url, foo=1, return_routed_experts=True)["output_ids"]) == 8


def test_a_stream_is_cumulative_and_ends_with_done(url):
    *chunks, done = events(
        url,
        "/generate",
        {"input_ids": PROMPT, "sampling_params": greedy(8), "stream": True, "return_logprob": True},
    )
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    for before, after in pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
        assert after["text"].startswith(before["text"])
    last = chunks[-1]
    assert known(last["meta_info"]) == META_KEYS
    assert last["output_ids"] == generate(url)["output_ids"]
    assert len(last["meta_info"]["output_token_logprobs"]) == 8
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_chunks_of_a_streamed_batch_carry_the_index(url):
    *chunks, done = events(
        url, "/generate", {"input_ids": [PROMPT, PROMPT[:2]], "sampling_params": greedy(3), "stream": True}
    )
    assert done == "[DONE]"
    ended = [json.loads(chunk) for chunk in chunks if json.loads(chunk)["meta_info"]["finish_reason"]]
    assert sorted(chunk["index"] for chunk in ended) == [0, 1]


def test_abort_by_rid_gives_what_there_is(url):
    future = later(url, "/generate", long_request(rid="long"))
    wait_for(lambda: running(url) == 1)
    assert ok(url, "/abort_request", {"rid": "long"}) == ""
    answer = future.result()
    assert answer["meta_info"]["finish_reason"] == ABORT
    count = len(answer["output_ids"])
    assert count < ENDLESS
    assert len(answer["meta_info"]["output_token_logprobs"]) == count


def test_abort_by_the_name_of_a_batch_ends_all_of_it(url):
    future = later(url, "/generate", long_request(input_ids=[[60, 61], [62, 63]], rid="both"))
    wait_for(lambda: running(url) == 2)
    ok(url, "/abort_request", {"rid": "both"})
    assert [answer["meta_info"]["finish_reason"] for answer in future.result()] == [ABORT, ABORT]


def test_abort_all_ends_every_request(url):
    futures = [later(url, "/generate", long_request()) for _ in range(3)]
    wait_for(lambda: running(url) == 3)
    ok(url, "/abort_request", {"abort_all": True})
    assert {future.result()["meta_info"]["finish_reason"]["type"] for future in futures} == {"abort"}


def test_abort_of_an_unknown_rid_is_fine(url):
    assert ok(url, "/abort_request", {"rid": "nobody"}) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_aborts_its_request(url, stream):
    body = long_request(rid="gone", stream=stream)
    send_and_hang_up(url, "/generate", body, until=lambda: running(url) == 1)
    wait_for(lambda: running(url) == 0)
    assert generate(url, rid="gone")["meta_info"]["id"] == "gone"


def test_a_rid_in_flight_is_refused_a_second_time(url):
    future = later(url, "/generate", long_request(rid="same"))
    wait_for(lambda: running(url) == 1)
    status, answer = call(url, "/generate", long_request(rid="same"))
    assert status == 400
    assert answer["error"]["message"] == "Duplicate request ID detected: same"
    ok(url, "/abort_request", {"rid": "same"})
    future.result()


def test_a_pause_aborts_what_runs_and_holds_what_comes(url):
    future = later(url, "/generate", long_request())
    wait_for(lambda: running(url) == 1)
    paused = ok(url, "/pause_generation", {})
    assert paused == {"message": "Generation paused successfully.", "status": "ok"}
    assert future.result()["meta_info"]["finish_reason"] == ABORT
    held = later(url, "/generate", {"input_ids": PROMPT, "sampling_params": greedy(4)})
    with pytest.raises(TimeoutError):
        held.result(timeout=0.5)
    continued = ok(url, "/continue_generation", {})
    assert continued == {"message": "Generation continued successfully.", "status": "ok"}
    assert len(held.result()["output_ids"]) == 4


@pytest.mark.parametrize(("mode", "flush_status", "retractions"), [("in_place", 400, 0), ("retract", 200, 1)])
def test_a_request_goes_on_after_a_pause_with_two_version_spans(url, mode, flush_status, retractions):
    if mode == "retract" and ok(url, "/model_info")["model_type"] == "scripted":
        flush_status = 400  # the scripted engine has no memory that a retraction would free
    ok(url, "/update_weight_version", {"new_version": OLD})
    future = later(url, "/generate", long_request(LONG))
    wait_for(lambda: running(url) == 1)
    ok(url, "/pause_generation", {"mode": mode})
    status, text = call(url, "/flush_cache", {})
    assert status == flush_status
    assert text.startswith("Cache flushed.\n" if status == 200 else "Flush cache failed.\n")
    ok(url, "/update_weight_version", {"new_version": f"after-{mode}", "abort_all_requests": False})
    ok(url, "/continue_generation", {})
    meta = future.result()["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": LONG}
    assert meta["num_retractions"] == retractions
    spans = meta["weight_versions"]
    assert [span["version"] for span in spans][-1] == f"after-{mode}"
    assert spans[0]["start"] == 0
    assert spans[-1]["end"] == LONG
    assert all(left["end"] == right["start"] for left, right in pairwise(spans))


def test_flush_is_refused_while_a_request_runs(url):
    future = later(url, "/generate", long_request(rid="busy"))
    wait_for(lambda: running(url) == 1)
    status, text = call(url, "/flush_cache", {})
    assert status == 400
    assert text.startswith("Flush cache failed.\n")
    ok(url, "/abort_request", {"rid": "busy"})
    future.result()


def test_a_new_version_ends_what_runs_unless_told_not_to(url):
    future = later(url, "/generate", long_request())
    wait_for(lambda: running(url) == 1)
    ok(url, "/update_weight_version", {"new_version": "v6"})
    assert future.result()["meta_info"]["finish_reason"] == ABORT


def test_an_engine_that_generates_is_healthy(url):
    paths = ("/health_generate", "/health", "/ping")
    wait_for(lambda: [call(url, path)[0] for path in paths] == [200] * 3)


def test_a_paused_engine_generates_no_health(url):
    ok(url, "/pause_generation", {"mode": "in_place"})
    assert call(url, "/health_generate")[0] == 503


def test_a_paused_engine_is_healthy(url):
    ok(url, "/pause_generation", {"mode": "in_place"})
    assert [call(url, path)[0] for path in ("/health", "/ready")] == [200] * 2


def test_weight_version_is_told_everywhere(url):
    body = {"new_version": "v7", "abort_all_requests": False}
    assert ok(url, "/update_weight_version", body)["new_version"] == "v7"
    assert ok(url, "/model_info")["weight_version"] == "v7"
    assert generate(url)["meta_info"]["weight_version"] == "v7"


def test_memory_is_released_and_comes_back(url):
    assert ok(url, "/release_memory_occupation", {"tags": ["kv_cache"]}) is None
    assert ok(url, "/resume_memory_occupation", {"tags": ["kv_cache"]}) is None
    assert len(generate(url)["output_ids"]) == 8


def test_info_routes_have_sglangs_keys(url):
    assert ok(url, "/model_info").keys() >= MODEL_INFO_KEYS
    assert ok(url, "/get_model_info") == ok(url, "/model_info")
    info = ok(url, "/server_info")
    assert info.keys() >= SERVER_INFO_KEYS
    assert info.keys() == ok(url, "/get_server_info").keys()
    assert info["context_length"] == 512
    assert info["max_total_num_tokens"] == 4096
    models = ok(url, "/v1/models")
    assert list(models) == ["object", "data"]
    assert list(models["data"][0]) == MODEL_CARD_KEYS


def test_the_load_has_sglangs_keys(url):
    assert ok(url, "/v1/loads")["loads"][0].keys() >= LOAD_KEYS


def test_an_unknown_path_is_404(url):
    assert call(url, "/nowhere") == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("params", [{"temperature": -1}, {"top_p": 5}, {"max_new_tokens": -1}])
def test_a_bad_sampling_parameter_is_a_400_that_names_it(url, params):
    status, answer = call(url, "/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 400
    assert next(iter(params)) in answer["error"]["message"]


def test_an_empty_prompt_is_a_400(url):
    status, answer = call(url, "/generate", {"input_ids": []})
    assert status == 400
    assert answer["error"]["message"] == "input_ids cannot be empty."


def test_a_prompt_beyond_the_context_is_a_400(url):
    status, answer = call(url, "/generate", {"input_ids": [5] * 600})
    assert status == 400
    assert "longer than the model's context length (512 tokens)" in answer["error"]["message"]


def test_an_unknown_sampling_parameter_is_a_400_that_names_it(url):
    status, answer = call(url, "/generate", {"input_ids": PROMPT, "sampling_params": {"foo": 5}})
    assert status == 400
    assert "unknown field `foo`, expected one of `max_new_tokens`" in str(answer["error"])


def test_an_unknown_pause_mode_is_a_400(url):
    assert call(url, "/pause_generation", {"mode": "stop"})[0] == 400


def test_the_server_answers_after_all_of_this(url):
    assert len(generate(url)["output_ids"]) == 8
