"""A server that speaks the three protocols just well enough for a client's two turns: a shell command, then
a closing text. It knows no tokens: it shows that a client starts and ends with a harness's settings."""

import json
import uuid

from aiohttp import web

SHELL_TOOLS = ("Bash", "bash", "exec_command", "run_shell_command")
USAGE = {"input_tokens": 1000, "output_tokens": 10, "total_tokens": 1010}
CHAT_USAGE = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}


class MockServer:
    """Plays `turns`, shell commands, to requests that offer a shell tool, then answers all with `text`.

    Attributes:
        requests: path, headers and body of every POST.
        other: method and path of everything else that was asked.
    """

    def __init__(self, turns, *, text="All done.", refuse_with=None):
        self.turns = list(turns)
        self.text = text
        self.refuse_with = refuse_with
        self.requests = []
        self.other = []
        self.app = web.Application(client_max_size=1 << 26)
        self.app.router.add_route("*", "/{path:.*}", self.answer)

    async def answer(self, request):
        if request.method != "POST":
            self.other.append((request.method, request.path))
            return web.json_response({"data": []})
        body = await request.json()
        self.requests.append({"path": request.path, "headers": dict(request.headers), "body": body})
        if request.path.endswith("count_tokens"):
            return web.json_response({"input_tokens": 100})
        if self.refuse_with:
            return web.json_response({"error": {"type": "x", "message": "no"}}, status=self.refuse_with)
        tool = next((name for name in names_of(body) if name in SHELL_TOOLS), None)
        command = self.turns.pop(0) if tool and self.turns else None
        call = (tool, arguments(tool, command)) if command else None
        return await self.reply(request, body, call)

    async def reply(self, request, body, call):
        if request.path.endswith("/messages"):
            make = anthropic
        elif request.path.endswith("/responses"):
            make = responses
        elif request.path.endswith("/chat/completions"):
            make = chat
        else:
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        whole, events = make(body, call, self.text)
        if not body.get("stream"):
            return web.json_response(whole)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for kind, event in events:
            head = f"event: {kind}\n" if kind else ""
            data = event if isinstance(event, str) else json.dumps(event)
            await stream.write(f"{head}data: {data}\n\n".encode())
        return stream


def names_of(body):
    tools = body.get("tools") or []
    return [tool.get("name") or (tool.get("function") or {}).get("name") for tool in tools]


def arguments(tool, command):
    extra = {"is_background": False} if tool == "run_shell_command" else {}
    described = {"description": "Run it"} if tool in ("Bash", "bash", "run_shell_command") else {}
    return json.dumps({"cmd" if tool == "exec_command" else "command": command, **described, **extra})


def anthropic(body, call, text):
    block = {"type": "text", "text": text}
    if call:
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call[0]}
        block["input"] = json.loads(call[1])
    reason = "tool_use" if call else "end_turn"
    whole = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [block],
    }
    whole |= {"stop_reason": reason, "stop_sequence": None, "usage": USAGE}
    opened = block | ({"input": {}} if call else {"text": ""})
    piece = {"type": "input_json_delta", "partial_json": call[1]} if call else {}
    events = [
        {"type": "message_start", "message": whole | {"content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": opened},
        {"type": "content_block_delta", "index": 0, "delta": piece or {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": USAGE},
        {"type": "message_stop"},
    ]
    return whole, [(event["type"], event) for event in events]


def chat(body, call, text):
    message = {"role": "assistant", "content": text}
    if call:
        function = {"name": call[0], "arguments": call[1]}
        tool_call = {"id": f"call_{uuid.uuid4().hex[:16]}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
    reason = "tool_calls" if call else "stop"
    top = {"id": "chatcmpl-1", "created": 0, "model": body["model"]}
    choice = {"index": 0, "message": message, "finish_reason": reason}
    whole = top | {"object": "chat.completion", "choices": [choice], "usage": CHAT_USAGE}
    top["object"] = "chat.completion.chunk"
    delta = message | ({"tool_calls": [{"index": 0, **tool_call}]} if call else {})
    chunks = [
        top | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        top | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        top | {"choices": [], "usage": CHAT_USAGE},
        "[DONE]",
    ]
    return whole, [(None, chunk) for chunk in chunks]


def responses(body, call, text):
    if call:
        item = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": f"call_{uuid.uuid4().hex}",
        }
        item |= {"name": call[0], "arguments": call[1], "status": "completed"}
    else:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": content}
        item["status"] = "completed"
    whole = {"id": "resp_1", "object": "response", "created_at": 0, "model": body["model"], "output": [item]}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    whole |= {"status": "completed", "usage": USAGE | details, "tools": [], "tool_choice": "auto"}
    whole |= {"parallel_tool_calls": True, "error": None, "incomplete_details": None, "metadata": {}}
    opened = whole | {"output": [], "status": "in_progress", "usage": None}
    events = [
        ("response.created", {"response": opened}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": whole}),
    ]
    numbered = enumerate(events)
    return whole, [
        (kind, {"type": kind, "sequence_number": number, **event}) for number, (kind, event) in numbered
    ]
