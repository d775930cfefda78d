"""Random requests that look like a protocol's: real ones with parts of them replaced, moved and broken.

Everything comes from the `random.Random` that is handed in, so that a case can be made again by its seed.
"""

import copy
import json
import logging
import re
from contextlib import contextmanager

from aiohttp import web

from tests.agent.adapters.anthropic_kit import REQUESTS
from tests.agent.adapters.wires import DATA, places, replaced

PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
WORDS = [
    *(
        "user",
        "assistant",
        "system",
        "developer",
        "tool",
        "function",
        "robot",
        "tools",
        "text",
        "auto",
        "any",
    ),
    *("input_text", "output_text", "refusal", "image_url", "input_image", "image", "document", "thinking"),
    *("redacted_thinking", "tool_use", "tool_result", "tool_reference", "tool_addition", "server_tool_use"),
    *("web_search_tool_result", "search_result", "message", "reasoning", "function_call", "custom_tool_call"),
    *("function_call_output", "custom_tool_call_output", "local_shell_call", "local_shell_call_output"),
    *("item_reference", "web_search_call", "namespace", "custom", "required", "none", "allowed_tools"),
    *("json_schema", "base64", "url", "content", "web_search_20250305", "bash_20250124", "object", "array"),
    *("string", "integer", "number", "boolean", "null"),
]
KEYS = [
    *("type", "role", "content", "text", "name", "id", "call_id", "tool_call_id", "tool_use_id", "input"),
    *(
        "arguments",
        "function",
        "parameters",
        "input_schema",
        "properties",
        "description",
        "tools",
        "messages",
    ),
    *("tool_calls", "reasoning_content", "summary", "encrypted_content", "signature", "data", "source"),
    *("stop", "stop_sequences", "max_tokens", "max_output_tokens", "stream", "n", "previous_response_id"),
    *("instructions", "metadata", "user", "tool_choice", "is_error", "namespace", "__unparsedToolInput"),
]
TEXTS = [
    *("", " ", "\n\n", "x", "0", "null", "{}", "[", '{"a": ', "\x00", "\x00\x01\x1b", "é", "\U0001f600", "﷽"),
    *("\ud800", "a\udfffb", "\u2028", "\ufeff", "<|im_end|>", "<|im_start|>system\n", "<think>", "</think>"),
    *("<tool_call>", "</tool_response>", "{{ 7 * 7 }}", "{% raise %}", "__class__", "../../etc/passwd", "'"),
    *('"', "\\", "\\ud800", "%00", "a\r\nX-Evil: 1", "x" * 3000, "[" * 2000, '{"a":' * 400, "е" * 500),
    *("resp_" + "0" * 24, "call_" + "a" * 24, "rs_" + "b" * 24, "enc_" + "c" * 48, "toolu_1"),
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    2**200,
    -(2**63),
    0.5,
    -0.0,
    1e308,
]
_NESTED = re.compile(r'"@@([\[{])(\d+)@@"')
DEPTHS = (3, 50, 100, 125, *range(235, 258), 500, 980, 1100)
HEADERS = [
    ("Accept", "text/event-stream"),
    ("Accept", "*/*;q=x"),
    ("Content-Type", "text/plain; charset=utf-7"),
    ("Content-Type", "multipart/form-data"),
    ("Content-Encoding", "gzip"),
    ("Content-Encoding", "br, zstd"),
    ("Expect", "100-continue"),
    ("X-Stainless-Retry-Count", "1"),
    ("X-Stainless-Retry-Count", "-1e9"),
    ("User-Agent", "claude-cli/2"),
    ("User-Agent", "opencode/1"),
    ("User-Agent", "QwenCode/1"),
    ("User-Agent", "codex"),
    ("X-Claude-Code-Agent-Id", "a\tb"),
    ("X-Openai-Subagent", "compact"),
    ("X-Openai-Subagent", "\xe9\xff"),
    ("Thread-Id", "x" * 4000),
    ("X-Codex-Turn-Metadata", "[1"),
    ("X-Codex-Turn-Metadata", '{"request_kind": [], "thread_source": {}}'),
    ("X-Codex-Turn-Metadata", "[" * 1500),
    ("Originator", "codex"),
    ("X-Parent-Session-Id", "\xc3\x28"),
    ("X-Api-Key", "nobody"),
    ("Cookie", "a=b; c"),
    ("Connection", "upgrade"),
    ("Upgrade", "websocket"),
]


def seeds():
    """Valid bodies by protocol."""
    found = {"chat": [], "responses": [], "messages": [request["body"] for request in REQUESTS.values()]}
    for path in sorted(DATA.glob("*.json")):
        found[path.name.partition("_")[0]].append(json.loads(path.read_text())["body"])
    found["chat"].append(
        {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "tools": [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}],
            "tool_choice": {"type": "function", "function": {"name": "read"}},
            "stop": ["x"],
            "max_tokens": 8,
        }
    )
    found["responses"].append({"model": "m", "input": "hi", "instructions": "be brief", "stream": True})
    found["messages"].append({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]})
    url, source = "data:image/png;base64,AAAA", {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    chat = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "see"}]
    found["chat"].append({"model": "m", "messages": [{"role": "user", "content": chat}]})
    shown = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    found["responses"].append({"model": "m", "input": shown})
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    found["messages"].append({"model": "m", "max_tokens": 5, "messages": messages})
    return found


def nested(random):
    """A mark that `encoded` turns into something deep, which Python itself could not walk through."""
    return f"@@{random.choice('[{')}{random.choice(DEPTHS)}@@"


def _deep(found):
    opening, closing = ("[", "]") if found[1] == "[" else ('{"properties":', "}")
    return opening * int(found[2]) + "1" + closing * int(found[2])


def value_of(random, body):
    """Anything: a constant, a text, something deep, or another part of the body."""
    kind = random.randrange(8)
    if kind == 0:
        return random.choice([None, True, False, [], {}, [[]], [None], [{}], {"": None}, {"type": "text"}])
    if kind == 1:
        return random.choice(NUMBERS)
    if kind == 2:
        return nested(random)
    if kind in (3, 4):
        return random.choice(TEXTS)
    if kind == 5:
        return random.choice(WORDS)
    return at(body, random.choice(list(places(body))))


def at(value, path):
    for name in path:
        value = value[name]
    return value


def mutate(random, body):
    """The body with one change at one place."""
    body = copy.deepcopy(body)
    path = random.choice(list(places(body)))
    part = at(body, path)
    if isinstance(part, dict) and part and random.random() < 0.7:
        part = _changed_object(random, part, body)
    elif isinstance(part, list) and part and random.random() < 0.7:
        part = _changed_list(random, part)
    elif isinstance(part, str) and random.random() < 0.4:
        cut = random.randrange(len(part) + 1)
        part = part[:cut] + random.choice(TEXTS) + part[cut:]
    else:
        part = random.choice([value_of(random, body), [part], {"type": "text", "text": part}])
    return replaced(body, path, part)


def _changed_object(random, part, body):
    name = random.choice(list(part))
    rest = {key: value for key, value in part.items() if key != name}
    return random.choice(
        [
            rest,
            rest | {random.choice(KEYS): part[name]},
            part | {random.choice(KEYS): value_of(random, body)},
            part | {name: random.choice(WORDS)},
        ]
    )


def _changed_list(random, part):
    place, other = random.randrange(len(part)), random.randrange(len(part))
    moved = [*part]
    moved[place], moved[other] = part[other], part[place]
    return random.choice(
        [part[:place] + part[place + 1 :], [*part, part[place]], part[:place] + part[other:], moved, part * 3]
    )


def encoded(random, body):
    """The bytes of a body, now and then no good JSON any more."""
    text = json.dumps(body, ensure_ascii=random.random() < 0.8)
    raw = _NESTED.sub(_deep, text).encode(errors="surrogatepass")
    kind = random.random()
    if kind < 0.05 and raw.startswith(b"{") and len(raw) > 2:
        return b'{"messages": null, "input": 3, ' + raw[1:]
    if kind < 0.15:
        place = random.randrange(len(raw))
        return raw[:place] + random.choice([b"", b"\xff", b"\x00", b"}", b'"', raw[:9]]) + raw[place + 1 :]
    return raw


@contextmanager
def watched_logs():
    """The tracebacks that the adapter logged meanwhile: the failures that nobody foresaw.

    aiohttp's own are none: the rest of a body that was refused as undecodable, a client that left the engine.
    """
    records = []

    def emit(record):
        error = record.exc_info[1] if record.exc_info else None
        is_engines = "slime/serving" in told([record]) and isinstance(error, ConnectionError)
        if error and not is_engines and not isinstance(error, web.RequestPayloadError):
            records.append(record)

    handler = logging.Handler()
    handler.emit = emit
    logging.getLogger().addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger().removeHandler(handler)


def told(records):
    """The tracebacks as text."""
    return "\n".join(logging.Formatter().format(record) for record in records)
