"""What single clients do to a body before they send it, given its number."""


def moving_cache_marks(body, number):
    """Claude Code marks the last block for its cache, and sends what lost the mark as plain text."""
    messages = body["messages"]
    for message in messages[:-1]:
        for block in message["content"]:
            if block["type"] == "tool_result":
                block["is_error"] = False
        if [block["type"] for block in message["content"]] == ["text"] and message["role"] == "user":
            message["content"] = message["content"][0]["text"]
    last = messages[-1]["content"][-1]
    last["cache_control"] = {"type": "ephemeral"}
    if last["type"] == "tool_result":
        last["content"] = [{"type": "text", "text": last["content"]}]
    if number % 2:
        body["system"] = body["system"][0]["text"]


def billing(body, number):
    """Claude Code's first system block changes in mid-session."""
    head = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.332.{number:03x};"}
    body["system"].insert(0, head)


def null_content(body, number):
    """Some clients send null where nothing is said, some nothing at all."""
    for message in body["messages"]:
        if message["content"] == "":
            message["content"] = None


def each_result_behind_its_call(body, number):
    """Codex and others send each output right behind its call."""
    outputs = {item["call_id"]: item for item in body["input"] if item["type"] == "function_call_output"}
    rest = [item for item in body["input"] if item["type"] != "function_call_output"]
    body["input"] = [
        part for item in rest for part in (item, outputs.get(item.get("call_id"))) if part is not None
    ]


def messages_of_one_block(body, number):
    """Some clients send each result as a message of its own."""
    body["messages"] = [
        {"role": message["role"], "content": content}
        for message in body["messages"]
        for content in (
            [message["content"]]
            if message["role"] == "assistant"
            else [[block] for block in message["content"]]
        )
    ]


def parts_or_text(body, number):
    """Some clients send the newest text in parts, and plainly later; or the other way round."""
    for position, message in enumerate(body["messages"]):
        if message["content"] and (position + number) % 2:
            message["content"] = [{"type": "text", "text": message["content"]}]


def loading_search(body, number):
    """Claude Code's tool search: a tool is deferred, and the result that loads it refers to it."""
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    body["tools"].append(
        {"name": "search", "description": "s", "input_schema": schema, "defer_loading": True}
    )
    for message in body["messages"]:
        for block in message["content"]:
            if block.get("content") == "Tool loaded: ":
                block["content"] = [{"type": "tool_reference", "tool_name": "search"}]
