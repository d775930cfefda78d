"""What sglang-router answers where it could not ask its worker."""

from __future__ import annotations

_LOST = b'"call_upstream_request_error"'


def worker_was_lost(status: int, content: bytes) -> bool:
    """Whether the router's worker did not answer: it dies, and the router does not know yet.

    That is told as 500, as an engine's own failures are, and a retry helps once the router has found out.
    """
    return status == 500 and _LOST in content
