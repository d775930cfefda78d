"""What a tool call format has to provide.

Invariant: a format loses no visible character: what it cannot read as a call it gives to the output as
text (or, once the call has begun, as the call's ill-formed arguments). Knows no particular format.
"""

from __future__ import annotations

import abc

from slime.agent.parsing.output import Output
from slime.agent.parsing.reader import Reader, Steps


class ToolFormat(abc.ABC):
    """How one family of models writes tool calls.

    Attributes:
        opens: markers that begin a call in visible text.
        drops: markers in visible text that frame calls and mean nothing else.
        bare_open: what a call without a marker begins with, at the start of the visible text; or "".
    """

    opens: tuple[str, ...]
    drops: tuple[str, ...] = ()
    bare_open: str = ""

    @abc.abstractmethod
    def read(self, reader: Reader, out: Output, marker: str) -> Steps[None]:
        """Read one or more calls; `marker` was just consumed ("" for a bare call)."""


def give_back(reader: Reader, out: Output, *, bare: bool) -> None:
    """What was recorded is no call: it is visible text, and a marker in it (if not `bare`) has no partner."""
    out.text(reader.recorded())
    if not bare:
        out.flag()
