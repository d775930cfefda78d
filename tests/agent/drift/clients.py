"""Three clients that hold a history and write it in their protocol, as the real ones do."""

import json

from tests.agent.drift.script import Answer, Call, Note, Result
from tests.agent.kit import events

SCHEMAS = {
    "read": {"path": {"type": "string"}},
    "bash": {"command": {"type": "string"}},
    "edit": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
    "agent": {"prompt": {"type": "string"}},
    "search": {"query": {"type": "string"}},
}


def _schema(name):
    return {"type": "object", "properties": SCHEMAS[name]}


def _object(arguments):
    """Arguments as Anthropic's clients hold them; Claude Code wraps what is no object."""
    try:
        value = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        value = None
    if isinstance(value, dict):
        return value
    return {"__unparsedToolInput": {"raw": arguments, "len": len(arguments.encode("utf-16-le")) // 2}}


def _role(item):
    return item.role if isinstance(item, Note) else "assistant" if isinstance(item, Answer) else "user"


class Anthropic:
    """Messages: what stands between two answers is one user message, its results first."""

    path = "/v1/messages"

    def body(self, system, tools, history, fields):
        body = {"model": "m", "max_tokens": 4000, "messages": self._messages(history)}
        if system:
            body["system"] = [{"type": "text", "text": system}]
        if tools:
            body["tools"] = [
                {"name": name, "description": f"{name}.", "input_schema": _schema(name)} for name in tools
            ]
        return body | fields

    def _messages(self, history):
        messages = []
        for item in history:
            role = (
                item.role if isinstance(item, Note) else "assistant" if isinstance(item, Answer) else "user"
            )
            if role != "user" or not messages or messages[-1]["role"] != "user":
                messages.append({"role": role, "content": []})
            messages[-1]["content"] += self._blocks(item)
        return messages

    def _blocks(self, item):
        if isinstance(item, Note):
            return [{"type": "text", "text": item.text}, *map(self._image, item.images)]
        if isinstance(item, Result):
            text = {"type": "text", "text": item.text}
            content = [*map(self._image, item.images), text] if item.images else item.text
            return [{"type": "tool_result", "tool_use_id": item.call, "content": content}]
        thinking = (
            [] if item.thinking is None else [{"type": "thinking", "thinking": item.thinking, **item.seal}]
        )
        text = [{"type": "text", "text": item.text}] if item.text else []
        return [
            *thinking,
            *text,
            *(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
                for call in item.calls
            ),
        ]

    def _image(self, url):
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}

    def streamed(self, raw):
        """The answer of a whole stream."""
        assert events(raw)[-1][0] == "message_stop"
        return self.heard(raw)

    def heard(self, raw):
        """What a stream says so far."""
        blocks, said = [], []
        for name, data in events(raw):
            if name == "content_block_start":
                blocks.append(dict(data["content_block"]))
                said.append("")
            elif name == "content_block_delta":
                delta = data["delta"]
                if delta["type"] == "signature_delta":
                    blocks[-1]["signature"] = delta["signature"]
                else:
                    said[-1] += next(value for key, value in delta.items() if key != "type")
        return self._answer(blocks, said)

    def plain(self, body):
        """The answer of a body."""
        shown = {"text": "text", "thinking": "thinking"}
        said = [
            block[shown[block["type"]]] if block["type"] in shown else json.dumps(block["input"])
            for block in body["content"]
        ]
        return self._answer(body["content"], said)

    def _answer(self, blocks, said):
        answer = {"text": "", "thinking": None, "calls": (), "seal": {}}
        for block, text in zip(blocks, said, strict=True):
            if block["type"] == "thinking":
                answer |= {"thinking": text, "seal": {"signature": block.get("signature", "")}}
            elif block["type"] == "text":
                answer["text"] += text
            else:
                answer["calls"] += (Call(block["id"], block["name"], text),)
        return Answer(**answer)


class Chat:
    """Chat Completions."""

    path = "/v1/chat/completions"

    def body(self, system, tools, history, fields):
        first = [{"role": "system", "content": system}] if system else []
        body = {"model": "m", "messages": [*first, *map(self._message, history)]}
        if tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {"name": name, "description": f"{name}.", "parameters": _schema(name)},
                }
                for name in tools
            ]
        return body | fields

    def _message(self, item):
        if isinstance(item, Note):
            return {"role": item.role, "content": self._content(item)}
        if isinstance(item, Result):
            return {"role": "tool", "tool_call_id": item.call, "content": self._content(item)}
        message = {"role": "assistant", "content": item.text}
        if item.thinking is not None:
            message["reasoning_content"] = item.thinking
        if item.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in item.calls
            ]
        return message

    def _content(self, item):
        images = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in item.images]
        return [*images, {"type": "text", "text": item.text}] if images else item.text

    def streamed(self, raw):
        assert raw.endswith(b"data: [DONE]\n\n")
        return self.heard(raw)

    def heard(self, raw):
        text, thinking, calls = "", None, {}
        for _, data in events(raw):
            for choice in data["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                if "reasoning_content" in delta:
                    thinking = (thinking or "") + delta["reasoning_content"]
                for call in delta.get("tool_calls", ()):
                    known = calls.setdefault(call["index"], {"arguments": ""} | call)
                    known["name"] = call["function"].get("name", known.get("name"))
                    known["arguments"] += call["function"]["arguments"]
        return Answer(
            text,
            thinking,
            tuple(Call(call["id"], call["name"], call["arguments"]) for call in calls.values()),
        )

    def plain(self, body):
        message = body["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        return Answer(
            message["content"] or "",
            message.get("reasoning_content"),
            tuple(Call(call["id"], **call["function"]) for call in calls),
        )


class Responses:
    """Responses without storage: the items are sent back."""

    path = "/v1/responses"

    def body(self, system, tools, history, fields):
        body = {"model": "m", "input": [item for given in history for item in self._items(given)]}
        if system:
            body["instructions"] = system
        if tools:
            body["tools"] = [
                {"type": "function", "name": name, "description": f"{name}.", "parameters": _schema(name)}
                for name in tools
            ]
        return body | fields

    def _items(self, item):
        if isinstance(item, Note):
            role = "developer" if item.role == "system" else item.role
            kind = "output_text" if role == "assistant" else "input_text"
            content = [{"type": kind, "text": item.text}, *map(self._image, item.images)]
            return [{"type": "message", "role": role, "content": content}]
        if isinstance(item, Result):
            parts = [{"type": "input_text", "text": item.text}, *map(self._image, item.images)]
            output = parts if item.images else item.text
            return [{"type": "function_call_output", "call_id": item.call, "output": output}]
        items = []
        if item.thinking is not None:
            content = [{"type": "reasoning_text", "text": item.thinking}] if item.thinking else []
            items.append({"type": "reasoning", "summary": [], "content": content, **item.seal})
        if item.text or not (items or item.calls):
            content = [{"type": "output_text", "text": item.text}]
            items.append({"type": "message", "role": "assistant", "content": content} | _named(item.item))
        for call in item.calls:
            head = {"type": "function_call", "call_id": call.id, "name": call.name}
            items.append(head | {"arguments": call.arguments} | _named(call.item))
        return items

    def _image(self, url):
        return {"type": "input_image", "image_url": url, "detail": "auto"}

    def streamed(self, raw):
        name, data = events(raw)[-1]
        assert name in ("response.completed", "response.incomplete"), name
        return self.plain(data["response"])

    def plain(self, body):
        answer = {"text": "", "thinking": None, "calls": (), "seal": {}, "response": body["id"]}
        for item in body["output"]:
            if item["type"] == "reasoning":
                answer["thinking"] = item["content"][0]["text"]
                answer["seal"] = {name: item[name] for name in ("id", "encrypted_content")}
            elif item["type"] == "message":
                answer["text"] += item["content"][0]["text"]
                answer["item"] = item["id"]
            else:
                call = Call(item["call_id"], item["name"], item["arguments"], item["id"])
                answer["calls"] += (call,)
        return Answer(**answer)


class Stored(Responses):
    """Responses with storage: the new items alone are sent, and the id of the response before them."""

    def body(self, system, tools, history, fields):
        answers = [index for index, item in enumerate(history) if isinstance(item, Answer)]
        body = super().body(system, tools, history[answers[-1] + 1 :] if answers else history, fields)
        return body | ({"previous_response_id": history[answers[-1]].response} if answers else {})


def _named(name):
    return {"id": name} if name else {}


CLIENTS = {"anthropic": Anthropic(), "chat": Chat(), "responses": Responses(), "stored": Stored()}
