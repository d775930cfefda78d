"""A cache of bounded size that keeps what was used last."""

from collections import OrderedDict
from typing import Any


class Cache:
    """Holds at most `size` entries."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError("size must be at least 1")
        self.size = size
        self._entries: OrderedDict[str, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Any:
        """The value of the key, or None."""
        if key not in self._entries:
            return None
        return self._entries[key]

    def put(self, key: str, value: Any) -> None:
        """Store a value; the entry that was unused for longest goes if there is no room."""
        self._entries[key] = value
        if len(self._entries) > self.size:
            self._entries.popitem(last=False)
