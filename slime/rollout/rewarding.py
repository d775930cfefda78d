"""Rewards of finished rollouts: sample by sample, or a whole group in one call, each under a deadline.

Invariant: after it every sample of the rollout has a checked, finite reward, or an error says why not.
Knows where rewards come from only by `rm_hub`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.errors import DeadlineError, HookError
from slime.rollout.rm_hub import Failed, Invalid, Verdict, reward_seconds, unwrapped, verdict_on, verdicts_on
from slime.rollout.rm_hub.validity import check_reward_key, checked_reward, reward_source
from slime.rollout.rm_hub.verdict import VERDICTS, Tally
from slime.rollout.tasks import GRACE_SECONDS, all_of, bounded
from slime.utils.types import Sample

BUILTIN_SLACK = 600.0
"""Seconds that a built-in check may wait for a free process; the check itself has ``--reward-timeout``."""
HOOK_SLACK = 1.0
"""The reward hub's own deadline comes first, with the better message; this one ends what ignores it."""

INVALID_KEY = "reward_invalid"
"""Key of `Sample.metadata` for the reason of an `Invalid` verdict."""


class Rewarder:
    """Reads custom_rm_path, group_rm, reward_timeout and the reward keys of `args`.

    Args:
        tally: counts the verdicts on training rollouts.
    """

    def __init__(self, args: Any, grace: float = GRACE_SECONDS, tally: Tally = VERDICTS) -> None:
        self._args = args
        self._grace = grace
        self._tally = tally
        self._path: str | None = getattr(args, "custom_rm_path", None)
        self._timeout = reward_seconds(args)
        self.by_group = bool(getattr(args, "group_rm", False))

    def place(self, samples: Sequence[Sample]) -> str:
        """Where the reward of these samples comes from, for messages."""
        own = next((sample.custom_rm_path for sample in samples if sample.custom_rm_path), None)
        return own or self._path or "slime.rollout.rm_hub"

    def seconds(self, samples: Sequence[Sample]) -> float:
        """Deadline of the reward of one of these samples."""
        custom = self._path or any(sample.custom_rm_path for sample in samples)
        return self._timeout + (HOOK_SLACK if custom else BUILTIN_SLACK)

    async def reward(self, samples: Sequence[Sample], evaluation: bool = False) -> None:
        """Reward those samples of a rollout that have none, at once.

        Raises:
            RewardError, HookError, DeadlineError: that of a failed verdict, or past the deadline.
        """
        missing = [sample for sample in samples if sample.reward is None]
        verdicts = await all_of(self._one(sample) for sample in missing)
        self._store(samples, missing, verdicts, evaluation)

    async def reward_together(self, samples: Sequence[Sample], place: str, evaluation: bool = False) -> None:
        """Reward the samples of a group in one call, all of them again if one has no reward.

        Raises:
            RewardError, HookError, DeadlineError: that of a failed verdict, or past the deadline.
        """
        missing = list(samples) if any(sample.reward is None for sample in samples) else []
        verdicts: list[Verdict] = []
        if missing:
            try:
                verdicts = await self._bounded(verdicts_on(self._args, missing), missing, place)
            except (DeadlineError, HookError) as error:
                verdicts = [Failed(error)] * len(missing)
        self._store(samples, missing, verdicts, evaluation)

    async def _one(self, sample: Sample) -> Verdict:
        place = f"rollout {sample.rollout_id}"
        try:
            verdict: Verdict = await self._bounded(verdict_on(self._args, sample), [sample], place)
        except (DeadlineError, HookError) as error:
            return Failed(error)
        return verdict

    async def _bounded(self, work: Any, samples: Sequence[Sample], place: str) -> Any:
        return await bounded(
            work,
            seconds=self.seconds(samples),
            what=f"reward ({self.place(samples)})",
            place=place,
            grace=self._grace,
        )

    def _store(
        self,
        samples: Sequence[Sample],
        missing: Sequence[Sample],
        verdicts: Sequence[Verdict],
        evaluation: bool,
    ) -> None:
        """Count the verdicts and put the rewards where they belong; a failed one ends the rollout."""
        if not evaluation:
            for verdict in verdicts:
                self._tally.record(verdict)
        for sample, verdict in zip(missing, verdicts, strict=True):
            sample.metadata.pop(INVALID_KEY, None)
            if isinstance(verdict, Invalid):
                sample.metadata[INVALID_KEY] = verdict.reason
        for sample, verdict in zip(missing, verdicts, strict=True):
            sample.reward = unwrapped(verdict)
        for sample in samples:
            checked = checked_reward(
                sample.reward, source=reward_source(sample, self._args), sample=sample, args=self._args
            )
            sample.reward = checked
            check_reward_key(checked, sample=sample, args=self._args, evaluation=evaluation)
