"""Images among messages and tokens: what templates show, and whose placeholder is whose."""

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.images import PlacedImage
from slime.agent.session import TokenSession
from slime.agent.template import ChatTemplate
from slime.agent.template_fit import TemplateFit
from slime.agent.template_probe import TemplateRefusalError
from slime.agent.trajectory import TrajectoryManager, TurnRecord
from slime.utils.types import Sample
from tests.agent.templates import FAMILIES, IMAGE_FAMILIES, family_tokenizer
from tests.tiny import tiny_tokenizer

SID = "s"
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {}}}
FOUND = {
    "qwen_vl": ("<|image_pad|>", "image", "inside", False),
    "qwen_vl_text_tools": ("<|image_pad|>", "image", "behind", False),
    "llava": ("<image>", "image", "inside", True),
    "pixtral": ("[IMG]", "image_url", "refused", False),
}


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def user(text, *urls):
    parts = [{"type": "text", "text": text}] if text else []
    return {"role": "user", "content": [*parts, *map(image, urls)] if urls else text}


def with_template(template, special=("<|image_pad|>",)):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(list(special), special_tokens=True)
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer)


def chatml(shown):
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.content is string %}{{ m.content }}{% else %}"
        f"{shown}{{% endif %}}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def loop(body):
    """Texts as they are, and `body` for an image."""
    text = "{% if p.type == 'text' %}{{ p.text }}{% else %}"
    return f"{{% for p in m.content %}}{text}{body}{{% endif %}}{{% endfor %}}"


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_the_form_and_the_placeholder_of_images_are_found_out(name):
    report = ChatTemplate(family_tokenizer(name)).report
    fit = report.fit
    assert (report.image_token, fit.images, fit.tool_images, fit.content_parts) == FOUND[name]
    assert any("takes images" in line for line in report.lines())


@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_text_show_none(name):
    report = ChatTemplate(family_tokenizer(name)).report
    assert report.image_token == "" and report.fit.images is None


@pytest.mark.parametrize(
    "shown",
    [
        "{{ m.content }}",  # the parts as Python writes them
        "{{ m.content | tojson }}",
        loop(""),  # left out
        loop("{{ '<picture>' }}"),  # no token of its own: users could write it
        loop("{{ '<|image_pad|>' + p.image }}"),  # the image itself as text
        loop("{{ '<|image_pad|><|image_pad|>' }}"),  # two to an image
        loop(  # numbered through the conversation
            "{% set ns.n = ns.n + 1 %}{{ 'Picture ' ~ ns.n ~ ': <|image_pad|>' }}",
        ),
        loop("{{ raise_exception('no images') }}"),
    ],
)
def test_what_marks_images_by_no_token_of_their_own_takes_none(shown):
    template = with_template("{% set ns = namespace(n=0) %}" + chatml(shown))
    assert template.report.image_token == ""
    with pytest.raises(TemplateRefusalError):
        ids = np.asarray(template.prompt([user("see", "a")]), np.int32)
        template.placed([user("see", "a")], ids)


def test_a_plain_placeholder_is_found():
    assert with_template(chatml(loop("{{ '<|image_pad|>' }}"))).report.image_token == "<|image_pad|>"


def test_a_template_that_drops_an_image_later_is_refused():
    only_first = loop(
        "{% if loop.first %}{{ '<|image_pad|>' }}{% elif loop.index < 4 %}{{ '<|image_pad|>' }}{% endif %}"
    )
    template = with_template(chatml(only_first))
    many = [user("", *"abcdef")]
    with pytest.raises(TemplateRefusalError, match="shows 3 of 6 images"):
        template.placed(many, np.asarray(template.prompt(many), np.int32))


@pytest.mark.parametrize("name", ["qwen_vl", "pixtral"])
def test_the_image_itself_is_never_rendered_or_tokenised(name):
    template = ChatTemplate(family_tokenizer(name))
    short, long = (template.prompt([user("see", url)]) for url in ("data:,x", "data:," + "x" * 10**6))
    assert short == long


def test_texts_between_images_are_lines_as_they_are_without_images():
    fit = TemplateFit(images="image")
    texts = [{"type": "text", "text": text} for text in "abc"]
    (message,) = fit.messages([{"role": "user", "content": [*texts[:2], image("u"), texts[2]]}])
    assert [part.get("text", part["type"]) for part in message["content"]] == ["a\nb", "image", "c"]
    joined = TemplateFit(images="image", repeated_roles=False).arranged(
        [user("a"), user("b", "u"), user("c")]
    )
    assert [part.get("text", "-") for part in joined[0]["content"]] == ["a", "\n\nb", "-", "c"]


def test_images_of_tools_follow_all_results_where_results_are_text():
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c2", "content": [image("b"), {"type": "text", "text": "two"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        user("and", "c"),
    ]
    fitted = TemplateFit(images="image", tool_images="behind").arranged(messages)
    assert [m["role"] for m in fitted] == ["assistant", "tool", "tool", "user", "user"]
    assert fitted[1]["content"] == "[image, shown below]\ntwo"
    assert fitted[3]["content"] == [image("b")]


def test_other_images_are_other_tokens():
    """Rows of equal tokens are one row only where their images are equal too."""
    manager = TrajectoryManager(fork_threshold_tokens=0)
    history = []
    for prompt, url in (([1, 9, 2], "a"), ([1, 9, 2, 5, 6], "b")):
        history.append({"role": "user", "content": f"{len(history)}"})
        record = TurnRecord(prompt, [5], "stop", [-1.0], images=[PlacedImage(1, url)])
        reply = {"role": "assistant", "content": f"said {len(history)}"}
        manager.record_turn(SID, turn=record, prompt_messages=history, response_message=reply)
        history.append(reply)
    rows = manager.get_trajectory(SID, base_sample=Sample(index=0))
    assert [(row.tokens, row.multimodal_inputs["images"]) for row in rows] == [
        ([1, 9, 2, 5], ["a"]),
        ([1, 9, 2, 5, 6, 5], ["b"]),
    ]


@pytest.mark.parametrize("size", range(3, 14))
def test_a_cut_row_keeps_the_images_whose_placeholders_it_keeps(size):
    manager = TrajectoryManager()
    history = [{"role": "user", "content": "0"}]
    prompts = [([1, 9, 2], "a"), ([1, 9, 2, 5, 9, 6], "ab"), ([1, 9, 2, 5, 9, 6, 5, 7, 9, 9, 8], "abcd")]
    for prompt, urls in prompts:
        places = [index for index, token in enumerate(prompt) if token == 9]
        placed = [PlacedImage(*pair) for pair in zip(places, urls, strict=True)]
        record = TurnRecord(prompt, [5], "stop", [-1.0], images=placed)
        reply = {"role": "assistant", "content": f"said {len(history)}"}
        manager.record_turn(SID, turn=record, prompt_messages=history, response_message=reply)
        history += [reply, {"role": "user", "content": f"{len(history)}"}]
    rows = manager.get_trajectory(SID, base_sample=Sample(index=0), max_sample_tokens=size)
    for row in rows:
        images = (row.multimodal_inputs or {"images": []})["images"]
        assert "".join(images) == "abcd"[: row.tokens.count(9)]
    assert bool(rows) == (size > 3)


def test_routes_of_expanded_images_are_not_those_of_the_row():
    manager = TrajectoryManager()
    routes = base64.b64encode(np.zeros(40, np.int32).tobytes()).decode()
    for sid, placed in (("text", ()), ("image", [PlacedImage(1, "a")])):
        turn = TurnRecord([1, 9, 2], [5], "stop", [-1.0], routed_experts=routes, images=placed)
        messages = [{"role": "user", "content": "0"}]
        reply = {"role": "assistant", "content": "1"}
        manager.record_turn(sid, turn=turn, prompt_messages=messages, response_message=reply)
    rows = [manager.get_trajectory(sid, base_sample=Sample(index=0))[0] for sid in ("text", "image")]
    assert [row.rollout_routed_experts is None for row in rows] == [False, True]


steps = st.lists(
    st.tuples(
        st.sampled_from(["say", "tool", "fork", "compact", "again"]),
        st.lists(st.sampled_from("abcde"), max_size=3),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=8,
)


class Chain:
    """A client that shows images, parts and compacts; checks each prompt and keeps the rows that are due."""

    def __init__(self, family):
        tokenizer = family_tokenizer(family)
        self.template = ChatTemplate(tokenizer)
        self.pad = self.template.encode(self.template.report.image_token)[0]
        self.manager = TrajectoryManager(fork_threshold_tokens=0)
        self.session = TokenSession(SID, self.manager, self.template)
        self.history, self.sampled, self.prompts = [], 0, []

    def turn(self, calls):
        prompt = self.session.prompt(self.history)
        due = [
            part["image_url"]["url"]
            for message in self.history
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        assert [one.url for one in prompt.images] == due
        assert [one.position for one in prompt.images] == np.flatnonzero(prompt.ids == self.pad).tolist()
        text = f"answer {self.sampled}"
        call = CALL | {"id": f"call-{self.sampled}"}
        said = {"role": "assistant", "content": text, **({"tool_calls": [call]} if calls else {})}
        output = self.template.encode(text + self.template.report.ends[0])
        record = TurnRecord(prompt.ids, output, "stop", [-1.0] * len(output), images=prompt.images)
        self.manager.record_at(SID, prompt.place, turn=record, response_message=said)
        self.prompts.append((prompt.ids.tolist() + output, due))
        self.sampled += len(output)
        self.history.append(said)

    def play(self, kind, urls, number, calls):
        last = self.history[-1] if self.history else {}
        if kind == "tool" and last.get("tool_calls"):
            parts = [{"type": "text", "text": f"told {number}"}, *map(image, urls)]
            name = last["tool_calls"][0]["id"]
            self.history.append({"role": "tool", "tool_call_id": name, "content": parts if urls else "told"})
        elif kind == "fork" and self.history:
            users = [i for i, message in enumerate(self.history) if message["role"] == "user"]
            self.history = [*self.history[: users[number % len(users)]], user("other", *urls)]
        elif kind == "compact" and self.history and calls and self.history[-1].get("tool_calls"):
            kept = self.history[-1]
            told = {"role": "tool", "tool_call_id": kept["tool_calls"][0]["id"], "content": "kept"}
            self.history = [user(f"summary {number}", *urls), kept, told]
        elif kind == "again" and self.history:
            said = [i for i, message in enumerate(self.history) if message["role"] == "assistant"]
            self.history = self.history[: said[-1]]
        else:
            self.history.append(user(f"say {number}", *urls))
        self.turn(calls)


@pytest.mark.parametrize("family", ["qwen_vl", "qwen_vl_text_tools", "llava", "pixtral"])
@given(steps=steps)
@settings(max_examples=40, deadline=None)
def test_images_stand_in_the_order_of_their_placeholders(family, steps):
    chain = Chain(family)
    calls = family.startswith("qwen")
    for kind, urls, number in steps:
        chain.play(kind if calls or kind != "tool" else "say", urls, number, calls)
    rows = chain.manager.get_trajectory(SID, base_sample=Sample(index=0))
    for row in rows:
        due = [images for tokens, images in chain.prompts if tokens == row.tokens]
        assert (row.multimodal_inputs or {"images": []})["images"] in due
    trained = sum(sum(row.loss_mask) for row in rows)
    tally = chain.manager.totals
    assert trained + tally.tokens_abandoned == tally.tokens == chain.sampled
