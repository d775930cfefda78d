"""A token session: the prompt of a request, put together from what was sampled and from new messages.

Invariant: a history that this server's turns stand in is never rendered again; their sampled tokens are
spliced in, and only what is new is rendered and tokenised. Knows no protocol and no engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime.agent.images import PlacedImage, moved
from slime.agent.messages import TOOLS_ROLE, Message
from slime.agent.template import ChatTemplate
from slime.agent.trajectory import TrajectoryManager
from slime.agent.tree import Place
from slime.agent.turn import Tokens, Turn


class UnknownTurnError(ValueError):
    """A request continues a turn that the session does not hold."""


class OpenTurnError(ValueError):
    """A history ends with an assistant message: there is nothing to answer."""


@dataclass(frozen=True)
class Prompt:
    """The prompt of one request.

    Attributes:
        ids: int32 [tokens].
        rendered: how many of them were rendered for this request; the others were there before.
        opening: how many at the end begin the answer.
        images: one for each placeholder among the ids, in order.
    """

    ids: Tokens
    place: Place
    rendered: int
    opening: int = 0
    images: tuple[PlacedImage, ...] = ()

    def opened(self, ids: Sequence[int]) -> Prompt:
        """The prompt with the beginning of an answer behind it, such as that of a demanded call."""
        more = np.asarray(ids, np.int32)
        return replace(
            self,
            ids=np.concatenate([self.ids, more]),
            rendered=self.rendered + len(more),
            opening=len(more),
        )


@dataclass(frozen=True)
class _Piece:
    """A piece of a prompt; the positions of its images count from its start."""

    ids: Tokens
    is_new: bool
    images: Sequence[PlacedImage] = ()


def new_session_id() -> str:
    """A name that nobody can guess."""
    return secrets.token_urlsafe(24)


class TokenSession:
    """The token streams of one agent session."""

    def __init__(self, sid: str, manager: TrajectoryManager, template: ChatTemplate) -> None:
        self.sid = sid
        self._manager = manager
        self._template = template

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        continues: str | None = None,
        references: Sequence[str] = (),
    ) -> Prompt:
        """The prompt for an answer to `messages`, and their place in the session.

        Args:
            continues: a handle of the turn that the messages follow.
            references: handles whose turns must be known, since nothing else tells what they said.

        Raises:
            UnknownTurnError: `continues` or one of `references` names no turn of this session.
            OpenTurnError: the last message is the assistant's.
            TemplateRefusalError: the template takes no such messages, or their text forms a placeholder of an
                image.
        """
        if not messages or messages[-1].get("role") == "assistant":
            raise OpenTurnError("the last message is an assistant's, or there is none")
        history = list(messages)
        if continues is None:
            history.insert(0, {"role": TOOLS_ROLE, "content": list(tools)})
        named = references if continues is None else (continues, *references)
        for handle in named:
            if not self._manager.has_turn(self.sid, handle):
                raise UnknownTurnError(f"no turn is known as {handle!r}")
        place = self._manager.place(self.sid, history, continues=continues)
        assert place is not None
        if not self._template.can_continue:
            if continues is not None:
                raise UnknownTurnError("this tokenizer cannot go on from a turn: send the whole history")
            ids = np.asarray(self._template.prompt(messages, tools), np.int32)
            return Prompt(ids, place, len(ids), images=tuple(self._template.placed(messages, ids)))
        new = len(place.turns) - place.anchor
        pieces = list(
            self._pieces(history[len(history) - new :], place, tools, history[: len(history) - new])
        )
        rendered = sum(len(piece.ids) for piece in pieces if piece.is_new)
        ids, images = np.concatenate([piece.ids for piece in pieces]), _placed(pieces)
        if images:
            self._template.check_placeholders(ids, len(images))
        return Prompt(ids, place, rendered, images=images)

    def _pieces(
        self,
        new: Sequence[Message],
        place: Place,
        tools: Sequence[dict[str, Any]],
        known: Sequence[Message],
    ) -> Iterator[_Piece]:
        """The prompt in pieces."""
        previous: Message | None = None
        turn = place.anchor_turn
        if turn is not None:
            previous = known[-1] if known else _stand_in(turn)
            yield _Piece(turn.held(), is_new=False, images=turn.prompt_images())
        waiting: list[Message] = []
        states = zip(new, place.turns[place.anchor :], place.echoes[place.anchor :], strict=True)
        for message, spliced, is_echo in states:
            if is_echo:
                continue
            if spliced is None or (previous is None and not _has_text(waiting)):
                waiting.append(message)
                continue
            yield self._rendered(waiting, tools, previous, turn)
            yield _Piece(spliced.answer(), is_new=False)
            waiting, previous, turn = [], message, spliced
        yield self._rendered(waiting, tools, previous, turn)

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        previous: Message | None,
        turn: Turn | None,
    ) -> _Piece:
        """The messages as they stand after `turn`, which `previous` says, or at the beginning."""
        messages = [message for message in messages if message.get("role") != TOOLS_ROLE]
        if previous is None or turn is None:
            ids = np.asarray(self._template.prompt(messages, tools), np.int32)
        else:
            last = int(turn.output[-1]) if len(turn.output) else None
            closed = last in self._template.stop_ids
            more = self._template.continuation(
                messages, tools, previous=previous, closed=closed, last_id=last
            )
            ids = np.asarray(more, np.int32)
        return _Piece(ids, is_new=True, images=self._template.placed(messages, ids))


def _placed(pieces: Sequence[_Piece]) -> tuple[PlacedImage, ...]:
    images: list[PlacedImage] = []
    length = 0
    for piece in pieces:
        images += moved(piece.images, length) if length else piece.images
        length += len(piece.ids)
    return tuple(images)


def _has_text(messages: Sequence[Message]) -> bool:
    """Whether there is anything to render: templates begin with no assistant message."""
    return any(message.get("role") != TOOLS_ROLE for message in messages)


def _stand_in(turn: Turn) -> Message:
    """An assistant message that tool results may follow, where the client sent only these."""
    calls = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": {}}}
        for name, tool in turn.tools.items()
    ]
    return {"role": "assistant", "content": ""} | ({"tool_calls": calls} if calls else {})
