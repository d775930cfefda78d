"""JSON read piece by piece and passed on as it was written.

A marker within a JSON string is text: it never ends a value. Invariant: a value that is reported complete
has matching brackets and closed strings; whether it is valid JSON is checked by whoever has the whole.
"""

from __future__ import annotations

import re

import orjson

from slime.agent.parsing.output import Output
from slime.agent.parsing.reader import Reader, Sink, Steps

JSON_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
_INSIDE = re.compile(r"[ \t\r\n,:0-9A-Za-z+\-.]*")
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")


def pass_string(reader: Reader, sink: Sink) -> Steps[bool]:
    """A string, its quotes included, to `sink`; False where it breaks off."""
    yield from reader.take(1, sink)
    while True:
        yield from reader.run(_PLAIN, sink)
        following = yield from reader.peek()
        yield from reader.take(2 if following == "\\" else 1, sink)
        if following in ('"', ""):
            return bool(following)


def pass_value(reader: Reader, sink: Sink) -> Steps[bool]:
    """A value to `sink`; False where it breaks off, or where something stands that JSON does not have."""
    following = yield from reader.peek()
    if following == '"':
        return (yield from pass_string(reader, sink))
    if following in _CLOSERS:
        return (yield from _pass_container(reader, sink))
    yield from reader.run(_SCALAR, sink)
    return bool(following) and _SCALAR.fullmatch(following) is not None


def _pass_container(reader: Reader, sink: Sink) -> Steps[bool]:
    open_brackets: list[str] = []
    while True:
        yield from reader.run(_INSIDE, sink)
        following = yield from reader.peek()
        if following == '"':
            if not (yield from pass_string(reader, sink)):
                return False
            continue
        if following in _CLOSERS:
            open_brackets.append(_CLOSERS[following])
        elif not following or following != open_brackets.pop():
            return False
        yield from reader.take(1, sink)
        if not open_brackets:
            return True


class CallObject:
    """``{"name": ..., "arguments": {...}}``, its keys in any order; "parameters" means "arguments".

    The call begins once its name is read; arguments that come first wait for it.

    Attributes:
        named: the call has begun.
    """

    def __init__(self, out: Output, known: frozenset[str] | None = None) -> None:
        self.named = False
        self._out = out
        self._known = known
        self._waiting: list[str] = []
        self._has_arguments = False

    def read(self, reader: Reader) -> Steps[bool]:
        """Read the object; False where it breaks off or is no object of a call (of a `known` tool)."""
        if not (yield from reader.accept("{")):
            return False
        while not (yield from self._closes(reader)):
            if not (yield from self._member(reader)):
                return False
            yield from reader.run(JSON_SPACE)
            if not (yield from reader.accept(",")):
                if not (yield from reader.accept("}")):
                    return False
                break
        if not self._has_arguments:
            self.argument("{}")
        return self.named

    def argument(self, text: str) -> None:
        """More of the arguments."""
        if self.named:
            self._out.arguments(text)
        else:
            self._waiting.append(text)

    def _closes(self, reader: Reader) -> Steps[bool]:
        yield from reader.run(JSON_SPACE)
        return bool((yield from reader.accept("}")))

    def _member(self, reader: Reader) -> Steps[bool]:
        key = yield from _read_string(reader)
        yield from reader.run(JSON_SPACE)
        if key is None or not (yield from reader.accept(":")):
            return False
        yield from reader.run(JSON_SPACE)
        if key == "name" and not self.named:
            return self._begin((yield from _read_string(reader)))
        if key not in _ARGUMENTS:
            return (yield from pass_value(reader, _ignore))
        self._has_arguments = True
        return (yield from pass_value(reader, self.argument))

    def _begin(self, name: str | None) -> bool:
        if not name or (self._known is not None and name not in self._known):
            return False
        self.named = True
        self._out.call(name)
        for text in self._waiting:
            self._out.arguments(text)
        return True


def _read_string(reader: Reader) -> Steps[str | None]:
    if (yield from reader.peek()) != '"':
        return None
    pieces: list[str] = []
    yield from pass_string(reader, pieces.append)
    try:
        return str(orjson.loads("".join(pieces)))
    except orjson.JSONDecodeError:
        return None


def _ignore(text: str) -> None:
    """A member that calls do not have."""
