"""`Hands`: what the parts of a run (pools of engines, places) need of the run that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Hands(Protocol):
    """Makes actors, waits for them, tells the user."""

    def make(
        self, name: str, path: str, threads: int, *arguments: Any, placed: Mapping[str, Any], vital: bool
    ) -> Any:
        """An actor; the end of a vital one ends the run."""
        ...

    def wait_all(self, name: str, calls: Mapping[str, Any]) -> list[Any]:
        """Results of calls by actor, within the deadline of a phase."""
        ...

    def note(self, text: str) -> None:
        """Tell the user."""
        ...
