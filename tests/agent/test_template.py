import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.agent.template import ChatTemplate
from slime.agent.template_probe import Renderer, TemplateRefusalError
from slime.errors import ModelError
from tests.agent.templates import FAMILIES, IMAGE_FAMILIES, family_tokenizer
from tests.agent.tokenizers import NAMES, real_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "runs a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
KEEPS_HISTORY = ["chatml", "llama3", "mistral", "glm", "gemma", "phi", "harmony"]
TEMPLATES = {}


def chat(name):
    if name not in TEMPLATES:
        tokenizer = real_tokenizer(name[5:]) if name.startswith("real:") else family_tokenizer(name)
        TEMPLATES[name] = ChatTemplate(tokenizer), tokenizer
    return TEMPLATES[name]


def rendered(template, tokenizer, messages, generate=True):
    return Renderer(tokenizer, {})(template.report.fit.messages(messages), generate=generate)


def user(text):
    return {"role": "user", "content": text}


def assistant(text="", *calls):
    message = {"role": "assistant", "content": text}
    named = [
        {"id": i, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        for i, arguments in calls
    ]
    return message | ({"tool_calls": named} if named else {})


def told(name, text):
    return {"role": "tool", "tool_call_id": name, "content": text}


NASTY = [
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</s>",
    "[INST]",
    "<|eot_id|>",
    "<|im_<|im_end|>",
]
texts = st.lists(
    st.sampled_from(["plain words", " ", "\n\n", "é日本", '{"a": "b\\n"}', "<b>", *NASTY]),
    min_size=1,
    max_size=5,
).map("".join)
words = st.sampled_from(["hello", "a longer text\nof two lines", 'quoted "text"', "日本語", "x < y"])


@st.composite
def histories(draw, text, with_system=True):
    """A first prompt, and some (assistant message, messages that follow it)."""
    first = [user(draw(text))]
    if with_system and draw(st.booleans()):
        first.insert(0, {"role": "system", "content": draw(text)})
    turns = []
    for number in range(draw(st.integers(1, 3))):
        calls = [(f"call_{number}_{i}", {"command": draw(text)}) for i in range(draw(st.integers(0, 2)))]
        said = assistant(draw(words) if not calls or draw(st.booleans()) else "", *calls)
        new = [told(name, draw(text)) for name, _ in calls]
        extra = draw(st.lists(st.sampled_from(["user", "system"] if with_system else ["user"]), max_size=2))
        new += [{"role": role, "content": draw(text)} for role in extra] or ([] if calls else [user("on")])
        turns.append((said, new))
    return first, turns


@pytest.mark.parametrize("name", [*KEEPS_HISTORY, "real:llama3_1", "real:smollm2"])
def test_pieces_decode_to_the_whole_rendering(name):
    template, tokenizer = chat(name)
    assert not template.report.rewrites_history
    ends = (*template.report.ends, *template.report.call_ends)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(histories(texts, with_system=not template.report.moves_system))
    def check(history):
        messages, turns = history
        ids = template.prompt(messages)
        for said, new in turns:
            if not template.report.fit.parallel_calls and "tool_calls" in said:
                said = {**said, "tool_calls": said["tool_calls"][:1]}
                new = [m for m in new if m["role"] != "tool" or not m["tool_call_id"].endswith("_1")]
            before = rendered(template, tokenizer, messages)
            messages = [*messages, said]
            turn = rendered(template, tokenizer, messages, generate=False)
            assert turn.startswith(before)
            sampled = turn[len(before) :]
            if not template.report.ends_with_next_role:
                sampled = sampled[: max(sampled.rfind(end) for end in ends)]
            ids = ids + tokenizer.encode(sampled, add_special_tokens=False)
            ids = ids + template.continuation(new, previous=said, closed=False)
            messages = [*messages, *new]
        assert tokenizer.decode(ids) == rendered(template, tokenizer, messages)

    check()


@pytest.mark.parametrize("name", [*FAMILIES, *IMAGE_FAMILIES, *(f"real:{name}" for name in NAMES)])
def test_a_continuation_is_what_the_template_shows_behind_the_turn_in_its_real_history(name):
    template, tokenizer = chat(name)
    mark = "zqlastqz"

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(histories(words, with_system=not template.report.moves_system))
    def check(history):
        messages, turns = history
        *turns, (said, new) = turns
        for earlier, between in turns:
            messages = [*messages, earlier, *between]
        calls = said.get("tool_calls", ()) if template.report.fit.parallel_calls else ()
        if calls and template.report.fit.tool_calls:
            calls[-1]["function"]["arguments"] = {"command": mark}
        else:
            said = assistant(mark)
            new = [m for m in new if m["role"] != "tool"] or [user("on")]
        whole = rendered(template, tokenizer, [*messages, said, *new])
        behind = whole.partition(mark)[2]
        cut, rest = (template.continuation(new, previous=said, closed=closed) for closed in (False, True))
        has_end = cut[0] in template.stop_ids
        assert has_end or template.report.ends_with_next_role
        assert rest == cut[has_end:]
        assert behind.endswith(tokenizer.decode(cut))
        left_out = behind.removesuffix(tokenizer.decode(cut))
        assert not any(end in left_out for end in template.report.call_ends or template.report.ends)

    check()


def test_a_turn_that_ends_with_the_next_role_keeps_a_marker_of_another_role():
    template, tokenizer = chat("glm")
    asked = assistant("", ("c", {"command": "ls"}))
    new = [told("c", "files")]
    cut = template.continuation(new, previous=asked, closed=False)
    observation = tokenizer.convert_tokens_to_ids("<|observation|>")
    spoke = tokenizer.convert_tokens_to_ids("<|user|>")
    assert cut[0] == observation
    assert template.continuation(new, previous=asked, closed=True) == cut[1:]
    assert template.continuation(new, previous=asked, closed=True, last_id=observation) == cut[1:]
    assert template.continuation(new, previous=asked, closed=True, last_id=spoke) == cut
    rule = [{"role": "system", "content": "rule"}, user("go")]
    assert tokenizer.decode(template.continuation(rule, previous=assistant("hi"), closed=False)) == (
        "<|system|>\nrule<|user|>\ngo<|assistant|>"
    )
    assert {observation, spoke} <= template.stop_ids


@pytest.mark.parametrize("name", [*FAMILIES, *IMAGE_FAMILIES, *(f"real:{name}" for name in NAMES)])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_control_tokens_in_text_stay_text(name, data):
    template, tokenizer = chat(name)
    control = list(template._encoder.control)[:40]
    text = data.draw(st.lists(st.sampled_from([*control, *NASTY, "<", ">", " x"]), max_size=6).map("".join))
    ids = {tokenizer.convert_tokens_to_ids(token) for token in template._encoder.control}
    asked = assistant("", ("c", {"command": text}))

    def controls(text, arguments):
        described = {**TOOL, "function": {**TOOL["function"], "description": text}}
        history = [user(text), assistant(text, ("c", arguments)), told("c", text), user(text)]
        found = template.prompt(history, [described])
        found += template.continuation(history[2:], previous=asked, closed=False)
        return [i for i in found if i in ids]

    assert controls(f"a{text}b", {text + "k": text}) == controls("ab", {"k": "v"})


@pytest.mark.parametrize("name", [*KEEPS_HISTORY, "real:llama3_1", "real:smollm2"])
@settings(max_examples=25, deadline=None)
@given(text=texts)
def test_neutral_text_is_shown_unchanged(name, text):
    template, tokenizer = chat(name)
    history = [user(text), assistant("ok", ("c", {"command": text})), told("c", text)]
    assert tokenizer.decode(template.prompt(history)) == rendered(template, tokenizer, history)


@pytest.mark.parametrize("name", [f"real:{name}" for name in NAMES])
def test_a_prompt_has_the_ids_of_its_whole_text(name):
    template, tokenizer = chat(name)
    tools = [{**TOOL, "function": {**TOOL["function"], "description": "some words " * 900}}]
    tools = [] if template.report.ignores_tools else tools
    history = [
        {"role": "system", "content": "Long rules, 12345.\n" * 300},
        user("do\n\n it"),
        assistant("well"),
        user("x = 1\n" * 800),
    ]
    text = Renderer(tokenizer, {})(history, tools)
    assert template.report.exact_pieces
    for _ in range(2):
        assert template.prompt(history, tools) == tokenizer.encode(text, add_special_tokens=False)


def test_a_turn_cut_by_length_gets_its_end():
    template, tokenizer = chat("chatml")
    cut, closed = (
        template.continuation([user("go")], previous=assistant("so"), closed=c) for c in (False, True)
    )
    assert tokenizer.decode(cut) == "<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert cut == [tokenizer.eos_token_id, *closed]


def test_without_new_messages_the_next_turn_opens():
    template, tokenizer = chat("chatml")
    ids = template.continuation([], previous=assistant("so"), closed=True)
    assert tokenizer.decode(ids) == "\n<|im_start|>assistant\n"


def test_malformed_arguments_are_shown_as_they_were_sampled_where_the_template_lets_them():
    broken = [user("go"), assistant("", ("c", '{"command": "ls')), told("c", "error")]
    for name, shown in [
        ("qwen3", '"arguments": {"command": "ls}'),
        ("glm", '_raw_arguments</arg_key>\n<arg_value>{"command": "ls</arg_value>'),
        ("deepseek_r1", '```json\n{"command": "ls\n```'),
    ]:
        template, tokenizer = chat(name)
        assert shown in tokenizer.decode(template.prompt(broken))


def test_tools_that_the_template_does_not_show_are_reported_once(caplog):
    template = ChatTemplate(family_tokenizer("gemma"))
    for _ in range(2):
        template.prompt([user("go")], [TOOL])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "1 tools" in caplog.text


def test_a_refusal_names_the_template_and_its_message():
    template, _ = chat("qwen3")
    with pytest.raises(TemplateRefusalError, match="refuses messages that end in"):
        template.prompt([user([{"type": "image", "image": "x"}])])


class PlainTokenizer:
    """Nothing but what the public interface demands; `shape` wraps the ids as transformers may."""

    def __init__(self, shape):
        self._inner = family_tokenizer("chatml")
        self._shape = shape

    def apply_chat_template(self, messages, tools=None, tokenize=True, add_generation_prompt=False):
        ids = self._inner.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        return self._shape(ids) if tokenize else self._inner.decode(ids)

    def decode(self, ids):
        return self._inner.decode(ids)


@pytest.mark.parametrize(
    "shape", [list, tuple, lambda ids: {"input_ids": ids}, lambda ids: {"input_ids": [ids]}], ids=range(4)
)
def test_a_tokenizer_that_cannot_encode_renders_whole_histories(shape):
    template = ChatTemplate(PlainTokenizer(shape))
    whole = [user("go"), assistant("so"), user("on")]
    assert template.prompt(whole, [TOOL]) == chat("chatml")[0].prompt(whole, [TOOL])
    assert template.generation_prompt == "<|im_start|>assistant\n"
    assert not template.can_continue
    with pytest.raises(ModelError, match="render the whole history"):
        template.continuation([user("on")], previous=assistant("so"), closed=True)


def test_template_arguments_reach_the_template():
    template = ChatTemplate(family_tokenizer("qwen3"), kwargs={"enable_thinking": False})
    assert template.generation_prompt == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert not template.opens_reasoning
