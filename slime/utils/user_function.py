"""`UserFunction`: a plain function of the user's, called so that what it raises is an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.errors import HookError, SlimeError


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A loaded hook and its name in errors, e.g. ``--custom-tis-function-path (my.module.function)``."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Call it.

        Raises:
            HookError: it raised; errors of slime's own pass unchanged.
        """
        try:
            return self.function(*values, **named)
        except SlimeError:
            raise
        except Exception as error:
            raise HookError(f"raised {type(error).__name__}: {error}", place=self.name) from error

    def broke(self, problem: str, remedy: str | None = None) -> HookError:
        """The error that says what is wrong with its answer."""
        return HookError(problem, place=self.name, remedy=remedy)
