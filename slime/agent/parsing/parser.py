"""Model output into events as it arrives: reasoning, visible text and tool calls.

Rules: reasoning begins only where no text stands before it (at the start, after other reasoning, after a
call); its markers elsewhere, also within a call, are text. A closing marker at the very start means empty
reasoning. Reasoning that is never closed, and markers without a partner, make the output ill-formed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime.agent.parsing.events import OutputEvent, ParsedModelOutput
from slime.agent.parsing.output import Output
from slime.agent.parsing.reader import SPACE, Markers, Reader, Steps
from slime.agent.parsing.registry import reasoning_format, tool_format


class OutputParser:
    """Parses one output.

    Args:
        tool_parser: name of the format of calls; None: no call is looked for.
        reasoning_parser: name of the format of reasoning; None: none is looked for.
        tools: OpenAI's function schemas.
        opens_reasoning: the prompt ends within reasoning, so the output begins there.

    Attributes:
        unopened: reasoning was closed that nothing had opened, before any call.

    Raises:
        ConfigError: a name that is not known.
    """

    def __init__(
        self,
        *,
        tool_parser: str | None,
        reasoning_parser: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
        opens_reasoning: bool = False,
    ) -> None:
        self.unopened = False
        self._format = tool_format(tool_parser, tools) if tool_parser is not None else None
        self._think = reasoning_format(reasoning_parser) if reasoning_parser is not None else None
        self._within = self._think is not None and (opens_reasoning or self._think.forced)
        calls = (*self._format.opens, *self._format.drops) if self._format else ()
        closing = (self._think.closing,) if self._think else ()
        ends = [marker for marker in (self._think.ends if self._think else ()) if marker in calls]
        self._markers = Markers(*calls, *closing)
        self._reasoning_ends = Markers(*closing, *ends)
        self._reader = Reader()
        self._out = Output()
        self._steps = self._read()
        self._finished = False

    def feed(self, text: str) -> list[OutputEvent]:
        """What `text`, the next piece of the output, makes certain.

        Raises:
            ValueError: after `finish`.
        """
        if self._finished:
            raise ValueError("feed() after finish()")
        self._reader.push(text)
        next(self._steps)
        return self._out.drain()

    def finish(self) -> list[OutputEvent]:
        """The remaining events; a call that is open ends ill-formed."""
        self._finished = True
        self._reader.close()
        next(self._steps, None)
        return self._out.drain()

    @property
    def result(self) -> ParsedModelOutput:
        """The whole output; complete after `finish`."""
        return self._out.result()

    def _read(self) -> Steps[None]:
        if self._within and self._think:
            yield from self._reader.run(SPACE)
            yield from self._reader.accept(self._think.opening)
            yield from self._reasoning()
        while (yield from self._reader.peek()):
            yield from self._before_text()
            marker = yield from self._reader.past(self._markers, self._out.text)
            if marker:
                yield from self._at(marker)

    def _before_text(self) -> Steps[None]:
        """What may stand only where no text is before it."""
        yield from self._reader.run(SPACE, self._out.text)
        while self._think:
            marker = yield from self._reader.accept(self._think.opening, self._think.closing)
            if marker == self._think.opening:
                yield from self._reasoning()
            elif marker and not self._out.is_empty:
                self._out.flag()
            elif not marker:
                break
            yield from self._reader.run(SPACE, self._out.text)
        bare = self._format.bare_open if self._format else ""
        if self._format and bare and not self._out.has_text and (yield from self._reader.ahead(bare)):
            yield from self._format.read(self._reader, self._out, "")

    def _reasoning(self) -> Steps[None]:
        marker = yield from self._reader.past(self._reasoning_ends, self._out.reasoning)
        if not marker:
            self._out.flag()
        elif self._think and marker != self._think.closing:
            yield from self._at(marker)

    def _at(self, marker: str) -> Steps[None]:
        if self._think and marker == self._think.closing:
            self.unopened |= not self._out.calls
            self._out.text(marker)
            self._out.flag()
        elif self._format and marker in self._format.opens:
            yield from self._format.read(self._reader, self._out, marker)
