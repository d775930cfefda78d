"""A list cut into pages, which are numbered from 1."""

from typing import Any


class Pages:
    """Pages of at most `size` entries."""

    def __init__(self, entries: list[Any], size: int) -> None:
        self.entries = entries
        self.size = size

    @property
    def count(self) -> int:
        """How many pages there are."""
        return len(self.entries) // self.size + 1

    def page(self, number: int) -> list[Any]:
        """The entries of a page."""
        if not 1 <= number <= self.count:
            raise IndexError(f"there is no page {number}")
        start = (number - 1) * self.size
        return self.entries[start : start + self.size]
