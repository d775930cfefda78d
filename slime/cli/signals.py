"""Signals of verbs that run until they are told to end, or until they are done.

Invariant: behind the block the handlers are those of before.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the verb as SIGINT does: cleanly."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
