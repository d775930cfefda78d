"""Courses of events that many traces have in common."""

import json

from tests.agent.drift.script import Agent, Aside, Note, Trace, Turn, results, say, says, unnamed

CLAUDE = {"User-Agent": "claude-cli/2.1.332 (external, cli)", "X-Claude-Code-Session-Id": "c-1"}
CODEX = {"originator": "codex_exec", "session-id": "s-1", "thread-id": "t-1"}
OPENCODE = {"User-Agent": "opencode/1.18.33", "x-session-id": "o-1"}
QWEN = {"User-Agent": "QwenCode/0.24.4 (linux; x64)"}

READ = ("read", {"path": "a.py"})
LIST = ("bash", {"command": "ls"})
EDIT = ("edit", {"path": "a.py", "old": "caf\u00e9 = 1", "new": "x = 1"})
LONG = "long " * 60
ENDLESS = "long " * 2000
FIRST = says("I read it.", READ, think="First I look.")
DONE = says("It is done.", think="All is well.")


def metadata(**said):
    return {"x-codex-turn-metadata": json.dumps(said)}


def two_calls(keep, first=FIRST, *, told=("x = 1",), **more):
    """Two turns with calls and a final one, all of which the client keeps in the same way."""
    second = says("", LIST, think="  And what else is there?\n")
    steps = (
        say("Repair a.py."),
        Turn(first, keep),
        results(*told),
        Turn(second, keep),
        results("a.py b.py"),
        Turn(DONE, keep),
    )
    return Trace(steps=steps, **more)


def one_call(said, keep, **more):
    """A turn with a call that the client changes, and what follows."""
    steps = (
        say("Repair a.py."),
        Turn(said, keep),
        results("ok"),
        Turn(DONE),
        say("Thanks."),
        Turn(says("Bye.")),
    )
    return Trace(steps=steps, **more)


def chat(*answers, keep=unnamed, **more):
    """Text alone: nothing names the turns."""
    steps = tuple(
        step for index, said in enumerate(answers) for step in (say(f"Question {index}?"), Turn(said, keep))
    )
    return Trace(steps=steps, **more)


def compaction_of_claude(said, after=None):
    """Asked without the newest turn, which stands behind the summary verbatim."""
    ask = Note("user", "CRITICAL: Respond with TEXT ONLY. Your task is to create a detailed summary.")
    return Aside(
        Turn(said),
        lambda history: [*history[:-2], ask],
        after or (lambda history, answer: [Note("user", f"Summary: {answer.text}"), *history[-2:]]),
    )


def transcript(history):
    return "\n".join(item.text for item in history)


def scout(name="scout", *, headers=None, tools=None):
    """A sub-agent of two turns."""
    steps = (
        say(f"Look for {name}."),
        Turn(says("", READ, think=f"{name} looks.", slow=0.002)),
        results("x = 1"),
        Turn(says(f"{name}: it holds x = 1.")),
    )
    return Agent(name, steps, headers=headers or {}, tools=tools)


def thinks(text, **more):
    return says(text, think=f"On {text!r}: hm.\n", **more)


def stripping(text):
    """Without a leading `cd`, as Claude Code shows commands."""
    return {"command": text["command"].removeprefix("cd /work && ")}
