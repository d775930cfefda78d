"""Formats whose parameters stand between tags; their values become JSON as the tool's schema says.

Rules where text and tags are alike: a value ends at the first closing tag of its own that a tag of the
format follows (the next parameter, or the end of the call), white space apart; any other tag within it is
text. What does not fit makes the call ill-formed up to its end tag, and the sampled text its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.agent.parsing.formats import ToolFormat, give_back
from slime.agent.parsing.output import Output
from slime.agent.parsing.reader import SPACE, Markers, Reader, Steps
from slime.agent.parsing.schema import (
    NOT_STRING,
    STRING,
    Kinds,
    as_json,
    as_string,
    kinds_of,
    parameters_by_tool,
)

_NULLABLE_STRING: Kinds = frozenset({"string", "null"})


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags of a format.

    Attributes:
        opening: begins a call; `bare`: the same for a call of a known tool where `opening` was left out.
        name_open, name, name_close: around the name, and its characters.
        key_open, key, key_close: around a parameter's name. Which `key_close` it is may tell the type:
            True for a string, False for JSON, None for the schema to say.
        value_open, value_close: around the value; `trims` one line break at either end of it.
        call_close: ends a call; `closing` follows it where there is an outer tag.
    """

    opening: str
    bare: str = ""
    name_open: str = ""
    name: re.Pattern[str]
    name_close: str = ""
    key_open: str
    key: re.Pattern[str]
    key_close: Mapping[str, bool | None]
    value_open: str = ""
    value_close: str
    trims: bool = False
    call_close: str
    closing: str = ""
    drops: tuple[str, ...] = ()


QWEN3_CODER = Tags(
    opening="<tool_call>",
    bare="<function=",
    name_open="<function=",
    name=re.compile(r"[^<>\n]*"),
    name_close=">",
    key_open="<parameter=",
    key=re.compile(r"[^<>\n]*"),
    key_close={">": None},
    value_close="</parameter>",
    trims=True,
    call_close="</function>",
    closing="</tool_call>",
)
GLM = Tags(
    opening="<tool_call>",
    name=re.compile(r"[^\s<>{}\[\]]*"),
    key_open="<arg_key>",
    key=re.compile(r"[^<>\n]*"),
    key_close={"</arg_key>": None},
    value_open="<arg_value>",
    value_close="</arg_value>",
    call_close="</tool_call>",
)
DEEPSEEK_V32 = Tags(
    opening="<｜DSML｜invoke",
    name_open='name="',
    name=re.compile(r'[^"\n]*'),
    name_close='">',
    key_open='<｜DSML｜parameter name="',
    key=re.compile(r'[^"\n]*'),
    key_close={'" string="true">': True, '" string="false">': False, '">': None},
    value_close="</｜DSML｜parameter>",
    call_close="</｜DSML｜invoke>",
    drops=(
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
    ),
)


class TagCalls(ToolFormat):
    """Calls in `tags`, of `tools` (which may be incomplete: an unknown tool's values are strings)."""

    def __init__(self, tags: Tags, tools: Sequence[Mapping[str, Any]]) -> None:
        self.opens = tuple(filter(None, (tags.opening, tags.bare)))
        self.drops = tags.drops
        self._tags = tags
        self._parameters = parameters_by_tool(tools)
        self._value_close = Markers(tags.value_close)
        self._ends = Markers(tags.closing or tags.call_close, tags.opening)

    def read(self, reader: Reader, out: Output, marker: str) -> Steps[None]:
        tags = self._tags
        reader.record(marker)
        if marker == tags.opening:
            yield from reader.run(SPACE)
            if tags.name_open and not (yield from reader.accept(tags.name_open)):
                give_back(reader, out, bare=False)
                return
        while (yield from self._call(reader, out, bare=marker == tags.bare)):
            yield from reader.run(SPACE, None if tags.closing else out.text)
            reader.record(tags.name_open)
            if not tags.closing or not (yield from reader.accept(tags.name_open)):
                reader.recorded()
                yield from reader.accept(tags.closing)
                return

    def _call(self, reader: Reader, out: Output, *, bare: bool) -> Steps[bool]:
        """Read a call from its name on; False, the text given as text, where it is none."""
        tags = self._tags
        name = yield from reader.word(tags.name)
        if not name or (bare and name not in self._parameters) or not (yield from self._begins(reader)):
            give_back(reader, out, bare=bare)
            return False
        reader.record()
        out.call(name)
        out.arguments("{")
        if (yield from self._arguments(reader, out, self._parameters.get(name, {}))):
            reader.recorded()
            out.arguments("}")
            out.end()
            return True
        marker = yield from reader.up_to(self._ends, _ignore)
        out.end(cut=not marker, sampled=reader.recorded())
        yield from reader.accept(tags.call_close)
        return True

    def _begins(self, reader: Reader) -> Steps[bool]:
        """Whether what follows a name shows that it is a call's."""
        if self._tags.name_close:
            return bool((yield from reader.accept(self._tags.name_close)))
        yield from reader.run(SPACE)
        return bool((yield from reader.ahead(self._tags.key_open, self._tags.call_close)))

    def _arguments(self, reader: Reader, out: Output, schema: Mapping[str, Any]) -> Steps[bool]:
        """Read the parameters and the call's end; False where something does not fit."""
        tags, separator = self._tags, ""
        while True:
            yield from reader.run(SPACE)
            tag = yield from reader.accept(tags.key_open, tags.call_close)
            if tag != tags.key_open:
                return bool(tag)
            key = yield from reader.word(tags.key)
            close = yield from reader.accept(*tags.key_close)
            if not close or not (yield from self._value_begins(reader)):
                return False
            out.arguments(f"{separator}{as_string(key)}: ")
            separator = ", "
            is_string = tags.key_close[close]
            kinds = kinds_of(schema, key) if is_string is None else STRING if is_string else NOT_STRING
            if not (yield from self._value(reader, _Value(out, kinds, trims=tags.trims))):
                return False

    def _value_begins(self, reader: Reader) -> Steps[bool]:
        if self._tags.trims:
            yield from reader.accept("\n")
        if not self._tags.value_open:
            return True
        yield from reader.run(SPACE)
        return bool((yield from reader.accept(self._tags.value_open)))

    def _value(self, reader: Reader, value: _Value) -> Steps[bool]:
        tags = self._tags
        while (yield from reader.past(self._value_close, value.add)):
            held = [tags.value_close]
            yield from reader.run(SPACE, held.append)
            if (yield from reader.ahead(tags.key_open, tags.call_close)) or not (yield from reader.peek()):
                value.close()
                return True
            value.add("".join(held))
        return False


class _Value:
    """A value on its way into the arguments: a string at once, anything else when it is whole."""

    def __init__(self, out: Output, kinds: Kinds, *, trims: bool) -> None:
        self._out = out
        self._kinds = kinds
        self._trims = trims
        self._last_break = ""
        self._pieces: list[str] = []
        self._quoted = kinds == STRING
        if self._quoted:
            out.arguments('"')

    def add(self, text: str) -> None:
        """More of the value."""
        text, self._last_break = self._last_break + text, ""
        if self._trims and text.endswith("\n"):
            text, self._last_break = text[:-1], "\n"
        if self._quoted:
            self._out.arguments(as_string(text)[1:-1])
        else:
            self._pieces.append(text)
            self._decide()

    def close(self) -> None:
        """The value is whole."""
        self._out.arguments('"' if self._quoted else as_json("".join(self._pieces), self._kinds))

    def _decide(self) -> None:
        """A string that may be null streams as soon as it is not."""
        if self._kinds != _NULLABLE_STRING:
            return
        text = "".join(self._pieces)
        if not any(word.startswith(text) for word in ("null", "None")):
            self._quoted = True
            self._out.arguments(as_string(text)[:-1])


def _ignore(text: str) -> None:
    """Text that is kept by being recorded."""
