"""Filter by pass rate, and the running pass rate of each prompt that the curriculum draws by.

Invariant: a group counts once, under the prompt id that the data source gave out with its `group_index`; one
vote per rollout. Knows nothing of how prompts are chosen.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from slime.errors import RewardError
from slime.rollout.base_types import Group
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.filter_hub.votes import votes
from slime.rollout.groups import flatten
from slime.rollout.passing import has_passed
from slime.utils.misc import SingletonMeta

GROUPS_AWAITED = 1 << 16
"""Groups that may be out; of those beyond, which never came to be judged, the oldest are forgotten."""


class PassRates(metaclass=SingletonMeta):
    """Running pass rates of a process: hooks write them, the data source reads them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: dict[int, str] = {}
        self._results: dict[str, list[tuple[int, int]]] = {}

    def expect(self, group_index: int, prompt_id: str) -> None:
        """A group of this prompt was given out."""
        with self._lock:
            self._awaited[group_index] = prompt_id
            while len(self._awaited) > GROUPS_AWAITED:
                del self._awaited[next(iter(self._awaited))]

    def record(self, group_index: int | None, passed: int, total: int, window: int) -> None:
        """The result of a group; a group that is not awaited, or was recorded, changes nothing.

        Args:
            window: groups of a prompt that count.
        """
        with self._lock:
            prompt_id = self._awaited.pop(group_index, None) if group_index is not None else None
            if prompt_id is not None:
                kept = [*self._results.get(prompt_id, []), (passed, total)]
                self._results[prompt_id] = kept[-window:]

    def rate(self, prompt_id: str) -> float | None:
        """Share of the prompt's recent rollouts that passed; None before the first."""
        with self._lock:
            results = self._results.get(prompt_id)
        return sum(p for p, _ in results) / sum(t for _, t in results) if results else None

    def counts(self, low: float, high: float) -> Counter[str]:
        """Prompts with a known rate: ``low`` below the bounds, ``high`` above, else ``useful``."""
        with self._lock:
            known = list(self._results)
        rates = [rate for prompt_id in known if (rate := self.rate(prompt_id)) is not None]
        return Counter("low" if r < low else "high" if r > high else "useful" for r in rates)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON."""
        with self._lock:
            return {
                "results": {name: [list(result) for result in held] for name, held in self._results.items()},
                "awaited": list(self._awaited.items()),
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        with self._lock:
            self._awaited = {int(group): str(prompt) for group, prompt in state["awaited"]}
            self._results = {
                name: [(int(passed), int(total)) for passed, total in held]
                for name, held in state["results"].items()
            }


def check_pass_rate(args: Any, samples: Group, **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group iff the share of its rollouts that passed is within ``--pass-rate-low`` and ``-high``.

    For ``--dynamic-sampling-filter-path``. It also records the group for the curriculum.

    Raises:
        RewardError: a reward is neither 0 nor 1, and no ``--pass-threshold`` is set.
    """
    result = _record(args, samples)
    if result is None:
        return DynamicFilterOutput(keep=False, reason="no_reward")
    low, high = bounds(args)
    if result < low:
        return DynamicFilterOutput(keep=False, reason="pass_rate_low")
    return DynamicFilterOutput(keep=result <= high, reason="pass_rate_high" if result > high else None)


def record_pass_rates(args: Any, all_groups: Iterable[Group], data_source: Any) -> None:
    """Record all groups of a step for the curriculum, and drop none.

    For ``--rollout-all-samples-process-path``.

    Raises:
        RewardError: as `check_pass_rate`.
    """
    for group in all_groups:
        _record(args, group)


def bounds(args: Any) -> tuple[float, float]:
    """``--pass-rate-low`` and ``--pass-rate-high``."""
    return float(getattr(args, "pass_rate_low", 0.05)), float(getattr(args, "pass_rate_high", 0.95))


def _record(args: Any, group: Group) -> float | None:
    """The pass rate of a group, recorded; None where no rollout votes."""
    rewards = votes(args, group)
    if not rewards:
        return None
    first = next(flatten(list(group)))
    threshold = getattr(args, "pass_threshold", None)
    passed = sum(_passed(reward, threshold, first.group_index) for reward in rewards)
    window = int(getattr(args, "pass_rate_window", 4))
    PassRates().record(first.group_index, passed, len(rewards), window)
    return passed / len(rewards)


def _passed(reward: float, threshold: float | None, group_index: int | None) -> bool:
    passed = has_passed(reward, threshold)
    if passed is None:
        raise RewardError(
            f"a reward of {reward:g} neither passes nor fails",
            place=f"group {group_index}",
            remedy="set --pass-threshold to the reward from which a rollout passes",
        )
    return passed
