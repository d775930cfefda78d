"""/v1/chat/completions over the scripted engine: template, shapes, streaming, refusals."""

import json

import pytest

from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from tests.serving.wire import call, events, ok
from tests.tiny import tiny_tokenizer

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say hé"}]
RENDERED = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nsay hé<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def server():
    with start_scripted_server(lambda call: ScriptedAnswer(text="hé!"), tiny_tokenizer()) as handle:
        yield handle


def chat(server, **fields):
    return ok(server.url, "/v1/chat/completions", {"messages": MESSAGES} | fields)


def test_the_prompt_is_what_the_template_renders(server):
    answer = chat(server, return_prompt_token_ids=True)
    assert server.engine.calls[-1].prompt == RENDERED
    ids = answer["choices"][0]["prompt_token_ids"]
    assert ids == tiny_tokenizer().encode(RENDERED)
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "say "}, {"type": "text", "text": "hé"}]
    chat(server, messages=[MESSAGES[0], {"role": "user", "content": parts}])
    assert server.engine.calls[-1].prompt == RENDERED


def test_an_answer_has_openais_shape(server):
    answer = chat(server)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage", "metadata"]
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "scripted"
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "hé!", "reasoning_content": None, "tool_calls": None},
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": 2,
    }
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 5
    assert answer["metadata"]["weight_version"] == "default"


def test_parameters_reach_the_engine_under_sglangs_names(server):
    chat(
        server, max_tokens=7, temperature=0.5, top_p=0.9, seed=3, stop="x", min_tokens=1, logit_bias={"5": 1}
    )
    params = server.engine.calls[-1].params
    assert (params.max_new_tokens, params.min_new_tokens, params.sampling_seed) == (7, 1, 3)
    assert (params.temperature, params.top_p, params.stop) == (0.5, 0.9, ("x",))
    assert params.logit_bias == {5: 1.0}


def test_without_a_limit_the_answer_may_fill_the_context(server):
    chat(server)
    request = server.engine.calls[-1]
    assert request.params.max_new_tokens == server.engine.context_length - len(request.input_ids)


def test_a_limit_ends_the_answer_with_length(server):
    assert chat(server, max_completion_tokens=1)["choices"][0]["finish_reason"] == "length"


def test_log_probs_name_each_token_with_its_bytes(server):
    choice = chat(server, logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 5
    assert content[0]["token"] == "h"
    assert content[0]["bytes"] == [104]
    assert content[0]["logprob"] < 0
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 5


def test_meta_info_carries_the_token_ids_log_probs(server):
    choice = chat(server, logprobs=True, return_meta_info=True)["choices"][0]
    triples = choice["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == [*tiny_tokenizer().encode("hé!"), 2]


def test_n_answers_count_the_prompt_once(server):
    answer = chat(server, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 15


def test_a_stream_gives_increments_that_add_up(server):
    *chunks, done = events(
        server.url,
        "/v1/chat/completions",
        {"messages": MESSAGES, "stream": True, "logprobs": True, "stream_options": {"include_usage": True}},
    )
    assert done == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    *with_choice, usage = chunks
    choices = [chunk["choices"][0] for chunk in with_choice]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices) == "hé!"
    assert sum(len(choice["logprobs"]["content"]) for choice in choices[1:]) == 5
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools are not supported by the embedded engine"),
        ({"response_format": {"type": "json_object"}}, "response_format must be"),
        ({"messages": []}, "messages must be a non-empty list."),
        ({"messages": [{"content": "x"}]}, "messages[0] must be an object with a role."),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content may hold text parts only",
        ),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"top_logprobs": 50}, "top_logprobs must be a whole number in [0, 20]"),
        ({"stream_options": 5}, "stream_options must be an object, got 5."),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be an object, got 5."),
    ],
)
def test_a_bad_chat_body_is_a_400_that_says_what_is_wrong(server, fields, message):
    status, answer = call(server.url, "/v1/chat/completions", {"messages": MESSAGES} | fields)
    assert status == 400
    assert message in answer["error"]["message"]


def test_messages_that_the_template_refuses_are_a_400():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with start_scripted_server(lambda call: ScriptedAnswer(), tokenizer) as handle:
        status, answer = call(handle.url, "/v1/chat/completions", {"messages": MESSAGES})
    assert status == 400
    assert "roles must alternate" in answer["error"]["message"]


def test_a_tokenizer_without_a_template_is_a_400_that_says_so():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with start_scripted_server(lambda call: ScriptedAnswer(), tokenizer) as handle:
        status, answer = call(handle.url, "/v1/chat/completions", {"messages": MESSAGES})
    assert status == 400
    assert "has no chat template; use /generate" in answer["error"]["message"]
