import copy

from slime.agent.messages import HANDLES
from slime.agent.template_fit import TemplateFit


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments):
    return {"id": name, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def test_messages_are_copied_without_handles_and_without_missing_content():
    given = [message("assistant", None, tool_calls=[call("a", {"x": 1})], handles=["h"])]
    before = copy.deepcopy(given)
    fitted = TemplateFit(short_ids=True, arguments="text").messages(given)
    assert given == before
    assert HANDLES not in fitted[0]
    assert fitted[0]["content"] == ""
    assert fitted[0]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'


def test_short_ids_pair_calls_and_answers():
    given = [
        message("assistant", "", tool_calls=[call("toolu_01", {})]),
        message("tool", "", tool_call_id="toolu_01"),
    ]
    asked, answered = TemplateFit(short_ids=True).messages(given)
    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"]
    assert len(answered["tool_call_id"]) == 9
    assert answered["tool_call_id"].isalnum()


def test_tool_messages_are_named_by_the_call():
    given = [message("assistant", "", tool_calls=[call("a", {})]), message("tool", "", tool_call_id="a")]
    assert TemplateFit().messages(given)[1]["name"] == "bash"


def test_later_system_messages_become_reminders():
    given = [message("system", "one"), message("user", "go"), message("system", "two")]
    fitted = TemplateFit(system="first").messages(given)
    assert [m["role"] for m in fitted] == ["system", "user", "user"]
    assert fitted[2]["content"] == "<system-reminder>\ntwo\n</system-reminder>"


def test_a_template_without_system_gets_it_before_the_first_user_message():
    given = [message("system", "rules"), message("user", "go")]
    assert TemplateFit(system="nowhere").messages(given) == [message("user", "rules\n\ngo")]


def test_parallel_calls_are_told_one_by_one_with_their_answers():
    given = [
        message("assistant", "both", tool_calls=[call("a", {}), call("b", {})]),
        message("tool", "A", tool_call_id="a"),
        message("tool", "B", tool_call_id="b"),
        message("user", "go"),
    ]
    fitted = TemplateFit(parallel_calls=False).messages(given)
    assert [m["content"] for m in fitted] == ["both", "A", "", "B", "go"]
    assert [m["tool_calls"][0]["id"] for m in fitted if "tool_calls" in m] == ["a", "b"]


def test_answers_out_of_order_are_not_lost():
    given = [
        message("assistant", "", tool_calls=[call("a", {}), call("b", {})]),
        message("tool", "B", tool_call_id="b"),
        message("tool", "A", tool_call_id="a"),
    ]
    assert [m["content"] for m in TemplateFit(parallel_calls=False).messages(given)] == ["", "A", "", "B"]


def test_calls_and_answers_become_text_where_there_is_no_place_for_them():
    given = [
        message("assistant", "so", tool_calls=[call("a", {"x": "é"})]),
        message("tool", "A", tool_call_id="a"),
    ]
    asked, answered = TemplateFit(tool_calls=False, tool_role=False).messages(given)
    assert asked["content"] == 'so\n<tool_call>\n{"name": "bash", "arguments": {"x": "é"}}\n</tool_call>'
    assert answered == message("user", "<tool_response>\nA\n</tool_response>")


def test_roles_alternate_where_they_must():
    given = [message("user", "a"), message("user", "b"), message("assistant", "c"), message("assistant", "d")]
    fitted = TemplateFit(repeated_roles=False).messages(given)
    assert [(m["role"], m["content"]) for m in fitted] == [
        ("user", "a\n\nb"),
        ("assistant", "c"),
        ("user", ""),
        ("assistant", "d"),
    ]


def test_images_keep_their_place_in_joined_messages():
    image = {"type": "image", "image": "data"}
    given = [message("tool", [image], tool_call_id="a"), message("user", "look")]
    joined = TemplateFit(user_after_tool=False).messages(given)
    assert joined == [
        message("tool", [image, {"type": "text", "text": "look"}], tool_call_id="a"),
    ]
    wrapped = TemplateFit(tool_role=False).messages(given[:1])[0]["content"]
    assert wrapped[1] == image
    assert "".join(part.get("text", "") for part in wrapped) == "<tool_response>\n\n</tool_response>"
