"""`Probe`: whether engines compute with the trainer's weights: log-probs of the same tokens, and checksums.

Invariant: an engine whose log-probs differ by more than the rounding of its dtype leaves the pool with both
figures. Knows HTTP and lists of numbers; knows no trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from slime.errors import EngineError
from slime.serving.weights.client import WeightClient
from slime.serving.weights.crew import Crew

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest mean difference of log-probs, by what the less exact side computes in."""
Score = Callable[[Sequence[int]], Sequence[float]]
"""The trainer's log-probs of all given tokens but the first; a collective call of all its ranks."""


class Probe:
    """Compares engines with the trainer on one row of tokens."""

    def __init__(self, score: Score, tokens: Sequence[int], tolerance: float) -> None:
        """
        Args:
            tokens: a row inside the vocabulary, at least two.
            tolerance: of the mean absolute difference, nats.
        """
        self._score = score
        self._tokens = list(tokens)
        self._tolerance = tolerance

    def expected(self) -> list[float]:
        """What the trainer computes; its weights are there."""
        return list(self._score(self._tokens))

    def compare(self, crew: Crew, expected: Sequence[float], fields: Mapping[str, str]) -> None:
        """Ask all engines; those that differ leave the crew.

        Args:
            expected: what `expected` gave for these weights.
            fields: what requests say besides.
        """
        _compare_sums(crew)
        found = crew.each("log-probs of the probe", lambda engine: self._ask(engine, fields))
        for engine in crew.members:
            gap = _mean_gap(expected, found[engine.name])
            if not gap <= self._tolerance:
                crew.drop(
                    engine,
                    f"its log-probs differ from the trainer's by {gap:.3g} on average, more than "
                    f"{self._tolerance:g} (--check-weight-update-equal)",
                )

    def _ask(self, engine: WeightClient, fields: Mapping[str, str]) -> list[float]:
        body = {
            **fields,
            "input_ids": self._tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = engine.post("/generate", body)
        try:
            return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(
                f"gave no log-probs of the prompt: {error!r}", place=engine.endpoint.url
            ) from error


def _compare_sums(crew: Crew) -> None:
    """Engines of one size hold the same bytes, where they can sum them."""
    sums = crew.each("checksum of its weights", _sum)
    seen: dict[int, tuple[str, str]] = {}
    for engine in crew.members:
        found = sums[engine.name]
        if found is None:
            continue
        first, expected = seen.setdefault(engine.endpoint.world_size, (engine.name, found))
        if found != expected:
            crew.drop(engine, f"its weights are not those of {first}: checksums {found} and {expected}")


def _sum(engine: WeightClient) -> str | None:
    if not engine.able.checksums:
        return None
    return str(engine.post("/weights_checker", {"action": "checksum"}).get("per_engine_checksum"))


def _mean_gap(first: Sequence[float], second: Sequence[float]) -> float:
    if len(first) != len(second):
        return math.inf
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / max(1, len(first))
