"""What a flag is. Sections (sections.py) declare their fields with `flag(...)`; command line, YAML, typed
sections and the `args` view are all derived from those declarations.

Invariant: a value that reached a section has the declared type and lies in the declared range.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime.errors import ConfigError

FlagKind = Literal[
    "int", "float", "str", "switch", "tri", "ints", "floats", "strs", "str_or_strs", "append", "json"
]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One row of the flag table.

    Attributes:
        name: dashed name without the leading dashes.
        dest: attribute name on the section and on `args`.
        kind: ``switch`` is a bare flag, ``tri`` is ``--x``/``--no-x``, ``append`` may be repeated,
            ``str_or_strs`` is a text where one word is given, and a list where several are.
        at_least, at_most, above: range of a number.
    """

    name: str
    dest: str
    section: str
    kind: FlagKind
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    negated: bool = False

    def check(self, value: Any, place: str) -> Any:
        """Return the value in its declared type.

        Raises:
            ConfigError: wrong type, out of range, or not one of the choices.
        """
        if value is None:
            if self.default is None:
                return None
            raise ConfigError("needs a value", place=place, remedy="leave it out for the default")
        value = self._typed(value, place)
        for item in value if isinstance(value, list) else [value]:
            self._in_range(item, place)
        return value

    def _typed(self, value: Any, place: str) -> Any:
        try:
            return _CONVERTERS[self.kind](value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"expects {_EXPECTS[self.kind]}, got {value!r}", place=place) from error

    def _in_range(self, value: Any, place: str) -> None:
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"must be one of {', '.join(map(str, self.choices))}; got {value!r}", place=place
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if self.at_least is not None and not value >= self.at_least:
            raise ConfigError(f"must be at least {self.at_least:g}, got {value:g}", place=place)
        if self.above is not None and not value > self.above:
            raise ConfigError(f"must be above {self.above:g}, got {value:g}", place=place)
        if self.at_most is not None and not value <= self.at_most:
            raise ConfigError(f"must be at most {self.at_most:g}, got {value:g}", place=place)


def flag(
    default: Any,
    help: str,
    kind: FlagKind,
    *,
    name: str | None = None,
    choices: Sequence[str] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    negated: bool = False,
) -> Any:
    """A dataclass field that is a flag. `name` where the flag is not the field's name with dashes."""
    metadata = {
        "help": help,
        "kind": kind,
        "name": name,
        "choices": tuple(choices),
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
        "negated": negated,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(section: type, section_name: str, prefix: str = "") -> list[Flag]:
    """The rows of one section; `prefix` (e.g. ``engine-``) goes before names and dests."""
    rows = []
    for item in dataclasses.fields(section):
        meta = dict(item.metadata)
        name = prefix + (meta.pop("name") or item.name.replace("_", "-"))
        factory = item.default_factory
        default = item.default if factory is dataclasses.MISSING else factory()
        dest = prefix.replace("-", "_") + item.name
        rows.append(Flag(name=name, dest=dest, section=section_name, default=default, **meta))
    return rows


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


def _to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(value)
    return value


def _to_str(value: Any) -> str:
    if isinstance(value, list | dict):
        raise ValueError(value)
    return str(value)


def _to_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _to_str_or_strs(value: Any) -> str | list[str]:
    words = [_to_str(item) for item in _to_list(value)]
    return words[0] if len(words) == 1 else words


def _to_json(value: Any) -> dict[str, Any]:
    loaded = json.loads(value) if isinstance(value, str) else value
    if not isinstance(loaded, dict):
        raise ValueError(value)
    return loaded


_CONVERTERS: dict[str, Any] = {
    "int": _to_int,
    "float": _to_float,
    "str": _to_str,
    "switch": _to_bool,
    "tri": _to_bool,
    "ints": lambda value: [_to_int(item) for item in _to_list(value)],
    "floats": lambda value: [_to_float(item) for item in _to_list(value)],
    "strs": lambda value: [_to_str(item) for item in _to_list(value)],
    "str_or_strs": _to_str_or_strs,
    "append": lambda value: [_to_str(item) for item in _to_list(value)],
    "json": _to_json,
}
_EXPECTS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "switch": "true or false",
    "tri": "true or false",
    "ints": "whole numbers",
    "floats": "numbers",
    "strs": "texts",
    "str_or_strs": "texts",
    "append": "texts",
    "json": "a JSON object",
}
