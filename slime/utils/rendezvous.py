"""Rendezvous hashing: a key chooses among names, in the same way everywhere.

Invariant: a name that goes moves only the keys that it had, a name that comes takes only what it then has;
nothing moves between the others. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """The names in the order in which `key` prefers them, the first being its own."""
    return sorted(names, key=lambda name: _score(key, name), reverse=True)


def chosen(key: str, names: Sequence[str]) -> str:
    """The first of `ranked`; there must be a name."""
    return max(names, key=lambda name: _score(key, name))


def _score(key: str, name: str) -> tuple[bytes, str]:
    return blake2b(f"{name}\0{key}".encode(), digest_size=8).digest(), name
