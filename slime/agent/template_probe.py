"""Finds out, by rendering small dummy histories, what a chat template does and takes.

Invariant: nothing here is known of any template by name; every finding is seen in a rendering. Knows text
only, no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from slime.agent.messages import Message
from slime.agent.template_fit import TemplateFit
from slime.agent.template_report import TemplateReport
from slime.errors import ModelError

REASONING_OPEN = re.compile(r"(<(?:seed:)?(?:think|thinking|thought|reasoning|reason)>|\[THINK\])\s*\Z")
_EMPTY_REASONING = re.compile(r"<(?P<tag>[\w:]+)>\s*</(?P=tag)>|\[THINK\]\s*\[/THINK\]")
USER, MORE, SAID, CALLED, TOLD, TOLD_TOO, RULE, WHY = (
    f"zq{word}qz" for word in ("user", "more", "said", "called", "told", "too", "rule", "why")
)
CALL_IDS = ("call_1", "call_2")
TOOL_NAME = "zqtoolqz"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "d"}}},
    },
}


class TemplateRefusalError(ModelError):
    """The chat template raised an error about the messages that it was given."""


class Renderer:
    """The tokenizer's chat template as a function from messages to text."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
        self._apply = tokenizer.apply_chat_template
        self._kwargs = dict(kwargs)
        self._refusals = _refusals()

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generate: bool = True
    ) -> str:
        """The text; `generate` adds the generation prompt.

        Raises:
            TemplateRefusalError: with the template's own message.
        """
        return str(self._rendering(messages, tools, tokenize=False, add_generation_prompt=generate))

    def ids(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generate: bool = True
    ) -> list[int]:
        """The token ids, as the tokenizer itself makes them.

        Raises:
            TemplateRefusalError: with the template's own message.
        """
        found = self._rendering(messages, tools, tokenize=True, add_generation_prompt=generate)
        if isinstance(found, Mapping):
            found = found["input_ids"]
        found = found.tolist() if hasattr(found, "tolist") else list(found)
        return list(found[0]) if found and isinstance(found[0], list) else found

    def _rendering(self, messages: Sequence[Message], tools: Sequence[Any], **options: bool) -> Any:
        try:
            return self._apply(list(messages), tools=list(tools) or None, **options, **self._kwargs)
        except self._refusals as error:
            roles = ", ".join(str(message.get("role")) for message in messages[-6:])
            raise TemplateRefusalError(
                f"the chat template refuses messages that end in [{roles}]: {type(error).__name__}: {error}",
                place="chat template",
                remedy="send messages that the template takes, or give the tokenizer another chat template",
            ) from error


def probe(render: Renderer, special: re.Pattern[str], bos: str = "") -> TemplateReport:
    """Findings about a template.

    Args:
        special: matches the tokenizer's special tokens.
        bos: the text of the token that begins a sequence.

    Raises:
        ModelError: an exact delta cannot be formed with this template.
    """
    return _Probe(render, special, bos).report()


def common_start(one: str, two: str, special: re.Pattern[str]) -> int:
    """Length of the common beginning of two texts, not counting a special token that is cut in it."""
    length = _shared(one, two)
    for match in special.finditer(one):
        if match.start() < length < match.end():
            return match.start()
    return length


def _shared(one: str, two: str) -> int:
    pairs = enumerate(zip(one, two, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(two)))


class _Probe:
    def __init__(self, render: Renderer, special: re.Pattern[str], bos: str) -> None:
        self._render = render
        self._special = special
        self._bos = bos
        self._fit = TemplateFit()

    def report(self) -> TemplateReport:
        history = [*_exchange(), _message("user", MORE)]
        parts = TemplateFit(content_parts=True)
        if not self._shows(self._fit, history, USER, SAID, MORE) and self._shows(
            parts, history, USER, SAID, MORE
        ):
            self._fit = parts
        self._check_shown()
        self._fit = self._settle()
        ends = self._ends()
        next_roles = {} if ends else self._next_roles()
        start = self._text([_message("user", USER)])
        after_tools = self._text([*self._turn(), self._told()])
        reasoned = self._reasoned()
        report = TemplateReport(
            fit=self._fit,
            ends=ends or tuple(next_roles[role] for role in ("user", "tool") if role in next_roles),
            call_ends=(self._call_ends() or ends) if ends else (),
            next_roles=tuple(dict.fromkeys(next_roles.values())),
            generation_prompt=self.generation_prompt(),
            opens_reasoning=bool(REASONING_OPEN.search(start)),
            opens_reasoning_after_tools=bool(REASONING_OPEN.search(after_tools)),
            default_system=self._default_system(),
            rewrites_history=self._rewrites(),
            strips_reasoning=WHY in self._text(reasoned, generate=False)
            and WHY not in self._text([*reasoned, _message("user", MORE)]),
            ignores_reasoning=WHY not in self._text(reasoned, generate=False),
            closes_thinking=bool(_EMPTY_REASONING.search(self._text(_exchange(), generate=False))),
            merges_tool_messages=self._merges_tools(),
            **self._tools(),
            moves_system=self._moves_system(),
        )
        self._check_locality()
        return report

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generate: bool = True) -> str:
        return self._render(self._fit.messages(messages), tools, generate=generate)

    def _shows(self, fit: TemplateFit, messages: Sequence[Message], *texts: str) -> bool:
        """Whether the template takes the messages and shows the texts in this order."""
        try:
            rendered = self._render(fit.messages(messages))
        except TemplateRefusalError:
            return False
        places = [rendered.find(text) for text in texts]
        return -1 not in places and places == sorted(places)

    def _check_shown(self) -> None:
        text = self._text([*_exchange(), _message("user", MORE)])
        for role, said in (("user", USER), ("assistant", SAID), ("user", MORE)):
            if text.count(said) != 1:
                raise ModelError(
                    f"the chat template shows a message of role {role!r} {text.count(said)} times, not once, "
                    "so no exact delta can be formed",
                    place="chat template",
                    remedy="give the tokenizer a chat template for conversations of several turns",
                )

    def _settle(self) -> TemplateFit:
        fit = replace(self._fit, system=self._system())
        user, said = _exchange()
        repeated = [
            user,
            said,
            {**said, "content": CALLED},
            {**user, "content": MORE},
            _message("user", TOLD),
        ]
        fit = replace(fit, repeated_roles=self._shows(fit, repeated, USER, SAID, CALLED, MORE, TOLD))
        fit = self._settle_calls(fit)
        turn = [user, _calls(CALLED) if fit.tool_calls else said]
        fit = replace(fit, tool_role=self._shows(fit, [*turn, self._told()], USER, TOLD))
        if not fit.tool_role:
            return fit
        after = [*turn, self._told(), _message("user", MORE)]
        return replace(fit, user_after_tool=self._shows(fit, after, USER, TOLD, MORE))

    def _system(self) -> Literal["anywhere", "first", "nowhere"]:
        fit, rule, user = self._fit, _message("system", RULE), _message("user", MORE)
        if not self._shows(fit, [rule, _message("user", USER)], RULE, USER):
            return "nowhere"
        histories = ([*_exchange(), rule], [*_exchange(), rule, user])
        return "anywhere" if all(self._shows(fit, h, USER, SAID, RULE) for h in histories) else "first"

    def _settle_calls(self, fit: TemplateFit) -> TemplateFit:
        user, call = _message("user", USER), _calls(CALLED)
        forms: tuple[Literal["object", "text"], ...] = ("object", "text")
        for short, arguments in product((False, True), forms):
            tried = replace(fit, short_ids=short, arguments=arguments)
            if self._shows(tried, [user, call, self._told()], USER, CALLED):
                return self._settle_call_forms(tried)
        return replace(fit, tool_calls=self._shows(fit, [user, call], USER, CALLED))

    def _settle_call_forms(self, fit: TemplateFit) -> TemplateFit:
        user, call = _message("user", USER), _calls(CALLED)
        raw = f'{{"x": "{CALLED}'
        call["tool_calls"][0]["function"]["arguments"] = raw
        two = _calls(CALLED, SAID)
        told_too = _message("tool", TOLD_TOO, tool_call_id=CALL_IDS[1])
        parallel = [user, two, self._told(), told_too]
        return replace(
            fit,
            raw_arguments=self._shows(fit, [user, call, self._told()], USER, raw),
            parallel_calls=self._shows(fit, parallel, USER, CALLED, SAID),
        )

    def _turn(self, text: str = CALLED) -> list[Message]:
        """A user message and what comes before a tool message."""
        called = _calls(text) if self._fit.tool_calls else _message("assistant", text)
        return [_message("user", USER), called]

    def _told(self) -> Message:
        return _message("tool", TOLD, tool_call_id=CALL_IDS[0])

    def _reasoned(self) -> list[Message]:
        return [_message("user", USER), _message("assistant", SAID, reasoning_content=WHY)]

    def _ends(self) -> tuple[str, ...]:
        """Texts that end a plain turn; none where it ends with the next message's own beginning."""
        alone = self._text(_exchange(), generate=False).partition(SAID)[2]
        followed = self._text([*_exchange(), _message("user", MORE)]).partition(SAID)[2]
        found = self._special.search(alone, 0, common_start(alone, followed, self._special))
        return (found.group(),) if found else ()

    def _next_roles(self) -> dict[str, str]:
        """By role, the special token with which a message begins behind a turn that has no end of its own."""
        roles = ["user", *(["system"] if self._fit.system == "anywhere" else [])]
        behind = {role: [*_exchange(), _message(role, MORE)] for role in roles}
        begins = {role: self._text(history).partition(SAID)[2] for role, history in behind.items()}
        begins["assistant"] = self.generation_prompt()
        if self._fit.tool_role:
            alone, told = self._call_tails()
            begins["tool"] = told[common_start(alone, told, self._special) :]
        found = {role: self._special.search(text) for role, text in begins.items()}
        return {role: match.group() for role, match in found.items() if match}

    def _call_tails(self) -> tuple[str, str]:
        """What follows the last call's argument: at the end, and where a tool message follows."""
        alone = self._text(self._turn(), generate=False).partition(CALLED)[2]
        return alone, self._text([*self._turn(), self._told()]).partition(CALLED)[2]

    def _call_ends(self) -> tuple[str, ...]:
        if not self._fit.tool_calls:
            return ()
        alone, told = self._call_tails()
        found = self._special.findall(alone[: common_start(alone, told, self._special)])
        return tuple(found[-1:])

    def generation_prompt(self) -> str:
        """What the template puts behind a user message for the assistant to go on."""
        text, bare = (self._text([_message("user", USER)], generate=generate) for generate in (True, False))
        return text[common_start(text, bare, self._special) :]

    def _default_system(self) -> str:
        head = self._text([_message("user", USER)]).partition(USER)[0]
        between = self._text([*_exchange(), _message("user", MORE)]).partition(SAID)[2].partition(MORE)[0]
        length = _shared(head[::-1], between[::-1])
        default = head[: len(head) - length]
        return "" if default.strip() in ("", self._bos) or not re.search(r"\w \w", default) else default

    def _rewrites(self) -> bool:
        more = _message("user", MORE)
        stories = [(_exchange(), [more]), (self._reasoned(), [more]), (self._turn(), [self._told(), more])]
        return any(self._changes(past, future) for past, future in stories)

    def _changes(self, past: list[Message], future: list[Message]) -> bool:
        last = CALLED if past[-1].get("tool_calls") else str(past[-1]["content"])
        told = self._text(past, generate=False).partition(last)[0]
        return not (
            self._text([*past, *future]).startswith(told + last) and told.startswith(self._text(past[:1]))
        )

    def _merges_tools(self) -> bool:
        if not self._fit.tool_role:
            return not self._fit.repeated_roles
        second = _message("tool", TOLD_TOO, tool_call_id=CALL_IDS[1])
        two = _calls(CALLED, SAID) if self._fit.parallel_calls else self._turn()[1]
        text = self._text([_message("user", USER), two, self._told(), second])
        return not self._special.search(text.partition(TOLD)[2].partition(TOLD_TOO)[0])

    def _tools(self) -> dict[str, Any]:
        history = [*_exchange(), _message("user", MORE)]
        try:
            with_tools = self._text(history, [TOOL])
        except TemplateRefusalError:
            return {"ignores_tools": True}
        if TOOL_NAME not in with_tools:
            return {"ignores_tools": True}
        tail = with_tools.partition(SAID)[2]
        moves = TOOL_NAME in tail
        return {
            "moves_tools": moves,
            "tail_needs_tools": not moves and tail != self._text(history).partition(SAID)[2],
        }

    def _moves_system(self) -> bool:
        history = [_message("system", RULE), *_exchange(), _message("user", MORE)]
        return RULE in self._text(history).partition(SAID)[2]

    def _check_locality(self) -> None:
        """New messages must look the same however long the history is."""
        for turn, new in ((_exchange(), [_message("user", MORE)]), (self._turn(), [self._told()])):
            last = CALLED if turn[-1].get("tool_calls") else str(turn[-1]["content"])
            before = [_message("user", "a"), _message("assistant", "b")] * 2
            short, long = ([*past, *turn, *new] for past in ([], before))
            if self._text(short).partition(last)[2] != self._text(long).partition(last)[2]:
                raise ModelError(
                    "the chat template shows new messages differently when the history is longer, so no "
                    "exact delta can be formed",
                    place="chat template",
                    remedy="give the tokenizer a chat template whose messages do not depend on their number",
                )


def _calls(*texts: str) -> Message:
    """An assistant message of tool calls with one argument each."""
    calls = [
        {"id": identifier, "type": "function", "function": {"name": TOOL_NAME, "arguments": {"x": text}}}
        for identifier, text in zip(CALL_IDS, texts, strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _exchange() -> list[Message]:
    return [_message("user", USER), _message("assistant", SAID)]


def _message(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def _refusals() -> tuple[type[Exception], ...]:
    """What a template, or the code around it, raises about messages that it does not take."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
