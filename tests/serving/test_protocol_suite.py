"""SGLang's native protocol, held to by the scripted and by the embedded engine alike."""

import json
from itertools import pairwise

import pytest

from tests.serving.engines import LONG, PROMPT, embedded_server, greedy, scripted_server
from tests.serving.wire import (
    call,
    events,
    later,
    load,
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


def long_request(**fields):
    return {
        "input_ids": PROMPT[:4],
        "sampling_params": greedy(LONG),
        "return_logprob": True,
    } | fields


def test_an_answer_has_sglangs_keys_in_sglangs_order(url):
    answer = generate(url, return_logprob=True)
    assert list(answer) == ["text", "output_ids", "meta_info"]
    meta = answer["meta_info"]
    assert list(meta) == META_KEYS
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
    assert list(generate(url)["meta_info"]) == [key for key in META_KEYS if key not in LOGPROB_KEYS]


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
    seeded = greedy(8) | {"temperature": 1, "sampling_seed": 3}
    full = generate(url, sampling_params=seeded)["output_ids"]
    stop = next(token for index, token in enumerate(full) if index and token not in full[:index])
    answer = generate(url, sampling_params=seeded | {"stop_token_ids": [stop]})
    assert answer["output_ids"] == full[: full.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


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
    assert [answer["meta_info"]["id"] for answer in answers] == ["twice_0", "twice_1"]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]


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
    assert list(last["meta_info"]) == META_KEYS
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
    assert count < LONG
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
    assert "'same' is already in flight" in answer["error"]["message"]
    ok(url, "/abort_request", {"rid": "same"})
    future.result()


def test_a_pause_aborts_what_runs_and_holds_what_comes(url):
    future = later(url, "/generate", long_request())
    wait_for(lambda: running(url) == 1)
    paused = ok(url, "/pause_generation", {})
    assert paused == {"message": "Generation paused successfully.", "status": "ok"}
    assert future.result()["meta_info"]["finish_reason"] == ABORT
    held = later(url, "/generate", {"input_ids": PROMPT, "sampling_params": greedy(4)})
    wait_for(lambda: load(url)["num_waiting_reqs"] == 1)
    assert not held.done()
    continued = ok(url, "/continue_generation", {})
    assert continued == {"message": "Generation continued successfully.", "status": "ok"}
    assert len(held.result()["output_ids"]) == 4


@pytest.mark.parametrize(("mode", "flush_status", "retractions"), [("in_place", 400, 0), ("retract", 200, 1)])
def test_a_request_goes_on_after_a_pause_with_two_version_spans(url, mode, flush_status, retractions):
    if mode == "retract" and ok(url, "/model_info")["model_type"] == "scripted":
        flush_status = 400  # the scripted engine has no memory that a retraction would free
    ok(url, "/update_weight_version", {"new_version": "before"})
    future = later(url, "/generate", long_request())
    wait_for(lambda: running(url) == 1)
    ok(url, "/pause_generation", {"mode": mode})
    status, text = call(url, "/flush_cache", {})
    assert status == flush_status
    assert text == ("Cache flushed.\n" if status == 200 else "Flush cache failed.\n")
    ok(url, "/update_weight_version", {"new_version": f"after-{mode}"})
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
    assert call(url, "/flush_cache", {}) == (400, "Flush cache failed.\n")
    ok(url, "/abort_request", {"rid": "busy"})
    future.result()


def test_a_paused_engine_is_healthy_but_does_not_generate(url):
    assert call(url, "/health_generate")[0] == 200
    ok(url, "/pause_generation", {"mode": "in_place"})
    assert [call(url, path)[0] for path in ("/health", "/ready", "/ping")] == [200] * 3
    assert call(url, "/health_generate")[0] == 503


def test_weight_version_is_told_everywhere(url):
    body = {"new_version": "v7", "abort_all_requests": False}
    assert ok(url, "/update_weight_version", body)["new_version"] == "v7"
    assert ok(url, "/model_info")["weight_version"] == "v7"
    assert ok(url, "/server_info")["weight_version"] == "v7"
    assert generate(url)["meta_info"]["weight_version"] == "v7"


def test_memory_is_released_and_comes_back(url):
    assert ok(url, "/release_memory_occupation", {"tags": ["kv_cache"]}) is None
    assert ok(url, "/resume_memory_occupation", b"", method="POST") is None
    assert len(generate(url)["output_ids"]) == 8


def test_info_routes_have_sglangs_keys(url):
    assert ok(url, "/model_info").keys() == MODEL_INFO_KEYS
    assert ok(url, "/get_model_info") == ok(url, "/model_info")
    info = ok(url, "/server_info")
    assert info.keys() >= SERVER_INFO_KEYS
    assert info.keys() == ok(url, "/get_server_info").keys()
    assert info["context_length"] == 512
    assert info["max_total_num_tokens"] == 4096
    models = ok(url, "/v1/models")
    assert list(models) == ["object", "data"]
    assert list(models["data"][0]) == MODEL_CARD_KEYS
    assert load(url).keys() == LOAD_KEYS


def test_an_unknown_path_is_404(url):
    assert call(url, "/get_load") == (404, {"detail": "Not Found"})


SAMPLING_ERRORS = [
    ({"temperature": -1}, "temperature must be at least 0"),
    ({"temperature": "hot"}, "temperature must be"),
    ({"top_p": 5}, "top_p must be in (0, 1], got 5."),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
    ({"top_k": 0}, "top_k must be -1 (all) or at least 1, got 0."),
    ({"top_k": 1.5}, "top_k must be"),
    ({"min_p": 2}, "min_p must be in [0, 1], got 2."),
    ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2], got 3."),
    ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2], got -3."),
    ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2], got 0."),
    ({"max_new_tokens": -1}, "max_new_tokens must be a whole number, at least 0, got -1."),
    ({"max_new_tokens": True}, "max_new_tokens must be"),
    ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens must be in [0, max_new_tokens(3)], got 4."),
    ({"max_new_tokens": 505}, "maximum context length of 512 tokens. You requested a total of 513"),
    ({"n": 0}, "n must be a whole number in [1, 4096], got 0."),
    ({"stop": [""]}, "stop must be a non-empty string"),
    ({"stop": 7}, "stop must be a non-empty string"),
    ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids"),
    ({"stop_token_ids": [259]}, "stop_token_ids must be in [0, 259), the vocabulary; got 259."),
    ({"logit_bias": {"x": 1}}, "logit_bias must map token ids to numbers"),
    ({"logit_bias": {"300": 1}}, "logit_bias must be in [0, 259)"),
    ({"sampling_seed": -1}, "sampling_seed must be a whole number in [0, 2^63), got -1."),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1."),
    ({"json_schema": "{}"}, "json_schema is not supported by the embedded engine"),
    ({"foo": 5}, "unknown field `foo`, expected one of `max_new_tokens`, "),
]


@pytest.mark.parametrize(("params", "message"), SAMPLING_ERRORS)
def test_a_bad_sampling_parameter_is_a_400_that_names_it_and_its_range(url, params, message):
    status, answer = call(url, "/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert status == 400
    assert message in answer["error"]["message"]


BODY_ERRORS = [
    ({}, "Either text or input_ids should be provided."),
    ({"text": "a", "input_ids": [5]}, "not both"),
    ({"input_ids": []}, "input_ids cannot be empty."),
    ({"input_ids": [[5], []]}, "input_ids cannot be empty."),
    ({"input_ids": [[]]}, "input_ids cannot be empty."),
    ({"input_ids": "5"}, "input_ids must be a list"),
    ({"input_ids": [5, [6]]}, "input_ids mixes token ids and lists."),
    ({"input_ids": [5, 259]}, "input_ids must be in [0, 259), the vocabulary; got 259."),
    ({"input_ids": [5, -1]}, "input_ids must be in [0, 259), the vocabulary; got -1."),
    ({"input_ids": [5, 2.0]}, "input_ids must hold whole numbers, got 2.0."),
    ({"input_ids": [True]}, "input_ids must hold whole numbers, got True."),
    (
        {"input_ids": [5] * 600},
        "The input (600 tokens) is longer than the model's context length (512 tokens).",
    ),
    ({"text": ""}, "text cannot be empty."),
    ({"text": 5}, "text must be a string"),
    ({"text": []}, "text must be a string or a non-empty list of strings."),
    ({"input_ids": [5], "sampling_params": 5}, "sampling_params must be an object, got 5."),
    ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "sampling_params has 1 items for 2 prompts."),
    ({"input_ids": [[5], [6]], "rid": ["a"]}, "rid has 1 items for 2 prompts."),
    ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "rid holds the same name twice."),
    ({"input_ids": [5], "rid": 7}, "rid must be a non-empty string or a list of them, got 7."),
    ({"input_ids": [5], "stream": "yes"}, "stream must be true or false, got 'yes'."),
    ({"input_ids": [5], "return_logprob": 1}, "return_logprob must be true or false, got 1."),
    ({"input_ids": [5], "logprob_start_len": 1}, "logprob_start_len must be below the prompt's 1 tokens"),
    ({"input_ids": [5], "logprob_start_len": -2}, "logprob_start_len must be a whole number, at least -1"),
    ({"input_ids": [5], "top_logprobs_num": -1}, "top_logprobs_num must be a whole number in [0, 100]"),
    ({"input_ids": [5], "return_hidden_states": True}, "return_hidden_states is not supported"),
    ({"input_ids": [5], "image_data": "x"}, "image_data is not supported"),
    ([], "the body must be a JSON object, got list."),
    (b"{", "the body is not JSON"),
    (b"", "the request has no body"),
]


@pytest.mark.parametrize(("body", "message"), BODY_ERRORS)
def test_a_bad_body_is_a_400_that_names_the_field(url, body, message):
    status, answer = call(url, "/generate", body)
    assert status == 400
    assert message in answer["error"]["message"]


CONTROL_ERRORS = [
    ("/abort_request", {}, "rid must be a non-empty string or a list of them, got None; or abort_all."),
    ("/pause_generation", b"", "the request has no body"),
    ("/pause_generation", {"mode": "stop"}, "mode must be one of abort, in_place, retract; got 'stop'."),
    (
        "/release_memory_occupation",
        {"tags": ["x"]},
        "tags must be a list out of kv_cache, weights, cuda_graph",
    ),
    ("/update_weight_version", {}, "new_version must be a non-empty string, got None."),
    ("/update_weights_from_disk", {}, "model_path must be a folder, got None."),
    (
        "/update_weights_from_disk",
        {"model_path": "x", "weight_version": 1},
        "weight_version must be a string",
    ),
    ("/end_weight_update", {}, "no weight update has begun"),
]


@pytest.mark.parametrize(("path", "body", "message"), CONTROL_ERRORS)
def test_a_bad_control_call_is_a_400_that_says_what_is_wrong(url, path, body, message):
    status, answer = call(url, path, body)
    assert status == 400
    assert message in answer["error"]["message"]


def test_the_server_answers_after_all_of_this(url):
    assert len(generate(url)["output_ids"]) == 8
