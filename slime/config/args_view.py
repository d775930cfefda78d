"""`args`: the flat view of the configuration that hooks get.

Invariant: flags and derived values are read-only; only keys that are nobody's flag (the user's own, from
``--custom-config-path`` or set by a hook) can be written. A misspelt name raises with the nearest match.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from slime.errors import ConfigError


class ArgsView:
    """Attribute access to flags by dest (dashes as underscores), derived values and user keys."""

    def __init__(self, values: Mapping[str, Any], user: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "_values", dict(values))
        object.__setattr__(self, "_user", dict(user or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for store in (self._user, self._values):
            if name in store:
                return store[name]
        close = difflib.get_close_matches(name, [*self._values, *self._user], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"args has no attribute {name!r}{hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._values:
            raise ConfigError(
                "args is read-only for hooks",
                place=f"args.{name}",
                remedy="keep your own values under your own names (--custom-config-path)",
            )
        self._user[name] = value

    def __delattr__(self, name: str) -> None:
        raise ConfigError("args is read-only for hooks", place=f"args.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values | self._user)

    def __contains__(self, name: str) -> bool:
        return name in self._values or name in self._user

    def __repr__(self) -> str:
        return f"ArgsView({self._values | self._user})"

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self._values, "user": self._user}

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", state["values"])
        object.__setattr__(self, "_user", state["user"])

    def with_values(self, **values: Any) -> ArgsView:
        """A copy with further derived values, e.g. the engine's address once it is known."""
        return ArgsView(self._values | values, self._user)
