"""The words in which traces are written: what is sampled, what the client does with it, what is due."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Note:
    """What the client itself writes into a history."""

    role: str
    text: str
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A tool call as the client holds it: `arguments` as text; `item` is its id as an item of Responses."""

    id: str
    name: str
    arguments: str
    item: str | None = None


@dataclass(frozen=True)
class Answer:
    """An assistant's turn as the client holds it.

    `seal` is what the server minted for the thinking, `item` for the text, `response` for the whole; `source`
    is the `Turn` that it was sampled in, which no client knows.
    """

    text: str = ""
    thinking: str | None = None
    calls: tuple[Call, ...] = ()
    seal: Mapping[str, Any] = field(default_factory=dict)
    item: str | None = None
    response: str | None = None
    source: Any = field(default=None, compare=False, repr=False)

    @property
    def is_named(self):
        """Whether a handle names the turn wherever it stands."""
        return bool(self.calls or any(self.seal.values()) or self.item)


@dataclass(frozen=True)
class Result:
    """A tool's result."""

    call: str
    text: str
    images: tuple[str, ...] = ()


History = list[Note | Answer | Result]
Keep = Callable[[Answer], Answer | Sequence[Note | Answer | Result]]


@dataclass(frozen=True)
class Said:
    """What the policy samples, in the format of the model family: thinking, text, calls.

    Attributes:
        calls: names, each with arguments as an object, or as text that is written as it is.
        tail: what follows the calls.
        is_split: sampled character by character: not what the tokenizer makes of the text.
        pace: delay, token_latency, error or die_after of the scripted engine.
    """

    text: str = ""
    think: str | None = None
    calls: tuple[tuple[str, dict[str, Any] | str], ...] = ()
    tail: str = ""
    is_split: bool = False
    pace: Mapping[str, Any] = field(default_factory=dict)


def says(text="", *calls, **more):
    """An answer; the pace of a slow one is given as `slow`, in seconds a token."""
    slow = more.pop("slow", 0)
    pace = more.pop("pace", {}) | ({"token_latency": slow} if slow else {})
    return Said(text, calls=calls, pace=pace, **more)


def whole(answer):
    """The client sends the turn back as it came."""
    return answer


def nothing(answer):
    """The client does not keep the turn."""
    return []


@dataclass(frozen=True)
class Turn:
    """A request, its answer, and what the client keeps of it.

    Attributes:
        says: what the engine samples; None: the request does not reach the engine.
        fate: ``trained``, or the reason under which the sampled tokens are counted.
        how: ``stream``; ``whole``; ``cut``: the client leaves in the midst; ``twice``: asks again before the
            answer is there; ``aborted``: the engine is told to abort all; ``died``: it dies in the
            midst; ``reweighted``: it gets other weights meanwhile.
        fields: further fields of the body.
        status: of the answer.
    """

    says: Said | None
    keep: Keep = whole
    fate: str = "trained"
    how: str = "stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True)
class Again:
    """The request of the last turn once more, as an SDK does that missed the answer; its answer is kept."""

    keep: Keep = whole


@dataclass(frozen=True)
class Aside:
    """A request with another history, and what the client's own becomes by the answer.

    Attributes:
        asks: the history to ask with, of the client's own.
        after: the client's history behind it, of the one before and the answer.
    """

    turn: Turn
    asks: Callable[[History], History]
    after: Callable[[History, Answer], History] = lambda history, answer: history
    system: str | None = None
    tools: Sequence[str] | None = None


@dataclass(frozen=True)
class Results:
    """Results of the last answer's calls: in another `order`, or of some only (positions).

    `images` are those of each result.
    """

    texts: tuple[str, ...]
    order: tuple[int, ...] | None = None
    images: tuple[tuple[str, ...], ...] | None = None

    def images_of(self, position):
        return self.images[position] if self.images else ()


def results(*texts, order=None, images=None):
    return Results(texts, order, images)


@dataclass(frozen=True)
class Change:
    """The client rewrites its history."""

    change: Callable[[History], History]


@dataclass(frozen=True)
class Switch:
    """From here on the client sends another system prompt, other tools or other headers."""

    system: str | None = None
    tools: Sequence[str] | None = None
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Version:
    """The engine gets other weights."""

    name: str


@dataclass(frozen=True)
class Count:
    """The client asks how many tokens its history and this text have."""

    text: str


@dataclass(frozen=True)
class Agent:
    """A conversation of its own within the session. Its name stands in its system prompt."""

    name: str
    steps: tuple[Any, ...]
    system: str = "You are a helper."
    tools: Sequence[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Together:
    """Agents at the same time; an empty name is the main conversation going on."""

    agents: tuple[Agent, ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A course of events with known truth.

    Attributes:
        segments: the label of each sample, in order.
        clients: the protocols in which it is played.
        dress: changes each body before it is sent, given its number; for what one client alone does.
        adapter, session, finish: options of the adapter, `open_session` and `finish_session`.
        ill_formed: how many samples hold a malformed call.
        families: the compact templates on which it is played.
        real: it is played on the real tokenizers too.
    """

    steps: tuple[Any, ...]
    segments: tuple[str, ...] = ("final",)
    clients: tuple[str, ...] = ("anthropic", "chat", "responses")
    system: str | None = "You work on code."
    tools: Sequence[str] = ("read", "bash", "edit")
    headers: Mapping[str, str] = field(default_factory=dict)
    dress: Callable[[dict[str, Any], int], None] | None = None
    adapter: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] = field(default_factory=dict)
    finish: Mapping[str, Any] = field(default_factory=dict)
    ill_formed: int = 0
    families: tuple[str, ...] = ("qwen3",)
    real: bool = False


def say(text, *images):
    """The user says something."""
    return Change(lambda history: [*history, Note("user", text, images)])


def picture(number):
    """An image, told from others by its data alone."""
    data = base64.b64encode(f"picture {number}".encode()).decode()
    return f"data:image/png;base64,{data}"


def tell(text):
    """A system message in the midst."""
    return Change(lambda history: [*history, Note("system", text)])


# What clients make of a turn


def no_thinking(answer):
    return replace(answer, thinking=None, seal={})


def trimmed_thinking(answer):
    return replace(answer, thinking=answer.thinking and answer.thinking.strip())


def unsigned_thinking(answer):
    return replace(answer, seal={"signature": ""})


def trimmed_text(answer):
    return replace(answer, text=answer.text.strip())


def only_encrypted(answer):
    """opencode on Responses."""
    seal = {name: value for name, value in answer.seal.items() if name == "encrypted_content"}
    calls = tuple(replace(call, item=None) for call in answer.calls)
    return replace(answer, thinking="", seal=seal, item=None, response=None, calls=calls)


def unnamed(answer):
    """Text alone, as clients keep it that store no ids."""
    return replace(answer, thinking=None, seal={}, item=None, response=None)


def arguments(change):
    """The client's own idea of the arguments: a function of the parsed ones, or of the text if malformed."""

    def keep(answer):
        calls = tuple(replace(call, arguments=_changed(change, call.arguments)) for call in answer.calls)
        return replace(answer, calls=calls)

    return keep


def _changed(change, text):
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    changed = change(value)
    return changed if isinstance(changed, str) else json.dumps(changed, separators=(",", ":"))


def renamed(name, given):
    """opencode calls a tool that it cannot use `invalid`, with arguments of its own."""

    def keep(answer):
        calls = tuple(replace(call, name=name, arguments=json.dumps(given)) for call in answer.calls)
        return replace(answer, calls=calls)

    return keep


def as_text(answer):
    """smolagents shows the calls as text."""
    shown = json.dumps([{"name": call.name, "arguments": call.arguments} for call in answer.calls])
    return Answer(f"{answer.text.strip()}\nCalling tools:\n{shown}")


def broken_off(note):
    """Less than the client got of the turn, and a note behind it."""
    return lambda answer: [replace(answer, text=answer.text[:3], source=None), Note("user", note)]


def both(*keeps):
    def keep(answer):
        for each in keeps:
            answer = each(answer)
        return answer

    return keep
