"""A data source that prefers prompts at a useful pass rate, and starves none.

Invariant: every prompt whose turn comes is taken with at least the floor probability; the draws, and the pass
rates behind them, are part of the state, so that a resumed run draws the same. Rates come from the filters.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

from slime.errors import ConfigError
from slime.rollout.base_types import Group
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub import pass_rate
from slime.rollout.filter_hub.pass_rate import PassRates, bounds
from slime.rollout.hooks import load_hook
from slime.rollout.prompt_stream import Prompt
from slime.rollout.prompts import rollout_seed

logger = logging.getLogger(__name__)


class CurriculumDataSource(RolloutDataSourceWithBuffer):
    """Prompts in their usual order, of which those at a useless pass rate are mostly passed over.

    A prompt that was never tried is useful; so is one whose running pass rate is within
    ``--pass-rate-low`` and ``--pass-rate-high``. Another is taken with probability ``--curriculum-floor``.
    After a whole epoch without a useful prompt the next one is taken whatever its rate.

    Raises:
        ConfigError: there is no data set, or nothing records pass rates.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        if self.prompts is None:
            raise ConfigError(
                "a curriculum needs a data set", place="--data-source-path", remedy="give --prompt-data"
            )
        _check_recorded(args)
        self.passed_over = 0
        self._rolls = 0
        self._floor = float(getattr(args, "curriculum_floor", 0.1))
        self._bounds = bounds(args)
        self._rates = PassRates()

    def metrics(self) -> dict[str, float]:
        """Prompts by how their pass rate stands to the bounds, and turns passed over so far."""
        counts = self._rates.counts(*self._bounds)
        values = {name: float(counts[name]) for name in ("low", "useful", "high")}
        values["untried"] = len(self) - sum(values.values())
        values["passed_over"] = float(self.passed_over)
        return {f"rollout/curriculum/{name}": value for name, value in values.items()}

    def _next_prompt(self) -> Prompt:
        assert self.prompts is not None
        stream = self.prompts.draw()
        for _ in range(len(stream)):
            prompt = stream.next()
            if self._takes(prompt):
                return prompt
            self.passed_over += 1
        return stream.next()

    def _takes(self, prompt: Prompt) -> bool:
        rate = self._rates.rate(str(prompt.id))
        low, high = self._bounds
        if rate is None or low <= rate <= high:
            return True
        self._rolls += 1
        return random.Random(f"{rollout_seed(self.args)}:{self._rolls}").random() < self._floor

    def _group(self, prompt: Prompt) -> Group:
        self._rates.expect(self.sample_group_index, str(prompt.id))
        return super()._group(prompt)

    def _state(self) -> dict[str, Any]:
        curriculum = {"rolls": self._rolls, "passed_over": self.passed_over, "rates": self._rates.state()}
        return {**super()._state(), "curriculum": curriculum}

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        super()._restore(state, path)
        held = state.get("curriculum")
        if held is None:
            logger.warning("%s was written without a curriculum: every prompt counts as untried", path)
            return
        self._rolls, self.passed_over = held["rolls"], held["passed_over"]
        self._rates.restore(held["rates"])


def _check_recorded(args: Any) -> None:
    recorders = {
        "dynamic_sampling_filter_path": pass_rate.check_pass_rate,
        "rollout_all_samples_process_path": pass_rate.record_pass_rates,
    }
    paths = [(getattr(args, dest, None), dest, hook) for dest, hook in recorders.items()]
    if not any(path and load_hook(path, dest) is hook for path, dest, hook in paths):
        raise ConfigError(
            "nothing records pass rates, so every prompt would stay untried",
            place="--data-source-path",
            remedy="--dynamic-sampling-filter-path slime.rollout.filter_hub.pass_rate.check_pass_rate drops "
            "groups outside of the bounds; --rollout-all-samples-process-path "
            "slime.rollout.filter_hub.pass_rate.record_pass_rates drops none",
        )
