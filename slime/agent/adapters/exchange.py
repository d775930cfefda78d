"""One request of a client, from its translated form to the recorded turn.

Tokens leave as text while the engine samples. Invariant: an answer that a client got is recorded before its
end is sent, so that the next request finds it; one that broke off is recorded as not delivered. Knows neither
protocols nor how sessions are found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from aiohttp import web

from slime.agent.adapters.http import Connection
from slime.agent.adapters.model import Output
from slime.agent.adapters.wire import (
    AdapterError,
    Ending,
    ErrorKind,
    ModelRequest,
    ReplyWriter,
    Usage,
    WireProtocol,
)
from slime.agent.messages import Message
from slime.agent.parsing import ParsedModelOutput
from slime.agent.parsing.events import OutputEvent, TextDelta
from slime.agent.session import Prompt
from slime.agent.turn import Turn, TurnRecord
from slime.errors import (
    DeadlineError,
    EngineError,
    EngineRequestError,
    EngineUnavailableError,
)
from slime.utils.engine_answers import NewTokens, OnTokens
from slime.utils.generation import Generation
from slime.utils.types import SpecInfo

logger = logging.getLogger(__name__)
OPEN_SECONDS = 1.0
"""A stream is opened after so much time without a token: failures before that keep their status."""
TOO_LONG = ("context length", "longer than the model", "is too long", "maximum allowed length")

Generate: TypeAlias = Callable[[OnTokens | None], Awaitable[Generation]]
Answer = TypeVar("Answer")
Record: TypeAlias = Callable[[TurnRecord, Message], Turn]


@dataclass(frozen=True)
class StoredReply:
    """An answer as it can be given again."""

    events: Sequence[OutputEvent]
    ending: Ending


@dataclass(kw_only=True)
class Exchange:
    """One turn.

    Attributes:
        generate: calls the engine; gets the callback for new ids, or None for an answer as a whole.
        record: keeps the turn.
        keep_reply: keeps the answer to it, for a client that does not get it and asks again.
        count_reasoning: tokens of a reasoning text.
        told: what the engine has streamed so far.
    """

    protocol: WireProtocol
    request: ModelRequest
    prompt: Prompt
    output: Output
    generate: Generate
    record: Record
    keep_reply: Callable[[Turn, StoredReply], None]
    count_reasoning: Callable[[str], int]
    connection: Connection
    writer: ReplyWriter
    told: NewTokens = field(default_factory=lambda: NewTokens([], [], []))
    is_recorded: bool = False

    async def run(self) -> web.StreamResponse:
        """Sample, answer and record.

        Raises:
            AdapterError: the engine failed; a stream that was open has been told so.
            ConnectionResetError: the client is gone. Whatever is raised, what was streamed is recorded as not
                delivered.
        """
        writer = self.writer
        try:
            generation = await (self._streamed(writer) if self.request.stream else self._whole(writer))
            return await self._close(writer, generation)
        finally:
            if not self.is_recorded:
                self._record_broken(writer)

    async def _whole(self, writer: ReplyWriter) -> Generation:
        generation = await engine_errors(self.generate(None))
        writer.begin(Usage(prompt_tokens=len(self.prompt.ids)))
        self._write(writer, self.output.push(generation.output_ids))
        return generation

    async def _streamed(self, writer: ReplyWriter) -> Generation:
        queue: asyncio.Queue[list[int] | None] = asyncio.Queue()

        def told(new: NewTokens) -> None:
            self.told.ids.extend(new.ids)
            self.told.log_probs.extend(new.log_probs)
            self.told.versions.extend(new.versions)
            queue.put_nowait(new.ids)

        task = asyncio.ensure_future(self.generate(told))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (ids := await self._next(queue, writer)) is not None:
                data = self._write(writer, self.output.push(ids))
                await self._send(writer, data)
            generation = await engine_errors(task)
            if generation.output_ids != self.output.ids:
                raise AdapterError("upstream", "the engine's stream and its last answer have other tokens")
            return generation
        except AdapterError as error:
            if self.connection.is_open:
                await self.connection.send(writer.error(error))
            raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _next(self, queue: asyncio.Queue[list[int] | None], writer: ReplyWriter) -> list[int] | None:
        """The next ids, all that are there; None at the end. Meanwhile the client is kept waiting."""
        while True:
            wait = self.protocol.keepalive_seconds if self.connection.is_open else OPEN_SECONDS
            try:
                async with asyncio.timeout(wait):
                    ids = await queue.get()
                break
            except TimeoutError:
                await self._send(writer, writer.keepalive() if self.connection.is_open else b"")
        while ids is not None and not queue.empty():
            more = queue.get_nowait()
            if more is None:
                queue.put_nowait(None)
                break
            ids = ids + more
        return ids

    async def _send(self, writer: ReplyWriter, data: bytes) -> None:
        if not self.connection.is_open:
            data = writer.begin(Usage(prompt_tokens=len(self.prompt.ids))) + data
        await self.connection.send(data)

    def _write(self, writer: ReplyWriter, events: Sequence[OutputEvent]) -> bytes:
        return b"".join(writer.event(event) for event in events)

    async def _close(self, writer: ReplyWriter, generation: Generation) -> web.StreamResponse:
        matched = (generation.meta_info.get("finish_reason") or {}).get("matched")
        data = self._write(writer, self.output.finish(matched))
        ending = Ending(
            finish_reason=generation.finish_reason or "stop",
            stop_sequence=self.output.stop_sequence,
            usage=Usage(
                prompt_tokens=len(self.prompt.ids),
                completion_tokens=len(generation.output_ids),
                cached_tokens=_cached(generation, self.prompt),
                reasoning_tokens=self.count_reasoning(self.output.parsed.reasoning),
            ),
        )
        self.is_recorded = True
        turn = self.record(
            turn_record(self.prompt, generation, self.request, writer, self.output.parsed.ill_formed),
            message_of(self.output.parsed, writer),
        )
        self.keep_reply(turn, StoredReply(self.output.events, ending))
        turn.delivered = False
        await self._send(writer, data + writer.end(ending))
        response = await self.connection.finish(lambda: writer.whole(ending))
        turn.delivered = True
        return response

    def _record_broken(self, writer: ReplyWriter) -> None:
        if not self.told.ids:
            return
        self._write(writer, self.output.finish())
        record = TurnRecord(
            self.prompt.ids,
            self.told.ids,
            "abort",
            self.told.log_probs,
            weight_versions=_runs(self.told.versions),
            origin=self.request.origin.kind,
            agent=self.request.origin.agent,
            handles=writer.handles,
            delivered=False,
            opening=self.prompt.opening,
            images=self.prompt.images,
        )
        self.is_recorded = True
        self.record(record, message_of(self.output.parsed, writer))


def _runs(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Runs of equal versions as ``{"version", "start", "end"}``."""
    runs: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if not runs or runs[-1]["version"] != version:
            runs.append({"version": version, "start": place})
        runs[-1]["end"] = place + 1
    return runs


async def replay(
    writer: ReplyWriter, reply: StoredReply, connection: Connection
) -> tuple[web.StreamResponse, list[str]]:
    """Give an answer again; returns it, and the handles under which it was given this time."""
    data = writer.begin(reply.ending.usage) + b"".join(writer.event(event) for event in reply.events)
    await connection.send(data + writer.end(reply.ending))
    response = await connection.finish(lambda: writer.whole(reply.ending))
    return response, [*writer.handles, *writer.tool_ids]


def closing_reply(text: str, prompt_tokens: int) -> StoredReply:
    """An answer that ends a run without sampling anything."""
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=0)
    return StoredReply([TextDelta(text)], Ending(finish_reason="stop", usage=usage))


def turn_record(
    prompt: Prompt, generation: Generation, request: ModelRequest, writer: ReplyWriter, ill_formed: bool
) -> TurnRecord:
    """A turn as the trajectory keeps it."""
    meta, spec_info = generation.meta_info, SpecInfo()
    spec_info.add(meta)
    return TurnRecord(
        prompt.ids,
        generation.output_ids,
        generation.finish_reason or "stop",
        generation.log_probs,
        ill_formed,
        weight_versions=[
            {"version": span.version, "start": span.start, "end": span.end}
            for span in generation.weight_versions
        ],
        routed_experts=meta.get("routed_experts"),
        cached_tokens=_cached(generation, prompt),
        origin=request.origin.kind,
        agent=request.origin.agent,
        handles=writer.handles,
        opening=prompt.opening,
        images=prompt.images,
        spec_info=spec_info,
    )


def _cached(generation: Generation, prompt: Prompt) -> int:
    """Cached tokens of the prompt; the engine also counts what it expanded images to."""
    return min(int(generation.meta_info.get("cached_tokens") or 0), len(prompt.ids))


def message_of(parsed: ParsedModelOutput, writer: ReplyWriter) -> Message:
    """The assistant message that the client was told."""
    message: Message = {"role": "assistant", "content": parsed.text}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_uses:
        message["tool_calls"] = [
            {"id": tool_id, "type": "function", "function": {"name": use["name"], "arguments": use["input"]}}
            for tool_id, use in zip(writer.tool_ids, parsed.tool_uses, strict=True)
        ]
    return message


async def engine_errors(answer: Awaitable[Answer]) -> Answer:
    """What an engine answers, its failures as errors that a protocol can tell.

    Raises:
        AdapterError: with the engine's own words.
    """
    try:
        return await answer
    except EngineRequestError as error:
        kind: ErrorKind = "context_overflow" if any(words in str(error) for words in TOO_LONG) else "upstream"
        raise AdapterError(kind, error.message) from error
    except (EngineUnavailableError, DeadlineError) as error:
        raise AdapterError("overloaded", error.message) from error
    except EngineError as error:
        raise AdapterError("upstream", error.message) from error
