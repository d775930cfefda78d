"""Policies that play an agent. What to answer is read off the prompt, in ChatML and the Hermes form of calls:
a request that comes again is answered again, and sub-agents and side requests get their own parts."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from slime.serving.scripted import ScriptedAnswer

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_PROGRESS = re.compile(r"\[step (\d+)\]")
DONE = "All done."
TITLE = '{"title": "Repair a file"}'
COMPACTION_ASKS = (
    "CRITICAL: Respond with TEXT ONLY.",
    "Your task is to create a detailed summary of th",
    "You are performing a CONTEXT CHECKPOINT COMPACTION.",
    "First, reason in your <analysis> block.",
    "First, reason in your scratchpad.",
    "Provide a detailed prompt for continuing our conversation",
)
COMPACTION_SYSTEMS = (
    "You are a helpful AI assistant tasked with summarizing conversations.",
    "You are a context summarization agent.",
    "You are the component that summarizes ",
)
TITLE_SYSTEMS = ("Generate a concise, sentence-case title", "You are a title generator.")


def tool_call(name, /, **arguments):
    """A call as the model writes it."""
    return raw_call(name, json.dumps(arguments, ensure_ascii=False))


def raw_call(name, arguments):
    """A call whose arguments are any text."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thinking(thought, then):
    """An answer that is thought over before."""
    return f"<think>\n{thought}\n</think>\n\n{then}"


@dataclass(frozen=True)
class Seen:
    """What a policy sees in a prompt.

    Attributes:
        call: the engine's call.
        messages: (role, text) pairs; tool results stand in user messages.
    """

    call: object
    messages: tuple[tuple[str, str], ...]

    @property
    def ask(self):
        """The last message that is no system's."""
        return next((text for role, text in reversed(self.messages) if role != "system"), "")

    @property
    def opening(self):
        """What users say before the first answer."""
        texts = []
        for role, text in self.messages:
            if role == "assistant":
                break
            texts += [text] if role == "user" else []
        return "\n".join(texts)

    @property
    def system(self):
        """The first system message."""
        return next((text for role, text in self.messages if role == "system"), "")

    @property
    def answers(self):
        """Answers before this one, those that a summary speaks of too."""
        told = _PROGRESS.search(self.opening)
        return (int(told[1]) if told else 0) + sum(role == "assistant" for role, _ in self.messages)

    @property
    def results(self):
        """Tool results that came last."""
        return _RESULT.findall(self.ask)

    def is_compaction(self):
        """Whether a summary is wanted."""
        lines = (self.ask, COMPACTION_ASKS), (self.system, COMPACTION_SYSTEMS)
        return any(begins(text, marks) for text, marks in lines)


def begins(text, marks):
    """Whether a line of the text begins with a mark."""
    return any(text.startswith(mark) or f"\n{mark}" in text for mark in marks)


def see(call):
    """The messages of a call's prompt; the last one, which is to be answered, is left out."""
    found = [(match[1], match[2]) for match in _MESSAGE.finditer(call.prompt)]
    return Seen(call, tuple(found[:-1]))


Step = str | ScriptedAnswer | Callable[[Seen], str | ScriptedAnswer]


@dataclass
class Play:
    """A policy that gives the main agent `steps`, one a turn, then `final`.

    Attributes:
        parts: steps of sub-agents, by a mark in their task; each ends with its last step.
        faults: instead of the policy's, the answer to the engine's call of this number.
        summary: given to a compaction, with the number of answers so far, so that the steps go on; or a step.
        asked: who asked for each call: ``main``, a sub-agent's mark, ``title``, ``compaction``, ``fault``.
    """

    steps: list[Step]
    parts: dict[str, list[Step]] = field(default_factory=dict)
    faults: dict[int, ScriptedAnswer] = field(default_factory=dict)
    final: str = DONE
    summary: Step = "<summary>The work goes on [step {steps}].</summary>"
    asked: list[str] = field(default_factory=list)

    def __call__(self, call):
        who, answer = self._answer(see(call), call.number)
        self.asked.append(who)
        return ScriptedAnswer(text=answer) if isinstance(answer, str) else answer

    def _answer(self, seen, number):
        if number in self.faults:
            return "fault", self.faults[number]
        if begins(seen.system, TITLE_SYSTEMS):
            return "title", TITLE
        if seen.is_compaction():
            return "compaction", self._summary(seen)
        who = next((mark for mark in self.parts if mark in seen.opening), "main")
        steps = self.parts.get(who, [*self.steps, self.final])
        step = steps[min(seen.answers, len(steps) - 1)]
        return who, step(seen) if callable(step) else step

    def _summary(self, seen):
        return self.summary(seen) if callable(self.summary) else self.summary.format(steps=seen.answers)
