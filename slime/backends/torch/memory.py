"""The process's heap: kept while training, given back when the machine runs short.

Every step allocates the same tensors. By default glibc maps and unmaps the large ones each time, and the page
faults of a step then cost more than its elementwise arithmetic. Does nothing where the C library is not
glibc.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import psutil

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_SHORT_SHARE = 0.3


def keep_heap() -> None:
    """Let freed memory stay with the process, for all threads in one heap."""
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 2**26)
    mallopt(_ARENA_MAX, 1)


def release_heap() -> None:
    """Give freed memory back where less than 30 % of the machine's memory is available."""
    trim = _glibc("malloc_trim")
    memory = psutil.virtual_memory()
    if trim is not None and memory.available < _SHORT_SHARE * memory.total:
        trim(0)


def _glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
