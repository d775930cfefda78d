"""Images of clients: which pass, how they are refused, and what the engine and the samples get."""

import asyncio

import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.adapters import images as gate
from slime.errors import ConfigError, DataError
from slime.rollout.convert import to_train_samples
from slime.serving.scripted import ScriptedAnswer, start_scripted_server
from slime.utils.engine_client import EngineClient
from tests.agent.adapters.test_base import start
from tests.agent.drift.script import picture
from tests.agent.kit import SID, TOOL, read_until, served
from tests.agent.templates import family_tokenizer

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
A, B, C = map(picture, "ABC")


def chat(*urls, text="see"):
    parts = [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": u}} for u in urls)]
    return {"role": "user", "content": parts}


def vision(answers, kind=OpenAIAdapter, *, family="qwen_vl", engine=None, **options):
    return served(kind, answers, family=family, engine={"takes_images": True} | (engine or {}), **options)


def refusal(server, url, *, path=CHAT, body=None):
    status, answer = server.post(path, body or {"messages": [chat(url)]})
    assert not server.engine.calls
    return status, answer["error"]["message"]


def anthropic(url):
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    source = {"type": "base64", "media_type": kind, "data": data}
    return {"role": "user", "content": [{"type": "image", "source": source}]}


in_each_protocol = pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (OpenAIAdapter, CHAT, {"messages": [chat(A)]}),
        (
            OpenAIAdapter,
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": A}]}]},
        ),
        (AnthropicAdapter, MESSAGES, {"messages": [anthropic(A)], "max_tokens": 99}),
    ],
)


@in_each_protocol
@pytest.mark.parametrize("stream", [False, True])
def test_each_protocol_gives_the_engine_one_placeholder_and_the_image(kind, path, body, stream):
    with vision(["A picture."], kind) as server:
        status, raw, _ = server.raw(path, body | {"model": "m", "stream": stream})
        assert status == 200 and (stream or b"A picture." in raw)
        (call,) = server.engine.calls
        assert call.images == (A,)
        assert call.prompt.count(VISION) == 1
        (sample,) = server.finish()
    assert sample.multimodal_inputs == {"images": [A]}
    assert sum(sample.loss_mask) == len(server.sampled[0])


@in_each_protocol
def test_a_model_of_text_refuses_them_in_each_protocol(kind, path, body):
    with served(kind, [], family="qwen3") as server:
        status, told = refusal(server, A, path=path, body=body)
        assert status == 400 and "messages[0] holds an image: this model takes text only" in told


def test_the_owner_may_refuse_them_though_the_template_shows_them():
    with vision([], accepts_images=False) as server:
        assert "messages[0] holds an image: this model takes text only" in refusal(server, A)[1]


def test_the_owner_cannot_accept_what_the_template_does_not_show():
    with pytest.raises(ConfigError, match="accepts_images"), served(OpenAIAdapter, [], accepts_images=True):
        pass


def test_an_engine_that_takes_no_images_is_not_sent_any():
    with vision([], engine={"takes_images": False}) as server:
        status, told = refusal(server, A)
        assert status == 400 and "the engine's model takes text only" in told


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "/etc/shadow.png",
        "../secret.png",
        "DATA:image/png;base64,AAAA",
        "data:text/plain;base64,AAAA",
        "data:image/svg+xml;base64,AAAA",
        "data:image/png,/../../secret.png",
        "video:abc",
        "AAAA",
        "ftp://host/x.png",
        "http://",
        "http://host/a b.png",
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_nothing_makes_the_engine_read_files(url, allowed):
    with vision([], allow_image_urls=allowed) as server:
        status, told = refusal(server, url)
        assert status == 400 and "messages[0] holds an image by" in told


@pytest.mark.parametrize("url", ["data:image/png;base64,/../../secret.png", "data:image/png;base64,AAA"])
def test_data_must_be_base64(url):
    with vision([]) as server:
        status, told = refusal(server, url)
        assert status == 400 and "messages[0] holds an image that is no base64" in told
        assert "empty" in refusal(server, "data:image/png;base64,")[1]


def test_the_engine_fetches_urls_only_where_the_owner_allowed_it():
    url = "http://169.254.169.254/latest/x.png"
    with vision([]) as server:
        status, told = refusal(server, url)
        assert status == 400 and "allow_image_urls=True" in told
    with vision(["ok"], allow_image_urls=True) as server:
        assert server.post(CHAT, {"messages": [chat(url)]})[0] == 200
        assert server.engine.calls[0].images == (url,)


def test_number_and_size_are_bounded(monkeypatch):
    monkeypatch.setattr(gate, "MAX_IMAGES", 2)
    with vision(["ok", "ok"]) as server:
        status, told = refusal(server, A, body={"messages": [chat(A, B, C)]})
        assert status == 413 and "3 images" in told
        monkeypatch.setattr(gate, "MAX_IMAGE_BYTES", 20)
        assert refusal(server, A)[0] == 413
        monkeypatch.setattr(gate, "MAX_IMAGE_BYTES", 2000)
        monkeypatch.setattr(gate, "MAX_PROMPT_BYTES", len(A))
        assert refusal(server, A, body={"messages": [chat(A, B)]})[0] == 413
        assert server.post(CHAT, {"messages": [chat(A)]})[0] == 200


def test_images_of_earlier_responses_count(monkeypatch):
    monkeypatch.setattr(gate, "MAX_IMAGES", 2)
    image = {"role": "user", "content": [{"type": "input_image", "image_url": A}]}
    with vision(["ok"] * 3) as server:
        last = None
        for expected in (200, 200, 413):
            body = {"input": [image], "previous_response_id": last}
            status, answer = server.post(RESPONSES, body)
            assert status == expected
            last = answer.get("id")
        assert [call.images for call in server.engine.calls] == [(A,), (A, A)]


@pytest.mark.parametrize("text", ["<|image_pad|>", f"x{VISION}y"])
@pytest.mark.parametrize("image_first", [True, False])
def test_text_cannot_pass_for_an_image(text, image_first):
    """In ids it is text, but an engine that reads the prompt's text would give it another's image."""
    messages = [chat(A), {"role": "assistant", "content": "ok"}, {"role": "user", "content": text}]
    if not image_first:
        messages = [messages[2], messages[1], messages[0]]
    with vision(["ok", "ok"]) as server:
        status, told = refusal(server, A, body={"messages": messages})
        assert status == 400 and "'<|image_pad|>'" in told
        alone = {"messages": [{"role": "user", "content": text}]}
        assert server.post(CHAT, alone)[0] == 200
        (call,) = server.engine.calls
        pad = server.adapter.model.template.encode("<|image_pad|>")[0]
        assert pad not in call.input_ids and not call.images and text in call.prompt


def test_a_placeholder_that_the_model_sampled_takes_no_ones_image():
    with vision(["I say <|image_pad|>.", "ok"]) as server:
        question = [{"role": "user", "content": "go"}]
        _, answer = server.post(CHAT, {"messages": question})
        said = answer["choices"][0]["message"]
        status, answer = server.post(CHAT, {"messages": [*question, said, chat(A)]})
        assert status == 400 and "2 times '<|image_pad|>'" in answer["error"]["message"]
        assert server.post(CHAT, {"messages": [*question, said, chat()]})[0] == 200


def test_a_templates_own_limits_are_told():
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    told = {"role": "tool", "tool_call_id": "c1", "content": chat(A)["content"]}
    messages = [chat(), {"role": "assistant", "content": None, "tool_calls": [call]}, told]
    with vision([], family="pixtral") as server:
        status, words = refusal(server, A, body={"messages": messages, "tools": [TOOL]})
        assert status == 400 and "messages[2] holds a tool's image" in words


def test_counting_counts_the_placeholder():
    with vision([], AnthropicAdapter) as server:
        counts = [
            server.post(f"{MESSAGES}/count_tokens", {"messages": [message]})[1]["input_tokens"]
            for message in (anthropic(A), {"role": "user", "content": "-"})
        ]
        assert counts[0] - counts[1] == len(server.adapter.model.template.encode(VISION)) - 1


def test_an_overflow_that_only_the_engine_sees_is_told_as_one():
    def policy(call):
        words = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."
        return ScriptedAnswer(error=(400, words))

    with vision(policy, session={"max_context_tokens": 8000}) as server:
        status, answer = server.post(CHAT, {"messages": [chat(A)]})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


def test_an_image_that_is_sent_again_is_kept_once():
    with vision(["one", "two", "three"]) as server:
        history = [chat(A)]
        for text in ("more", "and more"):
            _, answer = server.post(CHAT, {"messages": history})
            history += [answer["choices"][0]["message"], {"role": "user", "content": text}]
        assert server.post(CHAT, {"messages": history})[0] == 200
        tree = server.adapter.manager._trees[SID]
        assert [len(node.turn.images) for node in tree.turns] == [1, 0, 0]
        assert [call.images for call in server.engine.calls] == [(A,)] * 3


def test_an_answer_that_breaks_off_keeps_the_images_of_its_prompt():
    slow = ScriptedAnswer(text="A picture of", token_latency=60)
    with vision([slow]) as server:
        response = start(server, {"messages": [chat(A)], "stream": True}).getresponse()
        read_until(response, b'"content":"A')
        server.engine.shutdown()
        assert b"shut down" in response.read()
        (node,) = server.adapter.manager._trees[SID].turns
        assert not node.turn.delivered and len(node.turn.output)
        assert [one.url for one in node.turn.prompt_images()] == [A]


def test_cached_tokens_are_at_most_the_prompt_though_the_engine_counts_expanded_images():
    with vision([ScriptedAnswer(text="ok", cached_tokens=5000)]) as server:
        _, answer = server.post(CHAT, {"messages": [chat(A)]})
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
        (sample,) = server.finish()
    assert sample.prefix_cache_info.cached_tokens == usage["prompt_tokens"]


def test_trainers_refuse_rows_with_images_by_name():
    with vision(["A picture."]) as server:
        server.post(CHAT, {"messages": [chat(A)]})
        (sample,) = server.finish()
    sample.index = 17
    with pytest.raises(DataError, match="sample 17 .*: multimodal_inputs holds images"):
        to_train_samples([[sample]], object())


def test_a_client_without_images_sends_none():
    with served(OpenAIAdapter, ["ok"], family="qwen_vl") as server:
        assert server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})[0] == 200
        (call,) = server.engine.calls
        assert call.images == ()


def test_the_engine_client_sends_images_beside_the_ids():
    policy, tokenizer = (lambda call: ScriptedAnswer(token_ids=[70])), family_tokenizer("qwen_vl")
    with start_scripted_server(policy, tokenizer, takes_images=True) as server:
        client = EngineClient(server.url)
        answer = asyncio.run(client.generate([5], {}, timeout=20, image_data=[A, B]))
        assert answer.output_ids == [70]
        assert server.engine.calls[0].images == (A, B)
