"""Formats whose arguments are JSON: call objects after a marker, or markers around name and arguments.

Rules where a model errs: a marker within a JSON string belongs to the string. A closing brace that is
missing before the end marker is forgiven if the arguments are whole. Anything else that is wrong after the
name makes the call ill-formed up to the next marker; before the name, it makes the text no call at all.
"""

from __future__ import annotations

import abc
import re

from slime.agent.parsing.formats import ToolFormat, give_back
from slime.agent.parsing.json_text import CallObject, pass_value
from slime.agent.parsing.output import Output
from slime.agent.parsing.reader import SPACE, Markers, Reader, Steps

_NAME = re.compile(r"[^\s\[\]{}<>|｜]*")


class ObjectCalls(ToolFormat):
    """Call objects after a marker, one or several, also as a JSON array.

    Hermes and Qwen: ``<tool_call>{...}</tool_call>``. Llama 3: ``<|python_tag|>{...}; {...}``, or without the
    marker where the named tool is `known`. Mistral up to version 7: ``[TOOL_CALLS] [{...}, {...}]``.
    """

    def __init__(
        self, opening: str, closing: str = "", *, bare_open: str = "", known: frozenset[str] = frozenset()
    ) -> None:
        self.opens = (opening,)
        self.bare_open = bare_open
        self._closing = closing
        self._known = known
        self._markers = Markers(*filter(None, (opening, closing)))

    def read(self, reader: Reader, out: Output, marker: str) -> Steps[None]:
        reader.record(marker)
        yield from reader.run(SPACE)
        array = yield from reader.accept("[")
        while (yield from self._call(reader, out, None if marker else self._known)):
            yield from reader.run(SPACE, None if self._closing or array else out.text)
            if (yield from reader.accept(",", ";")):
                yield from reader.run(SPACE)
            if (yield from reader.peek()) != "{":
                yield from self._close(reader, out, array)
                return
            reader.record()

    def _call(self, reader: Reader, out: Output, known: frozenset[str] | None) -> Steps[bool]:
        call = CallObject(out, known)
        whole = yield from call.read(reader)
        if not call.named:
            give_back(reader, out, bare=known is not None)
            return False
        reader.recorded()
        marker = "" if whole else (yield from reader.up_to(self._markers, call.argument))
        out.end(cut=not whole and not marker)
        return True

    def _close(self, reader: Reader, out: Output, array: str) -> Steps[None]:
        if array:
            yield from reader.accept("]")
        if not self._closing:
            return
        yield from reader.run(SPACE)
        if not (yield from reader.accept(self._closing)):
            out.flag()
            yield from reader.up_to(self._markers, out.text)
            yield from reader.accept(self._closing)


class NamedCalls(ToolFormat):
    """Markers before the name, between name and arguments, and at the end of each call.

    Attributes:
        fence: stands between the arguments and the end marker.
    """

    fence: str = ""

    def __init__(self, opening: str, closing: str, *section: str) -> None:
        self.opens = (opening,)
        self.drops = (*section, closing) if closing else section
        self._markers = Markers(opening, *self.drops)

    def read(self, reader: Reader, out: Output, marker: str) -> Steps[None]:
        reader.record(marker)
        yield from reader.run(SPACE)
        name = yield from self._head(reader)
        if not name:
            give_back(reader, out, bare=False)
            return
        reader.recorded()
        out.call(name)
        whole = yield from pass_value(reader, out.arguments)
        following = "" if whole else (yield from reader.up_to(self._markers, out.arguments))
        out.end(cut=not whole and not following)
        if self.fence:
            yield from reader.run(SPACE)
            yield from reader.accept(self.fence)

    @abc.abstractmethod
    def _head(self, reader: Reader) -> Steps[str]:
        """Read up to the arguments and give the name, or "" where this is no call."""


class DeepSeekV3Calls(NamedCalls):
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME``, then the arguments as a fenced block of JSON."""

    fence = "```"

    def _head(self, reader: Reader) -> Steps[str]:
        if not (yield from reader.accept("function<｜tool▁sep｜>")):
            return ""
        name = yield from reader.word(_NAME)
        yield from reader.run(SPACE)
        yield from reader.accept("```json")
        yield from reader.run(SPACE)
        return name


class DeepSeekV31Calls(NamedCalls):
    """``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``."""

    def _head(self, reader: Reader) -> Steps[str]:
        name = yield from reader.word(_NAME)
        yield from reader.run(SPACE)
        if not (yield from reader.accept("<｜tool▁sep｜>")):
            return ""
        yield from reader.run(SPACE)
        return name


class KimiCalls(NamedCalls):
    """``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>``."""

    def _head(self, reader: Reader) -> Steps[str]:
        identifier = yield from reader.word(_NAME)
        yield from reader.run(SPACE)
        if not (yield from reader.accept("<|tool_call_argument_begin|>")):
            return ""
        yield from reader.run(SPACE)
        return re.sub(r":\d+$", "", identifier.removeprefix("functions."))


class MistralCalls(NamedCalls):
    """``[TOOL_CALLS]NAME[ARGS]{...}`` (also with ``[CALL_ID]`` or without ``[ARGS]``), or call objects."""

    def __init__(self) -> None:
        super().__init__("[TOOL_CALLS]", "")
        self._objects = ObjectCalls("[TOOL_CALLS]")

    def read(self, reader: Reader, out: Output, marker: str) -> Steps[None]:
        yield from reader.run(SPACE)
        following = yield from reader.peek()
        form = self._objects.read if following in ("[", "{") else super().read
        yield from form(reader, out, marker)

    def _head(self, reader: Reader) -> Steps[str]:
        name = yield from reader.word(_NAME)
        if (yield from reader.accept("[CALL_ID]")):
            yield from reader.run(_NAME)
        with_marker = yield from reader.accept("[ARGS]")
        yield from reader.run(SPACE)
        return name if with_marker or (yield from reader.peek()) == "{" else ""
