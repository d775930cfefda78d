"""OpenAI Responses: the items of an answer, each with the events that tell of it.

Invariant: the deltas of an item join to what its ``done`` events and its body say. Events come without their
sequence numbers, which the writer gives.
"""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

from slime.agent.adapters.freeform import FreeformInput

Event: TypeAlias = dict[str, Any]


class Item(abc.ABC):
    """One item of an answer's output.

    Args:
        place: index in the output.
        head: fields that do not change, ``id`` and ``type`` among them.
    """

    def __init__(self, place: int, head: dict[str, Any]) -> None:
        self.place = place
        self.head = head
        self.status = "in_progress"

    def body(self) -> dict[str, Any]:
        """The item as it stands."""
        return {**self.head, "status": self.status, **self.said()}

    def added(self) -> list[Event]:
        """The item begins."""
        return [{"type": "response.output_item.added", "output_index": self.place, "item": self.body()}]

    def done(self, status: str = "completed") -> list[Event]:
        """The item is complete, or cut off."""
        closing = self.closing()
        self.status = status
        return [
            *closing,
            {"type": "response.output_item.done", "output_index": self.place, "item": self.body()},
        ]

    def told(self, kind: str, **fields: Any) -> Event:
        """An event of this item."""
        return {"type": f"response.{kind}", "item_id": self.head["id"], "output_index": self.place, **fields}

    @abc.abstractmethod
    def said(self) -> dict[str, Any]:
        """The fields that grow."""

    @abc.abstractmethod
    def closing(self) -> list[Event]:
        """Events before the item's last."""


class TextItem(Item):
    """A message or reasoning: one part of text.

    Args:
        kind: ``output_text`` or ``reasoning_text``.
    """

    def __init__(self, place: int, head: dict[str, Any], kind: str) -> None:
        super().__init__(place, head)
        self.kind = kind
        self._pieces: list[str] = []
        self._has_part = False
        self._extra: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}

    def said(self) -> dict[str, Any]:
        return {"content": [self._part()] if self._has_part else []}

    def added(self) -> list[Event]:
        begun = super().added()
        self._has_part = True
        return [*begun, self.told("content_part.added", content_index=0, part=self._part())]

    def delta(self, text: str) -> list[Event]:
        """More text."""
        self._pieces.append(text)
        return [self.told(f"{self.kind}.delta", content_index=0, delta=text, **self._extra)]

    def closing(self) -> list[Event]:
        text = "".join(self._pieces)
        return [
            self.told(f"{self.kind}.done", content_index=0, text=text, **self._extra),
            self.told("content_part.done", content_index=0, part=self._part()),
        ]

    def _part(self) -> dict[str, Any]:
        extra = {"annotations": [], **self._extra} if self._extra else {}
        return {"type": self.kind, "text": "".join(self._pieces), **extra}


class CallItem(Item):
    """A call of a tool, whatever its input is called."""

    @abc.abstractmethod
    def delta(self, json: str) -> list[Event]:
        """More of the arguments."""

    @abc.abstractmethod
    def finish(self, arguments: str) -> list[Event]:
        """The arguments are complete."""


class FunctionCallItem(CallItem):
    """A call of a function: its arguments as they were sampled."""

    def __init__(self, place: int, head: dict[str, Any]) -> None:
        super().__init__(place, head)
        self._pieces: list[str] = []

    def said(self) -> dict[str, Any]:
        return {"arguments": "".join(self._pieces)}

    def delta(self, json: str) -> list[Event]:
        self._pieces.append(json)
        return [self.told("function_call_arguments.delta", delta=json)]

    def finish(self, arguments: str) -> list[Event]:
        return self.done()

    def closing(self) -> list[Event]:
        return [self.told("function_call_arguments.done", name=self.head["name"], **self.said())]


class CustomCallItem(CallItem):
    """A call of a custom tool: the text that stands in its arguments."""

    def __init__(self, place: int, head: dict[str, Any]) -> None:
        super().__init__(place, head)
        self._input = FreeformInput()

    def said(self) -> dict[str, Any]:
        return {"input": self._input.text}

    def delta(self, json: str) -> list[Event]:
        return self._told(self._input.feed(json))

    def finish(self, arguments: str) -> list[Event]:
        return [*self._told(self._input.finish(arguments)), *self.done()]

    def closing(self) -> list[Event]:
        return [self.told("custom_tool_call_input.done", **self.said())]

    def _told(self, text: str) -> list[Event]:
        return [self.told("custom_tool_call_input.delta", delta=text)] if text else []
