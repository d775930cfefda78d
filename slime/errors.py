"""The one exception tree. Every error that reaches a user derives from `SlimeError` and says what
went wrong, where (file, line, flag, rollout id), and what to do about it.

Knows nothing of the rest of the package.
"""

from __future__ import annotations


class SlimeError(Exception):
    """Base of all errors that slime raises on purpose.

    Args:
        message: what is wrong, naming the field or file.
        place: where, e.g. ``data.jsonl:17``, ``--lr`` or ``rollout 12``.
        remedy: what the user can do about it.
    """

    def __init__(self, message: str, *, place: str | None = None, remedy: str | None = None) -> None:
        self.message = message
        self.place = place
        self.remedy = remedy
        super().__init__(self._text())

    def _text(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.place, self.remedy)


def _rebuild(kind: type[SlimeError], message: str, place: str | None, remedy: str | None) -> SlimeError:
    """Unpickle without calling the subclass constructor, whose arguments may differ."""
    error = kind.__new__(kind)
    SlimeError.__init__(error, message, place=place, remedy=remedy)
    return error


class ConfigError(SlimeError):
    """A flag, YAML key or combination of them that cannot be run."""


class DataError(SlimeError):
    """A prompt file or a row of it that cannot be used."""


class HookError(SlimeError):
    """A user function that does not import, has a wrong signature, or broke its contract."""


class ModelError(SlimeError):
    """A model folder that is missing or unusable, or an architecture that is not supported."""


class EngineError(SlimeError):
    """The rollout engine refused, failed or vanished."""


class EngineRequestError(EngineError):
    """The engine answered 4xx: the request itself is wrong, and a retry cannot help."""


class EngineUnavailableError(EngineError):
    """The engine cannot be reached or died while it generated."""


class CapabilityError(EngineError):
    """The engine's version lacks what a flag needs: another start of it would not help."""


class DeadlineError(SlimeError):
    """A wait passed its deadline; names what waited, for whom and how long."""


class RewardError(SlimeError):
    """A reward could not be computed. Never turned into a number.

    Args:
        reason: short and of few values, to count by, e.g. ``timeout``; None for the name of the class.
    """

    def __init__(
        self,
        message: str,
        *,
        place: str | None = None,
        remedy: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message, place=place, remedy=remedy)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_reward, (self.message, self.place, self.remedy, self.reason)


def _rebuild_reward(message: str, place: str | None, remedy: str | None, reason: str | None) -> RewardError:
    return RewardError(message, place=place, remedy=remedy, reason=reason)


class RolloutFailedError(SlimeError):
    """Too many rollouts failed for training to go on."""


class CheckpointError(SlimeError):
    """A checkpoint that cannot be written, found or read back."""


class MismatchError(SlimeError):
    """Engine and trainer disagree about the log-probs of the same tokens."""


class ActorDiedError(SlimeError):
    """A process of the run ended unexpectedly."""


class RankLostError(SlimeError):
    """A process that trains lost contact with another of its group; the cause is in the other one."""


class NonFiniteGradientError(SlimeError):
    """Gradients were infinite or NaN several steps in a row: training has diverged."""
