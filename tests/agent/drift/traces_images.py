"""Histories with images, of users and of tools."""

from dataclasses import replace

from tests.agent.drift.courses import (
    CLAUDE,
    CODEX,
    DONE,
    LIST,
    READ,
    compaction_of_claude,
    metadata,
)
from tests.agent.drift.script import (
    Agent,
    Answer,
    Aside,
    Change,
    Note,
    Switch,
    Trace,
    Turn,
    picture,
    results,
    say,
    says,
    trimmed_text,
    unnamed,
)

A, B, C, D, E = map(picture, "ABCDE")
TOOLS = ("qwen_vl", "qwen_vl_text_tools")
CLIENTS = ("anthropic", "chat", "responses")


def _rewritten(history):
    """The newest answer in other words, and its question with another image: a fork of equal tokens."""
    question, answer = history[-2:]
    return [*history[:-2], replace(question, images=(E,)), Answer(answer.text)]


def _looker():
    """A sub-agent that is shown an image of its own and gets another one."""
    steps = (
        say("Compare these.", C),
        Turn(says("", READ, slow=0.002)),
        results("It is this.", images=((D,),)),
        Turn(says("They differ.")),
    )
    return Agent("looker", steps)


IMAGES = {
    "images of the user": Trace(
        steps=(
            say("What is this?", A, B),
            Turn(says("Two pictures."), unnamed),
            say("And this?", C),
            Turn(says("Another."), trimmed_text),
            say("Thanks."),
            Turn(says("Welcome.")),
        ),
        clients=CLIENTS,
        tools=(),
        families=("qwen_vl", "llava", "pixtral"),
    ),
    "images of tools": Trace(
        steps=(
            say("Look at the screen."),
            Turn(says("", READ)),
            results("The screen.", images=((A, B),)),
            Turn(says("", READ, LIST)),
            results("One.", "Two.", order=(1, 0), images=((C,), (D,))),
            say("And mine.", E),
            Turn(says("All seen.")),
            say("Bye."),
            Turn(DONE),
        ),
        clients=(*CLIENTS, "stored"),
        families=TOOLS,
    ),
    "the same words with another image": Trace(
        steps=(
            say("What is this?", A),
            Turn(says("A picture."), unnamed),
            Aside(Turn(says("A picture.")), lambda history: [Note("user", "What is this?", (B,))]),
            Change(_rewritten),
            say("Sure?"),
            Turn(says("Yes.")),
        ),
        segments=("wipe", "wipe", "final"),
        clients=CLIENTS,
        tools=(),
        families=("qwen_vl", "llava", "pixtral"),
    ),
    "an image that vanishes": Trace(
        steps=(
            say("What is this?", A),
            Turn(says("", READ)),
            results("More.", images=((B,),)),
            Turn(says("", LIST)),
            Change(lambda history: [replace(history[0], images=()), *history[1:]]),
            results("a.py", images=((C,),)),
            Turn(DONE),
        ),
        segments=("wipe", "final"),
        clients=CLIENTS,
        families=TOOLS,
    ),
    "compaction keeps the last image": Trace(
        steps=(
            say("Go.", A),
            Turn(says("", READ)),
            results("r1", images=((B,),)),
            Turn(says("", LIST)),
            results("r2", images=((C, D),)),
            compaction_of_claude(says("It was read.")),
            Turn(says("", READ)),
            results("r3", images=((E,),)),
            Turn(DONE),
        ),
        segments=("wipe", "wipe", "final"),
        clients=("anthropic",),
        headers=CLAUDE,
        families=TOOLS,
    ),
    "compaction drops the images": Trace(
        steps=(
            say("Go.", A),
            Turn(says("", READ)),
            results("r1", images=((B,),)),
            Turn(says("Half is done.")),
            Aside(
                Turn(says("It was read."), headers=metadata(request_kind="compaction")),
                lambda history: [*history, Note("user", "Write a summary.")],
                lambda history, answer: [Note("user", f"Summary: {answer.text}", (B,))],
                tools=(),
            ),
            Turn(DONE),
        ),
        segments=("wipe", "final", "wipe"),
        clients=("responses",),
        headers=CODEX | metadata(request_kind="turn"),
        families=TOOLS,
    ),
    "a sub-agent with images of its own": Trace(
        steps=(
            say("Go.", A),
            Turn(says("", ("agent", {"prompt": "look"}))),
            _looker(),
            results("They differ.", images=((B,),)),
            Turn(DONE),
        ),
        segments=("final", "subagent"),
        clients=CLIENTS,
        families=TOOLS,
    ),
    "two ways on from one response with images": Trace(
        steps=(
            say("Go.", A),
            Turn(says("One.")),
            Aside(Turn(says("Left.")), lambda history: [*history, Note("user", "left", (B,))]),
            Aside(Turn(says("Right.")), lambda history: [*history, Note("user", "right", (C,))]),
            say("straight", D),
            Turn(DONE),
        ),
        segments=("wipe", "wipe", "final"),
        clients=("stored", "chat"),
        tools=(),
        families=("qwen_vl", "llava", "pixtral"),
    ),
    "another system prompt before the same images": Trace(
        steps=(
            say("Go.", A),
            Turn(says("", READ)),
            results("r1", images=((B,),)),
            Turn(says("", LIST)),
            Switch(system="You draw."),
            results("r2", images=((C,),)),
            Turn(DONE),
        ),
        segments=("final", "subagent"),
        clients=CLIENTS,
        families=TOOLS,
    ),
    "a row that is cut between its images": Trace(
        steps=(
            say("Go.", A),
            Turn(says("", READ)),
            results("r1", images=((B,),)),
            Turn(says("Half is done. " * 8)),
            say("And this?", C),
            Turn(DONE),
        ),
        clients=CLIENTS,
        tools=(),
        families=TOOLS,
        finish={"max_sample_tokens": 420},
    ),
}
