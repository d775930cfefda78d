"""`OpenAIAdapter`: Chat Completions and Responses."""

from __future__ import annotations

from collections.abc import Mapping

from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.chat_wire import ChatWire
from slime.agent.adapters.responses_wire import ResponsesWire
from slime.agent.adapters.wire import WireProtocol


class OpenAIAdapter(BaseAdapter):
    """Serves OpenAI's two protocols; see `BaseAdapter` for arguments and sessions."""

    log_prefix = "openai adapter"

    def protocols(self) -> Mapping[str, WireProtocol]:
        """The protocol of each path."""
        return {"/v1/chat/completions": ChatWire(), "/v1/responses": ResponsesWire()}
