"""`Problem`: one thing that is wrong with a configuration, told with its flag and its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from slime.config import Config


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do about it; a warning lets the run go on."""

    flag: str
    message: str
    remedy: str
    warning: bool = False


Check: TypeAlias = Callable[["Config", frozenset[str]], Iterator[Problem]]
"""Gets the configuration and the dests that the user set."""
_NEGATED = {
    "grpo_std_normalization": "disable-grpo-std-normalization",
    "rewards_normalization": "disable-rewards-normalization",
}


def listed(value: str | list[str] | None) -> list[str]:
    """The words of a flag that takes one or several."""
    return [value] if isinstance(value, str) else list(value or [])


def dashed(dest: str) -> str:
    """The flag of a dest, as the user writes it."""
    return "--" + _NEGATED.get(dest, dest.replace("_", "-"))
