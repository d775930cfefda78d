"""Calling what may fail."""

from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def delays(tries: int, first: float = 0.5, most: float = 8.0) -> list[float]:
    """Seconds to wait between the tries: doubled each time, up to a limit."""
    return [min(most, first * 2**number) for number in range(tries - 1)]


def call(
    function: Callable[[], Value], tries: int = 3, sleep: Callable[[float], None] = lambda seconds: None
) -> Value:
    """The function's value, from the first try that gives one."""
    for delay in delays(tries):
        try:
            return function()
        except OSError:
            sleep(delay)
    raise RuntimeError("gave up")
