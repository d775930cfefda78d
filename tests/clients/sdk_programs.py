"""Agents of a few lines on the vendors' SDKs, run as ``python sdk_programs.py KIND`` by the Python that has
them.

The prompt comes on standard input; base URL, key and model come by ``SDK_BASE_URL``, ``SDK_KEY`` and
``SDK_MODEL``. Each offers one tool, ``bash``, and loops until a turn calls none; Claude's agent has tools of
its own. What it prints is the last text.
"""

import asyncio
import json
import os
import subprocess
import sys

URL = os.environ.get("SDK_BASE_URL", "")
KEY = os.environ.get("SDK_KEY", "")
MODEL = os.environ.get("SDK_MODEL", "slime-actor")
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ABOUT = {"name": "bash", "description": "Run a shell command."}


def bash(arguments):
    """Output of the command; a complaint for arguments that are none."""
    try:
        command = json.loads(arguments)["command"] if isinstance(arguments, str) else arguments["command"]
    except (ValueError, KeyError, TypeError) as error:
        return f"bad arguments: {error!r}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def openai_client():
    from openai import OpenAI

    return OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=2)


def chat(prompt, *, stream):
    client = openai_client()
    tools = [{"type": "function", "function": {**ABOUT, "parameters": PARAMETERS}}]
    messages = [{"role": "system", "content": "You repair programs."}, {"role": "user", "content": prompt}]
    while True:
        if stream:
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = (
                client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
            )
        messages.append(message.to_dict())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            output = bash(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})


def responses(prompt, *, stream=False, stateful=False):
    client = openai_client()
    tools = [{"type": "function", **ABOUT, "parameters": PARAMETERS, "strict": False}]
    items, previous = [{"role": "user", "content": prompt}], None
    while True:
        options = {"previous_response_id": previous} if stateful and previous else {}
        if stream:
            with client.responses.stream(model=MODEL, input=items, tools=tools, **options) as events:
                for _ in events:
                    pass
                answer = events.get_final_response()
        else:
            answer = client.responses.create(model=MODEL, input=items, tools=tools, **options)
        previous = answer.id
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": bash(call.arguments)}
            for call in calls
        ]
        items = results if stateful else [*items, *(item.to_dict() for item in answer.output), *results]


def anthropic(prompt, *, stream):
    from anthropic import Anthropic

    client = Anthropic(base_url=URL, api_key=KEY, max_retries=2)
    tools = [{**ABOUT, "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": prompt}]
    asked = {"model": MODEL, "max_tokens": 4096, "system": "You repair programs.", "tools": tools}
    while True:
        if stream:
            with client.messages.stream(messages=messages, **asked) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **asked)
        messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": bash(call.input)} for call in calls
        ]
        messages.append({"role": "user", "content": results})


def agents(prompt, *, model_class):
    import agents as sdk
    from openai import AsyncOpenAI

    sdk.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=2)

    @sdk.function_tool(name_override="bash")
    def run(command: str) -> str:
        """Run a shell command."""
        return bash({"command": command})

    model = getattr(sdk, model_class)(model=MODEL, openai_client=client)
    agent = sdk.Agent(name="repair", instructions="You repair programs.", tools=[run], model=model)
    return asyncio.run(sdk.Runner.run(agent, prompt, max_turns=100)).final_output


def claude_agent(prompt):
    import claude_agent_sdk as sdk

    env = {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_AUTH_TOKEN": KEY, "IS_SANDBOX": "1"}
    env |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    options = sdk.ClaudeAgentOptions(model=MODEL, permission_mode="bypassPermissions", env=env)

    async def last_text():
        messages = [message async for message in sdk.query(prompt=prompt, options=options)]
        return messages[-1].result

    return asyncio.run(last_text())


KINDS = {
    "openai_chat": lambda prompt: chat(prompt, stream=False),
    "openai_chat_stream": lambda prompt: chat(prompt, stream=True),
    "openai_responses": responses,
    "openai_responses_stream": lambda prompt: responses(prompt, stream=True),
    "openai_responses_stateful": lambda prompt: responses(prompt, stateful=True),
    "anthropic": lambda prompt: anthropic(prompt, stream=False),
    "anthropic_stream": lambda prompt: anthropic(prompt, stream=True),
    "claude_agent": claude_agent,
    "openai_agents_chat": lambda prompt: agents(prompt, model_class="OpenAIChatCompletionsModel"),
    "openai_agents_responses": lambda prompt: agents(prompt, model_class="OpenAIResponsesModel"),
}

if __name__ == "__main__":
    print(KINDS[sys.argv[1]](sys.stdin.read()))
