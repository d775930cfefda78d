"""What engines of ours refuse, and in which words: each names the field and its range."""

import pytest

from tests.serving.engines import PROMPT, embedded_server, scripted_server
from tests.serving.wire import call, ok


@pytest.fixture(scope="module", params=["scripted", "embedded"])
def url(request, tmp_path_factory):
    embedded = request.param == "embedded"
    with embedded_server(tmp_path_factory.mktemp("model")) if embedded else scripted_server() as handle:
        yield handle.url


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
    answer = ok(
        url, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    )
    assert len(answer["output_ids"]) == 8
