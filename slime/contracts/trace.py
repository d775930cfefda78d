"""Where the trained tokens of a row come from: which engine answer gave each, and whether the context is its
own.

Invariant: a token of an answer explains one trained token at most (law 1: each sampled token trains once).
Pure: rows and answers in, one `Origin` a trained token out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from slime.utils.types import Sample

Kind = Literal["sampled", "twice", "displaced", "prompt", "foreign"]


@dataclass(eq=False, kw_only=True)
class Served:
    """One request and what the engine answers to it; an abort or an error may keep the end of it back.

    Attributes:
        given: which of its tokens have explained a trained one.
    """

    number: int
    rid: str
    input_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    params: dict[str, object] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One trained token.

    Attributes:
        position: in the response.
        kind: ``sampled`` behind exactly the tokens that the engine saw; ``twice`` if each such token of an
            answer is trained elsewhere already; ``displaced`` if it was sampled behind other tokens;
            ``prompt`` if engines only read it; ``foreign`` if no engine call has it.
        served: the call, and the place of the token in its answer.
    """

    position: int
    token: int
    kind: Kind
    served: Served | None = None
    place: int = 0


def origins(samples: Iterable[Sample], served: Sequence[Served]) -> list[list[Origin]]:
    """The origin of each trained token of each sample, in order."""
    return [_origins_of_row(sample, served) for sample in samples]


def _origins_of_row(sample: Sample, served: Sequence[Served]) -> list[Origin]:
    tokens, start = tuple(sample.tokens), sample.prompt_length
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    fitting = [call for call in served if tokens[: len(call.input_ids)] == call.input_ids]
    found = []
    for offset, trains in enumerate(mask):
        if trains:
            found.append(_origin(tokens, start + offset, offset, fitting, served))
    return found


def _origin(
    tokens: tuple[int, ...], at: int, offset: int, fitting: Sequence[Served], served: Sequence[Served]
) -> Origin:
    places = [(call, at - len(call.input_ids)) for call in fitting if _gave(call, tokens, at)]
    for call, place in places:
        if place not in call.given:
            call.given.add(place)
            return Origin(position=offset, token=tokens[at], kind="sampled", served=call, place=place)
    if places:
        call, place = places[0]
        return Origin(position=offset, token=tokens[at], kind="twice", served=call, place=place)
    return Origin(position=offset, token=tokens[at], kind=_stranger(tokens, at, served))


def _gave(call: Served, tokens: tuple[int, ...], at: int) -> bool:
    """Whether the call's answer, laid behind its prompt, holds the row's token at `at`."""
    count = at - len(call.input_ids) + 1
    return 0 < count <= len(call.token_ids) and call.token_ids[:count] == tokens[at - count + 1 : at + 1]


def _stranger(tokens: tuple[int, ...], at: int, served: Sequence[Served]) -> Kind:
    """Why no call explains the token, from the tokens around it."""
    around = tokens[max(at - 1, 0) : at + 2]
    if any(_holds(call.token_ids, around) for call in served):
        return "displaced"
    return "prompt" if any(_holds(call.input_ids, around) for call in served) else "foreign"


def _holds(ids: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids) - len(part) + 1))
