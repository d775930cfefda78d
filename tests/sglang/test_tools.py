"""Tool calls of a model that real SGLang serves: through our adapters, and through SGLang's own."""

import asyncio
import json
import urllib.request

import pytest
from transformers import AutoTokenizer

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.sglang.model import ANSWER, CALL, REASONING

SID = "session-1"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "read", "description": "R", "parameters": SCHEMA}}
MESSAGES_TOOL = {"name": "read", "description": "R", "input_schema": SCHEMA}
QUESTION = [{"role": "user", "content": "Read a.txt"}]


@pytest.fixture(scope="module")
def tokenizer(sglang_model):
    return AutoTokenizer.from_pretrained(sglang_model)


@pytest.fixture
def adapter(request, server, tokenizer):
    """An adapter of the wanted class before the server, its URL, and what ends its session."""
    made = request.param(tokenizer=tokenizer, sglang_url=server.url)
    made.open_session(SID, sampling_defaults={"max_new_tokens": 32})
    handle = run_app_in_thread(made.app)
    yield made, handle.url
    handle.stop()


def post(url, path, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SID}"}
    with urllib.request.urlopen(
        urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    ) as answer:
        return json.load(answer)


def trained(adapter, tokenizer):
    """The one sample of the session, and the text of what trains."""
    (sample,) = asyncio.run(adapter.finish_session(SID, base_sample=Sample(index=0), reward=1.0))
    response = sample.tokens[-sample.response_length :]
    kept = [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
    assert len(sample.rollout_log_probs) == sample.response_length
    return tokenizer.decode(kept)


@pytest.mark.parametrize("adapter", [OpenAIAdapter], indirect=True)
def test_chat_completions_have_the_call_and_train_what_was_sampled(adapter, tokenizer):
    made, url = adapter
    body = {"model": "m", "messages": QUESTION, "tools": [CHAT_TOOL]}
    choice = post(url, "/v1/chat/completions", body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "read",
        {"path": "a.txt"},
    )
    assert trained(made, tokenizer) == "".join(ANSWER)


@pytest.mark.parametrize("adapter", [AnthropicAdapter], indirect=True)
def test_messages_have_the_call_and_go_on_behind_its_result(adapter, tokenizer):
    made, url = adapter
    body = {"model": "m", "max_tokens": 32, "messages": QUESTION, "tools": [MESSAGES_TOOL]}
    first = post(url, "/v1/messages", body)
    kinds = [block["type"] for block in first["content"]]
    assert (kinds, first["stop_reason"]) == (["thinking", "tool_use"], "tool_use")
    thinking, call = first["content"]
    assert thinking["thinking"].strip() == REASONING
    assert (call["name"], call["input"]) == ("read", {"path": "a.txt"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "hello"}
    later = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    assert post(url, "/v1/messages", body | {"messages": [*QUESTION, *later]})["stop_reason"] == "tool_use"
    assert trained(made, tokenizer) == "".join(ANSWER) * 2


def test_sglangs_own_chat_route_finds_the_same_call(server):
    body = {"model": "m", "messages": QUESTION, "tools": [CHAT_TOOL], "max_tokens": 32}
    message = post(server.url, "/v1/chat/completions", body)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == json.loads(CALL)["arguments"]
    assert message["reasoning_content"].strip() == REASONING
