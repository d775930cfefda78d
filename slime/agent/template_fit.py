"""What a chat template takes, and messages brought into that form.

Invariant: nothing that a message says is lost; what a template has no place for stands as text in the nearest
message that it takes. Fitting is local: a message's form depends on its neighbours and on the calls that it
answers, never on the length of the history. Knows neither templates' text nor tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from slime.agent.images import ImageForm, behind_tools, is_text, one_text_between, template_part
from slime.agent.messages import Message, template_message

REMINDER = "<system-reminder>\n{}\n</system-reminder>"
TOOL_CALL = "<tool_call>\n{}\n</tool_call>"
TOOL_RESPONSE = "<tool_response>\n{}\n</tool_response>"
RAW_ARGUMENTS = "_raw_arguments"


@dataclass(frozen=True, kw_only=True)
class TemplateFit:
    """What the template takes.

    Attributes:
        system: where system messages may stand.
        tool_calls: assistant messages show their tool calls.
        tool_role: tool messages are shown.
        parallel_calls: one assistant message may hold several calls.
        arguments: the form of a call's arguments.
        raw_arguments: arguments that are malformed text are shown as they are.
        short_ids: tool call ids must be nine letters or digits.
        user_after_tool: a user message may follow a tool message.
        repeated_roles: two messages of the user, or of the assistant, may follow each other.
        content_parts: a content must be a list of parts, not a text.
        images: the form of an image among the parts of a user's content; None: the template shows none.
        tool_images: an image of a tool message is shown in it, or must stand in a user message behind it.
    """

    system: Literal["anywhere", "first", "nowhere"] = "anywhere"
    tool_calls: bool = True
    tool_role: bool = True
    parallel_calls: bool = True
    arguments: Literal["object", "text"] = "object"
    raw_arguments: bool = True
    short_ids: bool = False
    user_after_tool: bool = True
    repeated_roles: bool = True
    content_parts: bool = False
    images: ImageForm | None = None
    tool_images: Literal["inside", "behind", "refused"] = "inside"

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """New messages in a form that the template takes; the given ones stay as they are."""
        arranged = self.arranged(messages)
        if self.images is None and not self.content_parts:
            return arranged
        return [{**message, "content": self.content(message["content"])} for message in arranged]

    def content(self, content: Any) -> Any:
        """A content in the template's form."""
        form = self.images
        if isinstance(content, list):
            return content if form is None else [template_part(part, form) for part in content]
        return _parts(content) if self.content_parts else content

    def arranged(self, messages: Sequence[Message]) -> list[Message]:
        """As `messages`, with the images still in them, in the order in which the template shows them."""
        fitted = [self._one(message) for message in messages]
        _name_tool_messages(fitted)
        if self.tool_images == "behind":
            fitted = behind_tools(fitted)
        if not self.parallel_calls:
            fitted = _one_call_each(fitted)
        if not self.tool_role:
            fitted = [_tool_as_user(message) for message in fitted]
        if self.system != "anywhere":
            fitted = _fold_systems(fitted, keep_first=self.system == "first")
        if not self.user_after_tool:
            fitted = _merge(fitted, lambda a, b: a == "tool" and b == "user")
        if not self.repeated_roles:
            fitted = _separate_assistants(_merge(fitted, lambda a, b: a == b == "user"))
        return fitted

    def _one(self, message: Message) -> Message:
        fitted = template_message(message)
        if fitted.get("content") is None:
            fitted["content"] = ""
        if isinstance(fitted["content"], list):
            fitted["content"] = one_text_between(fitted["content"])
        if fitted.get("role") == "tool" and self.short_ids:
            fitted["tool_call_id"] = short_id(str(fitted.get("tool_call_id", "")))
        if "tool_calls" in fitted:
            self._fit_calls(fitted)
        return fitted

    def _fit_calls(self, message: Message) -> None:
        calls = message.pop("tool_calls") or []
        if not calls:
            return
        if self.tool_calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        else:
            shown = [TOOL_CALL.format(_call_text(call["function"])) for call in calls]
            message["content"] = "\n".join([*([message["content"]] if message["content"] else []), *shown])

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        fitted = {**call, "function": {**function, "arguments": self._arguments(function.get("arguments"))}}
        if self.short_ids:
            fitted["id"] = short_id(str(call.get("id", "")))
        return fitted

    def _arguments(self, arguments: Any) -> Any:
        if isinstance(arguments, str) and self.raw_arguments:
            return arguments
        value = {RAW_ARGUMENTS: arguments} if isinstance(arguments, str) else arguments or {}
        return value if self.arguments == "object" else json.dumps(value, ensure_ascii=False)


def short_id(name: str) -> str:
    """Nine letters and digits that stand for a tool call id."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()[:9]


def _call_text(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name", ""), ensure_ascii=False)}, "arguments": {shown}}}'


def _name_tool_messages(messages: list[Message]) -> None:
    """Give tool messages the name of the tool that was called: some templates show it."""
    names = {
        call.get("id"): call["function"].get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    for message in messages:
        name = names.get(message.get("tool_call_id")) if message.get("role") == "tool" else None
        if name and "name" not in message:
            message["name"] = name


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Parallel calls as one assistant message each, followed by the answer to it where there is one."""
    out: list[Message] = []
    answered: set[int] = set()
    for position, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if position in answered:
            continue
        if len(calls) < 2:
            out.append(message)
            continue
        answers = _answers(messages, position)
        for number, call in enumerate(calls):
            out.append({**message, "tool_calls": [call], "content": "" if number else message["content"]})
            found = answers.get(call.get("id"))
            if found is not None and number < len(calls) - 1:
                answered.add(found)
                out.append(messages[found])
    return out


def _answers(messages: list[Message], position: int) -> dict[Any, int]:
    """Positions of the tool messages right behind an assistant message, by tool call id."""
    found: dict[Any, int] = {}
    for index in range(position + 1, len(messages)):
        if messages[index].get("role") != "tool":
            break
        found[messages[index].get("tool_call_id")] = index
    return found


def _tool_as_user(message: Message) -> Message:
    if message.get("role") != "tool":
        return message
    return {"role": "user", "content": _with_text(message["content"], TOOL_RESPONSE)}


def _fold_systems(messages: list[Message], *, keep_first: bool) -> list[Message]:
    """System messages as text of the user; one at the start goes plainly before the first user message."""
    out: list[Message] = []
    for position, message in enumerate(messages):
        if message.get("role") != "system" or (keep_first and position == 0):
            out.append(message)
        elif position == 0:
            out.append({**message, "role": "user"})
        else:
            out.append({"role": "user", "content": _with_text(message["content"], REMINDER)})
    leads = not keep_first and messages and messages[0].get("role") == "system"
    if leads and len(out) > 1 and out[1].get("role") == "user":
        out[:2] = [_joined(out[0], out[1])]
    return out


def _merge(messages: list[Message], joins: Callable[[Any, Any], bool]) -> list[Message]:
    out = messages[:1]
    for message in messages[1:]:
        if joins(out[-1].get("role"), message.get("role")):
            out[-1] = _joined(out[-1], message)
        else:
            out.append(message)
    return out


def _separate_assistants(messages: list[Message]) -> list[Message]:
    out = messages[:1]
    for before, message in pairwise(messages):
        if before.get("role") == message.get("role") == "assistant":
            out.append({"role": "user", "content": ""})
        out.append(message)
    return out


def _joined(first: Message, second: Message) -> Message:
    one, two = first["content"], second["content"]
    if isinstance(one, str) and isinstance(two, str):
        return {**first, "content": f"{one}\n\n{two}" if one and two else one + two}
    before, behind = _parts(one), _parts(two)
    if before and behind and is_text(before[-1]) and is_text(behind[0]):
        behind[0] = {**behind[0], "text": f"\n\n{behind[0]['text']}"}
    return {**first, "content": [*before, *behind]}


def _with_text(content: Any, pattern: str) -> Any:
    if isinstance(content, str):
        return pattern.format(content)
    before, after = pattern.split("{}")
    return [*_parts(before), *content, *_parts(after)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
