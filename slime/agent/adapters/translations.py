"""What the messages of a session were translated to, so that a history that is sent again is not read again.

Invariant: equal JSON gives the same messages. Clients send their whole history with every request; beyond its
new end this costs a digest a message. Knows no protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from slime.agent.messages import Message

KEPT_BYTES = 32 * 2**20


class Translations:
    """Translated messages by the JSON that they came from. Nobody may change them.

    Args:
        kept_bytes: of JSON that is remembered; when there is more, all is forgotten.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._most = kept_bytes
        self._bytes = 0
        self._by_digest: dict[int, list[Message]] = {}

    def of(
        self, given: Mapping[str, Any], translate: Callable[[], list[Message]], *, context: int = 0
    ) -> list[Message]:
        """What `translate` gives for a message, or gave when the same was sent before.

        Args:
            context: a digest of whatever else the translation depends on.
        """
        try:
            written = orjson.dumps(given)
        except orjson.JSONEncodeError:  # nested too deeply: `translate` tells what is wrong with it
            return translate()
        digest = hash((written, context))
        found = self._by_digest.get(digest)
        if found is None:
            found = translate()
            self._keep(digest, found, len(written))
        return found

    def _keep(self, digest: int, messages: list[Message], size: int) -> None:
        if size > self._most:
            return
        if self._bytes + size > self._most:
            self._by_digest.clear()
            self._bytes = 0
        self._by_digest[digest] = messages
        self._bytes += size
