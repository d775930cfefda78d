"""Output of a program: read as it comes, so that it never waits, and kept within a bound.

The beginning and the end are kept; what is cut between them is told in the text. Knows nothing of boxes.
"""

from __future__ import annotations

import asyncio
import os

_CHUNK = 1 << 16


class Capture:
    """Reads one pipe on the running loop until its end; `limit` bytes are kept."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor = descriptor
        self.head = bytearray()
        self.tail = bytearray()
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.total = 0
        self.open = True
        os.set_blocking(descriptor, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    def _read(self) -> bool:
        """Read what is there; whether there may be more."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        room = max(0, self.head_limit - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 2 * self.tail_limit + _CHUNK:
            self._trim()

    def _trim(self) -> None:
        del self.tail[: max(0, len(self.tail) - self.tail_limit)]

    def take(self) -> str:
        """The text so far. The pipe is drained on, unkept, for what the program left running in the
        background.
        """
        for _ in range(1024):  # a background writer must not hold the result back
            if not self.open or not self._read():
                break
        self._trim()
        cut = self.total - len(self.head) - len(self.tail)
        note = f"\n[... {cut} bytes of output cut ...]\n".encode() if cut else b""
        text = (bytes(self.head) + note + bytes(self.tail)).decode(errors="replace")
        self.head_limit = self.tail_limit = 0
        self.head.clear()
        self.tail.clear()
        return text

    def close(self) -> None:
        """Stop reading."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
