"""`AnthropicAdapter`: Messages, and the counting of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from slime.agent.adapters.anthropic_wire import AnthropicWire
from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.wire import WireProtocol


class AnthropicAdapter(BaseAdapter):
    """Serves Anthropic's protocol; see `BaseAdapter` for arguments and sessions."""

    log_prefix = "anthropic adapter"

    def protocols(self) -> Mapping[str, WireProtocol]:
        """The protocol of each path."""
        return {"/v1/messages": AnthropicWire()}

    def _register_routes(self) -> None:
        super()._register_routes()
        count = partial(self._count_tokens, protocol=AnthropicWire())
        self._route("POST", "/v1/messages/count_tokens", count)
