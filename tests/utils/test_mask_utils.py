import copy
import functools
import itertools
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.agent.template import ChatTemplate
from slime.errors import ConfigError, DataError, ModelError
from slime.utils.mask_utils import TOKENIZER_TYPES, MultiTurnLossMaskGenerator
from tests.agent.templates import FAMILIES, IMAGE_FAMILIES, family_tokenizer
from tests.agent.tokenizers import NAMES, real_tokenizer
from tests.tiny import tiny_tokenizer

CHATML = r"⟦<\|im_start\|>⟧assistant\n(.*?⟦<\|im_end\|>⟧)"
LLAMA3 = r"⟦<\|start_header_id\|>⟧assistant⟦<\|end_header_id\|>⟧\n\n(.*?⟦<\|eot_id\|>⟧)"
TURNS = {
    "chatml": CHATML,
    "qwen3": CHATML,
    "llama3": LLAMA3,
    "mistral": r"⟦\[/(?:INST|TOOL_RESULTS)\]⟧(?!⟦\[(?:INST|TOOL_RESULTS|AVAILABLE_TOOLS)\]⟧)(.*?⟦</s>⟧)",
    "deepseek_r1": r"⟦<\|(?:Assistant|tool_outputs_end)\|>⟧(?!⟦<\|User\|>⟧)(.*?⟦<\|eos\|>⟧)",
    "glm": r"⟦<\|assistant\|>⟧(.*?(?:⟦<\|(?:user|observation)\|>⟧|(?=⟦<\|(?:system|assistant)\|>⟧)|\Z))",
    "gemma": r"⟦<start_of_turn>⟧model\n(.*?⟦<end_of_turn>⟧)",
    "phi": r"⟦<\|assistant\|>⟧\n(.*?⟦<\|end\|>⟧)",
    "harmony": r"⟦<\|start\|>⟧assistant(.*?⟦<\|(?:end|call)\|>⟧)",
    "real:qwen3": CHATML,
    "real:llama3_1": LLAMA3,
    "real:deepseek": r"⟦<｜(?:Assistant|tool▁outputs▁end)｜>⟧(?!⟦<｜User｜>⟧)(.*?⟦<｜end▁of▁sentence｜>⟧)",
    "real:smollm2": CHATML,
}
"""What a turn is, by the template's source: the group, between the real special tokens, shown in ⟦⟧."""
ALL = [*FAMILIES, *(f"real:{name}" for name in NAMES)]
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "runs <|im_end|> a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


@functools.cache
def generator(name):
    return MultiTurnLossMaskGenerator(tokenizer_of(name))


def tokenizer_of(name):
    return real_tokenizer(name[5:]) if name.startswith("real:") else family_tokenizer(name)


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text="", *calls, **more):
    named = [
        {"id": i, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        for i, arguments in calls
    ]
    return {"role": "assistant", "content": text, **more} | ({"tool_calls": named} if named else {})


def told(name, text):
    return {"role": "tool", "tool_call_id": name, "content": text}


NASTY = [
    *(
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<tool_response>",
        "</tool_response>",
        "</s>",
        "[INST]",
        "[/INST]",
    ),
    *("<|eot_id|>", "<|user|>", "<|assistant|>", "<|Assistant|>", "<|end|>", "<|im_<|im_end|>", "<|eos|>"),
    *("<end_of_turn>", "<｜Assistant｜>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
]
PLAIN = ["plain words", " ", "\n\n", "é日本", '{"a": "b\\n"}', "<b>", "  x", "\t"]
texts = st.lists(st.sampled_from([*PLAIN, *NASTY]), max_size=4).map("".join)
said_texts = st.lists(st.sampled_from([*PLAIN, *NASTY, "<think>\nso\n</think>\n\n"]), max_size=4).map("".join)


@st.composite
def conversations(draw):
    """Any messages in an order that templates of tools take."""
    messages = [system(draw(texts))] if draw(st.booleans()) else []
    messages.append(user(draw(texts)))
    for number in range(draw(st.integers(1, 4))):
        names = [f"call_{number}_{i}" for i in range(draw(st.integers(0, 2)))]
        calls = [(name, {"command": draw(said_texts)} if draw(st.booleans()) else {}) for name in names]
        reasoning = {"reasoning_content": draw(texts)} if draw(st.booleans()) else {}
        messages.append(assistant(draw(said_texts), *calls, **reasoning))
        messages += [told(name, draw(texts)) for name in names]
        roles = draw(st.lists(st.sampled_from([user, system, assistant]), max_size=2))
        messages += [role(draw(texts)) for role in roles]
    return messages


def shown(tokenizer, ids):
    """The text of ids, with what are real added tokens in double brackets."""
    added = tokenizer.added_tokens_decoder
    runs = itertools.groupby(ids, key=lambda i: i if i in added else None)
    return "".join(
        f"⟦{tokenizer.decode([key])}⟧" * len(list(run)) if key is not None else tokenizer.decode(list(run))
        for key, run in runs
    )


def parts_by_mask(tokenizer, ids, mask):
    runs = itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [(trains == 1, shown(tokenizer, [i for i, _ in run])) for trains, run in runs]


def parts_by_pattern(pattern, text):
    parts, done = [], 0
    for match in re.finditer(pattern, text, re.DOTALL):
        parts += [(False, text[done : match.start(1)]), (True, match[1])]
        done = match.end()
    merged = []
    for trains, part in [part for part in [*parts, (False, text[done:])] if part[1]]:
        if merged and merged[-1][0] == trains:
            part = merged.pop()[1] + part
        merged.append((trains, part))
    return merged


@pytest.mark.parametrize("name", ALL)
def test_what_trains_is_exactly_the_turns_as_they_are_rendered(name):
    masks, tokenizer = generator(name), tokenizer_of(name)

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(conversations(), st.sampled_from([None, [TOOL]]))
    def check(messages, tools):
        ids, mask = masks.get_loss_mask(messages, tools)
        assert parts_by_mask(tokenizer, ids, mask) == parts_by_pattern(TURNS[name], shown(tokenizer, ids))

    check()


@pytest.mark.parametrize("name", [*FAMILIES, "real:qwen3", "real:llama3_1", "real:smollm2"])
def test_ids_are_the_tokenizers_own_unless_a_token_would_join_prompt_and_turn(name):
    masks, tokenizer = generator(name), tokenizer_of(name)

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(*[st.lists(st.sampled_from(PLAIN), min_size=1, max_size=4).map("".join)] * 3)
    def check(asked, answered, more):
        messages = [user(asked), assistant(answered), user(more), assistant(more)]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, mask = masks.get_loss_mask(messages)
        parts = parts_by_mask(tokenizer, ids, mask)
        assert "".join(part for _, part in parts) == shown(tokenizer, found["input_ids"])
        borders = set(itertools.accumulate(len(part.replace("⟦", "").replace("⟧", "")) for _, part in parts))
        joined = any(start < border < end for border in borders for start, end in found["offset_mapping"])
        assert joined or ids == list(found["input_ids"])

    check()


@pytest.mark.parametrize(
    "name", ["chatml", "llama3", "gemma", "phi", "harmony", "real:smollm2", "real:llama3_1"]
)
@pytest.mark.parametrize("answer", ["yes", "\n\nyes", "  yes", " "])
def test_the_tokens_before_a_turn_are_the_prompt_that_generation_gives_the_model(name, answer):
    messages = [user("is it?"), assistant("why"), user("tell me "), assistant(answer)]
    ids, mask = generator(name).get_loss_mask(messages)
    prompt = ChatTemplate(tokenizer_of(name)).prompt(messages[:-1])
    assert ids[: len(prompt)] == prompt
    assert mask[len(prompt) - 1] == 0
    assert set(mask[len(prompt) : mask_end(mask)]) == {1}


def mask_end(mask):
    return len(mask) - mask[::-1].index(1)


def turns(name, messages, tools=None, **options):
    masks = MultiTurnLossMaskGenerator(tokenizer_of(name), **options) if options else generator(name)
    return masks.get_text_from_loss_mask(*masks.get_loss_mask(messages, tools))


def test_reasoning_that_the_template_strips_from_earlier_turns_is_not_there_to_train():
    messages = [user("a"), assistant("b", reasoning_content="one"), user("c")]
    messages.append(assistant("d", reasoning_content="two"))
    assert turns("qwen3", messages) == ["b<|im_end|>", "<think>\ntwo\n</think>\n\nd<|im_end|>"]


def test_the_assistant_may_write_markers_but_no_token_that_ends_a_turn():
    ids, mask = generator("qwen3").get_loss_mask([user("<think>"), assistant("a <think>b<|im_end|>")])
    parts = parts_by_mask(tokenizer_of("qwen3"), ids, mask)
    assert parts[0] == (False, "⟦<|im_start|>⟧user\n<think>⟦<|im_end|>⟧\n⟦<|im_start|>⟧assistant\n")
    assert parts[1][1].endswith("a ⟦<think>⟧b<|im_end|>⟦<|im_end|>⟧")


def test_what_the_generation_prompt_opens_is_prompt_where_the_rendering_shows_it():
    messages = [user("a"), assistant("d")]
    opened = "<think>\n\n</think>\n\n"
    assert turns("qwen3", messages) == [f"{opened}d<|im_end|>"]
    assert turns("qwen3", messages, template_kwargs={"enable_thinking": False}) == ["d<|im_end|>"]


THINKING = FAMILIES["qwen3"].template.replace(
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}",
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}",
)


def test_reasoning_that_the_prompt_opens_trains_from_behind_its_opening():
    tokenizer = family_copy("qwen3", THINKING)
    masks = MultiTurnLossMaskGenerator(tokenizer)
    messages = [user("a"), assistant("b"), user("c"), assistant("d", reasoning_content="two")]
    found = masks.get_text_from_loss_mask(*masks.get_loss_mask(messages))
    assert found == ["b<|im_end|>", "two\n</think>\n\nd<|im_end|>"]


def family_copy(name, template):
    tokenizer = copy.deepcopy(family_tokenizer(name))
    tokenizer.chat_template = template
    return tokenizer


def test_messages_whose_step_loss_mask_is_0_are_left_out():
    messages = [user("a"), assistant("b", step_loss_mask=0), user("c"), assistant("d", step_loss_mask=1)]
    assert turns("chatml", messages) == ["d<|im_end|>"]
    ids, mask = generator("chatml").get_loss_mask([user("a"), assistant("b", step_loss_mask=0)])
    assert ids and set(mask) == {0}
    everything = [{key: m[key] for key in ("role", "content")} for m in messages]
    assert generator("chatml").get_loss_mask(messages)[0] == generator("chatml").get_loss_mask(everything)[0]


def test_both_messages_of_a_split_one_are_left_out():
    calls = [("call_a", {"command": "ls"}), ("call_b", {"command": "pwd"})]
    messages = [user("a"), assistant("", *calls, step_loss_mask=0), told("call_a", "x"), told("call_b", "y")]
    assert turns("llama3", [*messages, assistant("done")]) == ["done<|eot_id|>"]


def test_arguments_may_be_written_in_json():
    written = assistant("", ("call_a", '{"command": "ls"}'))
    plain = assistant("", ("call_a", {"command": "ls"}))
    for name in ("qwen3", "llama3", "mistral", "glm", "deepseek_r1"):
        assert turns(name, [user("a"), written], [TOOL]) == turns(name, [user("a"), plain], [TOOL])


def test_keys_that_are_none_and_text_parts_are_taken_as_columnar_data_has_them():
    message = {"role": "assistant", "content": "b", "tool_calls": None, "step_loss_mask": None, "name": None}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert generator("qwen3").get_loss_mask([parts, message]) == generator("qwen3").get_loss_mask(
        [user("a"), assistant("b")]
    )


BROKEN = [
    ([user("a"), {"content": "b"}], "message 1.*role"),
    ([user("a"), "b"], "message 1.*role"),
    ([{"role": "user", "content": [{"type": "image"}]}], "message 0.*text parts"),
    ([user("a"), assistant(3)], "message 1.*text"),
    ([user("a"), assistant("b", step_loss_mask=2)], "message 1.*step_loss_mask is 2"),
    ([user("a"), assistant("b") | {"tool_calls": [{"name": "bash"}]}], "message 1.*function"),
    ([], "no messages"),
]


@pytest.mark.parametrize(("messages", "words"), BROKEN)
def test_a_broken_message_is_named_by_its_index(messages, words):
    with pytest.raises(DataError, match=words):
        generator("qwen3").get_loss_mask(messages)


def test_a_message_that_the_template_refuses_is_named_by_its_index():
    messages = [user("a"), assistant("b"), user("c"), {"role": "narrator", "content": "d"}, assistant("e")]
    with pytest.raises(DataError, match=r"message 3.*refuses messages"):
        generator("mistral").get_loss_mask(messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "learn where to stop"),
    ],
)
def test_a_template_that_no_mask_can_be_made_for_is_refused_at_start(template, words):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=words):
        MultiTurnLossMaskGenerator(tokenizer)


def test_what_the_template_drops_is_told_once(caplog):
    masks = MultiTurnLossMaskGenerator(family_tokenizer("deepseek_r1"))
    for _ in range(2):
        masks.get_loss_mask([user("a"), assistant("<think>\nbecause\n</think>\n\nb")])
    assert [record.getMessage() for record in caplog.records] == [
        "message 1: the chat template does not show its reasoning, so it is not trained"
    ]


def test_every_published_name_of_a_tokenizers_type_means_the_same():
    messages = [system("be"), user("a"), assistant("b")]
    found = {str(turns("qwen3", messages, tokenizer_type=kind)) for kind in TOKENIZER_TYPES}
    assert len(found) == 1
    with pytest.raises(ConfigError, match="--loss-mask-type.*'gpt'"):
        MultiTurnLossMaskGenerator(family_tokenizer("qwen3"), "gpt")


def test_a_response_goes_from_the_first_trained_token_to_the_end():
    assert generator("chatml").get_response_lengths([[0, 0, 1, 0, 1, 0], [0, 0], [1]]) == [4, 0, 1]


def test_texts_of_a_mask_of_another_length_are_refused():
    with pytest.raises(ValueError):
        generator("chatml").get_text_from_loss_mask([1, 2], [1])


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_templates_of_models_that_take_images_train_on_text(name):
    masks, messages = generator(name), [user("a"), assistant("b"), user("c"), assistant("d")]
    ids, mask = masks.get_loss_mask(messages)
    end = masks.report.ends[0]
    assert [text.strip() for text in masks.get_text_from_loss_mask(ids, mask)] in (
        [f"b{end}", f"d{end}"],
        [f"b {end}", f"d {end}"],
    )
    fitted = masks.report.fit.messages(messages)
    assert tokenizer_of(name).decode(ids) == tokenizer_of(name).apply_chat_template(fitted, tokenize=False)
