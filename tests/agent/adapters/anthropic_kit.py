"""The Anthropic wire, and requests of real clients to it (their long texts replaced)."""

import copy
import json
from pathlib import Path

from slime.agent.adapters.anthropic_wire import AnthropicWire

WIRE = AnthropicWire()
REQUESTS = json.loads((Path(__file__).parent / "anthropic_requests.json").read_text())
TOOL = {"name": "Bash", "description": "Runs.", "input_schema": {"type": "object", "properties": {"x": {}}}}
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def real(name):
    """The common form of a client's request."""
    request = copy.deepcopy(REQUESTS[name])
    return WIRE.translate(request["body"], request["headers"])


def translate(messages, **fields):
    """The common form of a body with these messages."""
    return WIRE.translate({"model": "m", "max_tokens": 9, "messages": messages, **fields}, {})


def one(content, role="user", **fields):
    """The messages that one message gives."""
    return list(translate([{"role": role, "content": content}], **fields).messages)
