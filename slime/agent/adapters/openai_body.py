"""Reading what an OpenAI client sent: every field is checked where it is used, and an error names its place.

Invariant: whatever JSON comes in, nothing but `AdapterError` of kind ``invalid_request`` goes out. Content
and tool arguments take one canonical form, however a client wrote them. Knows neither protocol's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from slime.agent.adapters.wire import AdapterError

_JSON_KINDS = (
    (bool, "a boolean"),
    (str, "text"),
    (int | float, "a number"),
    (list, "a list"),
    (Mapping, "an object"),
)
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# orjson reads 1024 levels and writes 254; text with no more brackets than this is safe with both.
_SAFE_BRACKETS = 200
# Levels that a history adds around a value that a client sent.
_LEVELS_AROUND = 16


def invalid(path: str, why: str) -> AdapterError:
    """A refusal that names the field."""
    error = AdapterError("invalid_request", f"{path}: {why}")
    error.place = path
    return error


class Fields:
    """An object of the body, and where it stands. Null counts as missing everywhere.

    Raises:
        AdapterError: ``invalid_request``, here and in each method, where the value is not what it must be.
    """

    __slots__ = ("_where", "value")

    def __init__(
        self, value: Any, path: str = "", *, within: tuple[Fields, str, int | None] | None = None
    ) -> None:
        self.value = value
        self._where = within or path
        if type(value) is not dict and not isinstance(value, Mapping):
            raise _unexpected(self.path or "body", "an object", value)

    @property
    def path(self) -> str:
        """Where the object stands; put together only when it is asked for, which is for an error."""
        if isinstance(self._where, str):
            return self._where
        parent, name, index = self._where
        return parent.at(name) if index is None else f"{parent.at(name)}[{index}]"

    def at(self, name: str) -> str:
        """Path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def text(self, name: str) -> str:
        """A text that must be there and not be empty."""
        value = self.optional_text(name)
        if not value:
            raise invalid(self.at(name), "is required")
        return value

    def optional_text(self, name: str) -> str | None:
        """A text, or None."""
        value = self.value.get(name)
        if value is not None and not isinstance(value, str):
            raise _unexpected(self.at(name), "text", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.value.get(name)
        if value is not None and not isinstance(value, bool):
            raise _unexpected(self.at(name), "a boolean", value)
        return default if value is None else value

    def count(self, name: str) -> int | None:
        """An integer of 1 or more, or None."""
        value = self.value.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise _unexpected(self.at(name), "an integer", value)
        if value < 1:
            raise invalid(self.at(name), f"must be 1 or more, not {value}")
        return value

    def items(self, name: str) -> list[Any]:
        """A list; empty where the field is missing."""
        value = self.value.get(name)
        if value is not None and not isinstance(value, list):
            raise _unexpected(self.at(name), "a list", value)
        return value or []

    def objects(self, name: str) -> list[Fields]:
        """The objects of a list."""
        return [Fields(value, within=(self, name, index)) for index, value in enumerate(self.items(name))]

    def object(self, name: str) -> Fields | None:
        """An object, or None."""
        value = self.value.get(name)
        return None if value is None else Fields(value, within=(self, name, None))

    def content(self, name: str) -> str | list[dict[str, Any]]:
        """Text, or where there are images a list of ``text`` and ``image_url`` parts."""
        value = self.value.get(name)
        if value is None or isinstance(value, str):
            return value or ""
        parts = [_part(part) for part in self.objects(name)]
        if all(part["type"] == "text" for part in parts):
            return "\n".join(part["text"] for part in parts if part["text"])
        return parts

    def plain_content(self, name: str) -> str:
        """Content where only text can stand."""
        content = self.content(name)
        if not isinstance(content, str):
            raise invalid(self.at(name), "only text can stand here")
        return content

    def arguments(self, name: str) -> dict[str, Any] | str:
        """Arguments of a tool call as an object; text that is none stays text."""
        if isinstance(self.value.get(name), Mapping):
            return self.json_object(name)
        return read_arguments(self.optional_text(name) or "")

    def json_object(self, name: str) -> dict[str, Any]:
        """An object as it is, that can be written again; empty where the field is missing."""
        fields = self.object(name)
        if fields and not can_be_written(fields.value):
            raise invalid(fields.path, "is nested too deeply")
        return dict(fields.value) if fields else {}


def read_arguments(text: str) -> dict[str, Any] | str:
    """The object that JSON text of arguments gives: {} for no text, `text` itself where it gives none."""
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    is_safe = text.count("{") + text.count("[") <= _SAFE_BRACKETS or can_be_written(value)
    return value if isinstance(value, dict) and is_safe else text


def function_tool(fields: Fields, name: str, description: str = "") -> dict[str, Any]:
    """The canonical form of a function that `fields` describe, under `name`."""
    described = fields.optional_text("description") or ""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "\n\n".join(text for text in (description, described) if text),
            "parameters": fields.json_object("parameters") or {"type": "object", "properties": {}},
        },
    }


def can_be_written(value: Any) -> bool:
    """Whether a value is not nested too deeply to be written as JSON."""
    for _ in range(_LEVELS_AROUND):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


def _part(part: Fields) -> dict[str, Any]:
    kind = part.text("type")
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": part.optional_text(_TEXT_PARTS[kind]) or ""}
    if kind == "image_url":
        image = part.object("image_url")
        if image is None:
            raise invalid(part.at("image_url"), "is required")
        return {"type": "image_url", "image_url": {"url": image.text("url")}}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.text("image_url")}}
    raise invalid(part.at("type"), f"content of type {kind!r} is not supported")


def _unexpected(path: str, wanted: str, value: Any) -> AdapterError:
    got = next((name for kind, name in _JSON_KINDS if isinstance(value, kind)), "null")
    return invalid(path, f"expected {wanted}, got {got}")
