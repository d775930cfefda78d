"""The subject of the contracts of a generate hook: the hook on a stage, and its first two calls.

Invariant: a call is made when a contract first asks for it, and once; contracts share it. Judges nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from slime.contracts.attempt import Attempt, attempt
from slime.contracts.finding import NotApplicableError
from slime.contracts.stage import Stage
from slime.contracts.trace import Kind, Origin, origins
from slime.errors import HookError, SlimeError
from slime.rollout.hooks import Hook, load_hook
from slime.utils.types import Sample

DEST = "custom_generate_function_path"


class GenerateCase:
    """A generate hook on a stage.

    Raises:
        HookError: at `hook`, if it does not load.
    """

    def __init__(self, stage: Stage, path: str) -> None:
        self.stage = stage
        self.path = path

    @functools.cached_property
    def hook(self) -> Hook:
        """The function, its signature checked."""
        return load_hook(self.path, DEST)

    @functools.cached_property
    def first(self) -> Attempt:
        """A call on a good engine, however it ended. The event loop is probed at each engine call."""
        with self.stage.playing(self.stage.answers, probing=True):
            return attempt(self.stage, self.hook, self.stage.samples(1)[0])

    @functools.cached_property
    def second(self) -> Attempt:
        """The same call again."""
        _ = self.rollout
        return attempt(self.stage, self.hook, self.stage.samples(1)[0])

    @property
    def rollout(self) -> Attempt:
        """The first call, if it gave a rollout.

        Raises:
            NotApplicableError: it gave none, so that there is nothing to look at.
        """
        try:
            first = self.first
        except HookError as error:
            raise NotApplicableError("the hook cannot be called") from error
        if first.gave_up or not first.samples:
            raise NotApplicableError("the hook gave no rollout on a good engine")
        return first

    @property
    def rollout_samples(self) -> list[Sample] | None:
        """Finished samples for a reward to judge; None if the hook gives none."""
        try:
            return self.rollout.samples
        except SlimeError:
            return None

    @functools.cached_property
    def origins(self) -> list[list[Origin]]:
        """Of the trained tokens of each sample of the rollout."""
        return origins(self.rollout.samples, self.rollout.served)

    def strangers(self, attempts: Sequence[Attempt]) -> list[tuple[Sample, Origin]]:
        """Trained tokens of other calls of the hook, at once, that the engine did not send for their row.

        Raises:
            NotApplicableError: the first rollout has such tokens already.
        """
        if any(origin.kind != "sampled" for row in self.origins for origin in row):
            raise NotApplicableError("the tokens of a single rollout are not the engine's already")
        rows = [sample for one in attempts for sample in one.samples]
        found = zip(rows, origins(rows, attempts[0].served), strict=True)
        return [(sample, origin) for sample, row in found for origin in row if origin.kind != "sampled"]

    def trained(self, *kinds: Kind) -> list[tuple[Sample, Origin]]:
        """Trained tokens of these kinds, with their samples.

        Raises:
            NotApplicableError: no rollout, or one that trains no token.
        """
        rows = list(zip(self.rollout.samples, self.origins, strict=True))
        if not any(row for _, row in rows):
            raise NotApplicableError("the rollout trains no token")
        return [(sample, origin) for sample, row in rows for origin in row if origin.kind in kinds]
