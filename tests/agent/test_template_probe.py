import pytest

from slime.agent.template import ChatTemplate
from slime.errors import ModelError
from tests.agent.templates import FAMILIES, family_tokenizer
from tests.tiny import tiny_tokenizer

CHECKED = {
    "chatml": "adds_default_system merges_tool_messages ignores_reasoning",
    "qwen3": "rewrites_history strips_reasoning closes_thinking merges_tool_messages",
    "llama3": "adds_default_system ignores_reasoning",
    "mistral": "moves_tools moves_system refuses_system_in_the_middle needs_tool_call_ids ignores_reasoning",
    "deepseek_r1": "opens_reasoning rewrites_history ignores_reasoning ignores_tools merges_tool_messages "
    "refuses_system_in_the_middle",
    "glm": "ends_with_next_role closes_thinking merges_tool_messages",
    "gemma": "ignores_tools ignores_reasoning merges_tool_messages refuses_system_in_the_middle",
    "phi": "ignores_tools ignores_reasoning",
    "harmony": "ignores_tools ignores_reasoning",
}
FINDINGS = {word for words in CHECKED.values() for word in words.split()} | {"tail_needs_tools"}
UNFIT = {
    "chatml": {},
    "qwen3": {},
    "llama3": {"parallel_calls": False, "raw_arguments": False},
    "mistral": {
        "system": "first",
        "raw_arguments": False,
        "short_ids": True,
        "user_after_tool": False,
        "repeated_roles": False,
    },
    "deepseek_r1": {"system": "first", "arguments": "text"},
    "glm": {"raw_arguments": False},
    "gemma": {"system": "nowhere", "tool_calls": False, "tool_role": False, "repeated_roles": False},
    "phi": {"tool_calls": False},
    "harmony": {"parallel_calls": False, "raw_arguments": False},
}
ENDS = {
    "deepseek_r1": ("<|eos|>",),
    "glm": ("<|user|>", "<|observation|>"),
    "llama3": ("<|eot_id|>",),
    "mistral": ("</s>",),
    "gemma": ("<end_of_turn>",),
    "phi": ("<|end|>",),
    "harmony": ("<|end|>",),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_found_out(name):
    report = ChatTemplate(family_tokenizer(name)).report
    assert {word for word in FINDINGS if getattr(report, word)} == set(CHECKED[name].split())
    assert report.ends == ENDS.get(name, ("<|im_end|>",))
    default = type(report.fit)()
    differs = {
        n: getattr(report.fit, n) for n in vars(default) if getattr(report.fit, n) != getattr(default, n)
    }
    assert differs == UNFIT[name]


def test_a_turn_of_calls_may_end_otherwise():
    report = ChatTemplate(family_tokenizer("harmony")).report
    assert report.call_ends == ("<|call|>",)


def test_reasoning_is_open_only_where_the_template_opens_it():
    template = ChatTemplate(family_tokenizer("deepseek_r1"))
    assert template.generation_prompt == "<|Assistant|><think>\n"
    assert template.opens_reasoning_after([{"role": "user", "content": "go"}])
    assert not template.opens_reasoning_after([{"role": "tool", "tool_call_id": "c", "content": "done"}])


def test_the_report_tells_each_finding():
    lines = ChatTemplate(family_tokenizer("mistral")).report.lines()
    assert lines[0] == "an assistant's turn begins with '', ends with '</s>'"
    for words in (
        "moves tools",
        "moves the system prompt",
        "nine characters",
        "alternating roles",
        "reminders",
    ):
        assert any(words in line for line in lines)


def tokenizer_with(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_new_messages_that_look_different_with_tools_are_rendered_with_them():
    template = ChatTemplate(
        tokenizer_with(
            "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
            "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}"
            "{{ '<|im_start|>assistant' + (' or tool' if tools else '') }}{% endif %}"
        )
    )
    assert template.report.tail_needs_tools
    tool = {"type": "function", "function": {"name": "bash"}}
    said = {"role": "assistant", "content": "so"}
    found = [
        tiny_tokenizer().decode(template.continuation([], tools, previous=said, closed=True))
        for tools in ((), (tool,))
    ]
    assert found == ["<|im_start|>assistant", "<|im_start|>assistant or tool"]


COUNTING = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + loop.index|string + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (COUNTING, "differently when the history is longer"),
        ("{{ messages[-1].content }}", "role 'user' 0 times"),
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "role 'user' 2 times"),
        ("{{ raise_exception('no') }}", "refuses messages"),
        (None, "no chat template"),
    ],
)
def test_a_template_without_exact_deltas_is_refused_at_once(template, message):
    with pytest.raises(ModelError, match=message):
        ChatTemplate(tokenizer_with(template))
