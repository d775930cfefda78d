"""One model call: as it is recorded, and as it is kept, its prompt as a difference to an earlier turn.

Invariant: `Turn.held()` is exactly prompt + output of the engine call, and costs memory for the turn's own
new tokens only. Knows neither messages nor samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slime.agent.images import PlacedImage
from slime.utils.types import SpecInfo

Tokens: TypeAlias = npt.NDArray[np.int32]
Values: TypeAlias = npt.NDArray[np.float64]


@dataclass
class TurnRecord:
    """One model call, as its caller saw it.

    Attributes:
        prompt_ids: the whole prompt.
        output_ids: the sampled tokens, a stop token among them.
        finish_reason: ``stop``, ``length`` or ``abort``.
        output_log_probs: natural logs, one a sampled token; empty where the engine gave none.
        ill_formed: a tool call in it was malformed.
        weight_versions: ``{"version", "start", "end"}`` spans over the sampled tokens.
        routed_experts: the engine's base64 text, of int32 ``[prompt + output - 1, layers, top-k]``.
        cached_tokens: prompt tokens that the engine had in its cache.
        origin: ``main``, ``subagent``, ``side`` or ``compaction``.
        agent: name of the sub-agent.
        handles: what the server minted for this turn.
        delivered: the client got the whole answer.
        opening: how many tokens at the end of the prompt begin the answer, as they do in a demanded call.
        images: those of the prompt, in order.
        spec_info: counters of speculative decoding.
    """

    prompt_ids: Sequence[int] | Tokens
    output_ids: Sequence[int]
    finish_reason: str
    output_log_probs: Sequence[float] = ()
    ill_formed: bool = False
    weight_versions: Sequence[Mapping[str, Any]] = ()
    routed_experts: str | None = None
    cached_tokens: int = 0
    origin: str = "main"
    agent: str = ""
    handles: Sequence[str] = ()
    delivered: bool = True
    opening: int = 0
    images: Sequence[PlacedImage] = ()
    spec_info: SpecInfo = field(default_factory=SpecInfo)


@dataclass(eq=False, kw_only=True)
class Turn:
    """A recorded turn.

    Attributes:
        number: 0 for the session's first turn, then counting.
        base: the turn with whose first `kept` tokens the prompt begins; `delta` is the rest of the prompt.
        tools: name of the tool of each call in the answer, by the call's id.
        opening: how many tokens at the end of the prompt belong to the answer.
        has_images: there are images in the prompt.
        images: those of `delta`; their positions are in the prompt.
        is_trained: a sample has taken the sampled tokens.
    """

    number: int
    base: Turn | None
    kept: int
    delta: Tokens
    output: Tokens
    log_probs: Values
    finish_reason: str
    origin: str
    agent: str
    ill_formed: bool
    tools: Mapping[str, str]
    opening: int
    delivered: bool
    weight_versions: tuple[tuple[str, int, int], ...]
    routed_experts: str | None
    cached_tokens: int
    has_images: bool = False
    images: tuple[PlacedImage, ...] = ()
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    is_trained: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self.kept + len(self.delta)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_length + len(self.output)

    def held(self) -> Tokens:
        """Prompt and output."""
        return self._first(self.length)

    def answer(self) -> Tokens:
        """What stands in the assistant's place: the opening, and what was sampled."""
        return self.held()[self.prompt_length - self.opening :] if self.opening else self.output

    def prompt(self) -> Tokens:
        """The prompt."""
        return self._first(self.prompt_length)

    def prompt_images(self) -> list[PlacedImage]:
        """All images of the prompt, in order."""
        found: list[PlacedImage] = []
        count = self.prompt_length
        turn: Turn | None = self if self.has_images else None
        while turn is not None:
            if turn.images:
                found[:0] = [image for image in turn.images if image.position < count]
            count = min(count, turn.kept)
            turn = turn.base
        return found

    def _first(self, count: int) -> Tokens:
        tokens = np.empty(count, np.int32)
        turn: Turn | None = self
        while turn is not None:
            for start, part in ((turn.prompt_length, turn.output), (turn.kept, turn.delta)):
                if count > start:
                    tokens[start:count] = part[: count - start]
                    count = start
            turn = turn.base
        return tokens


def keep(record: TurnRecord, *, number: int, base: Turn | None, tools: Mapping[str, str]) -> Turn:
    """The turn of a record; `base` is a turn whose tokens the prompt may begin with.

    Raises:
        ValueError: the log-probs are not one a sampled token.
    """
    output, log_probs = np.asarray(record.output_ids, np.int32), record.output_log_probs
    if len(log_probs) not in (0, len(output)):
        raise ValueError(f"output_log_probs has {len(log_probs)} entries, output_ids has {len(output)}")
    prompt = np.asarray(record.prompt_ids, np.int32)
    kept = 0
    if base is not None:
        kept = common_length(base.held(), prompt, base.prompt_images(), record.images)
    if base is not None and kept == base.length and record.routed_experts and record.delivered:
        base.routed_experts = None  # the routes of this turn cover those of its base
    return Turn(
        number=number,
        base=base if kept else None,
        kept=kept,
        delta=prompt[kept:].copy(),
        output=output,
        log_probs=np.asarray(log_probs, np.float64),
        finish_reason=record.finish_reason,
        origin=record.origin,
        agent=record.agent,
        ill_formed=record.ill_formed,
        tools=tools,
        opening=record.opening,
        delivered=record.delivered,
        weight_versions=tuple((str(s["version"]), s["start"], s["end"]) for s in record.weight_versions),
        routed_experts=record.routed_experts,
        cached_tokens=record.cached_tokens,
        has_images=bool(record.images),
        images=tuple(image for image in record.images if image.position >= kept),
        spec_info=record.spec_info,
    )


def common_length(
    a: Tokens, b: Tokens, images_a: Sequence[PlacedImage] = (), images_b: Sequence[PlacedImage] = ()
) -> int:
    """How many tokens two rows have in common from their start; other images are other tokens."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    common = first if size and differs[first] else size
    pairs = zip(images_a, images_b, strict=False)
    return min([common, *(one.position for one, two in pairs if one != two)])
