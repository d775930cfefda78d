"""The books of rollouts (law 5): submitted = trained + filtered + failed + requeued + in flight.

Invariant: every submission has a ticket, and every ticket gets exactly one fate; a second fate raises.
Counts rollouts, not samples or prompts. Knows nothing of how rollouts run.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from slime.errors import SlimeError


class AccountingError(SlimeError):
    """A rollout was lost, counted twice, or settled without having been submitted."""


class Fate(enum.Enum):
    """What became of a submitted rollout."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    REQUEUED = "requeued"


KEPT = ("finished", "continued")
"""Reasons of a requeue that loses nothing; with any other, a rollout begins again."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What a rollout cost since it was submitted.

    Attributes:
        seconds: in flight.
        tokens: of all its samples that were sampled and may train.
    """

    seconds: float = 0.0
    tokens: int = 0


NO_EFFORT = Effort()


@dataclass
class Account:
    """Counts over a step or a run. `carried` is what was in flight when it began: carried + submitted = ...

    Attributes:
        seconds: rollout seconds by fate and reason.
        lengths: sum of the tokens, and number, of rollouts that sampled any, by fate.
    """

    name: str
    carried: int = 0
    submitted: int = 0
    fates: Counter[tuple[Fate, str]] = field(default_factory=Counter)
    seconds: defaultdict[tuple[Fate, str], float] = field(
        default_factory=lambda: defaultdict(float), compare=False
    )
    lengths: dict[Fate, tuple[int, int]] = field(default_factory=dict)

    def add(self, fate: Fate, reason: str, effort: Effort) -> None:
        """Count one rollout."""
        self.fates[fate, reason] += 1
        self.seconds[fate, reason] += effort.seconds
        if effort.tokens:
            tokens, count = self.lengths.get(fate, (0, 0))
            self.lengths[fate] = tokens + effort.tokens, count + 1

    @property
    def wasted_ratio(self) -> float:
        """Share of the rollout seconds that went into what does not train, and is not kept either."""
        whole = sum(self.seconds.values())
        wasted = sum(
            seconds
            for (fate, reason), seconds in self.seconds.items()
            if fate is not Fate.TRAINED and reason not in KEPT
        )
        return wasted / whole if whole else 0.0

    @property
    def length_ratio(self) -> float:
        """Mean length of the rollouts that trained, over that of all that ended; below 1, short ones win."""
        ended = [self.lengths.get(fate, (0, 0)) for fate in (Fate.TRAINED, Fate.FILTERED, Fate.FAILED)]
        tokens, count = sum(t for t, _ in ended), sum(c for _, c in ended)
        trained, times = self.lengths.get(Fate.TRAINED, (0, 0))
        return (trained / times) / (tokens / count) if trained and tokens else 1.0

    def total(self, fate: Fate) -> int:
        """Rollouts of this fate, whatever the reason."""
        return sum(count for (kind, _), count in self.fates.items() if kind is fate)

    def reasons(self, fate: Fate) -> dict[str, int]:
        """Count by reason, most frequent first."""
        return {reason: count for (kind, reason), count in self.fates.most_common() if kind is fate}

    @property
    def in_flight(self) -> int:
        """What the identity leaves: submitted or carried, without a fate."""
        return self.carried + self.submitted - self.fates.total()

    def line(self) -> str:
        """The identity, for a person."""
        carried = f"{self.carried} carried + " if self.carried else ""
        parts = [f"{self.total(Fate.TRAINED)} trained"]
        for fate in (Fate.FILTERED, Fate.FAILED):
            parts.append(f"{self.total(fate)} {fate.value}{_brackets(self.reasons(fate))}")
        requeued = f"{self.total(Fate.REQUEUED)} requeued{_brackets(self.reasons(Fate.REQUEUED))}"
        parts += [requeued, f"{self.in_flight} in flight"]
        return f"{self.name}: {carried}{self.submitted} submitted = {' + '.join(parts)}"

    def metrics(self) -> dict[str, float]:
        """``rollout/accounting/...``: totals, and one count a reason."""
        prefix = "rollout/accounting/"
        values: dict[str, float] = {
            prefix + "carried": self.carried,
            prefix + "submitted": self.submitted,
            prefix + "in_flight": self.in_flight,
        }
        for fate in Fate:
            values[prefix + fate.value] = self.total(fate)
        for fate in (Fate.FILTERED, Fate.FAILED, Fate.REQUEUED):
            for reason, count in self.reasons(fate).items():
                values[f"{prefix}{fate.value}/{reason}"] = count
        values["rollout/wasted_ratio"] = self.wasted_ratio
        values["rollout/length_ratio"] = self.length_ratio
        return values


class Ledger:
    """The tickets of a run, with an account for the step and one for the whole."""

    def __init__(self) -> None:
        self.total = Account("total")
        self.step = Account("step")
        self._open: set[int] = set()
        self._tickets = itertools.count()

    def begin(self, name: str) -> None:
        """Name the account of a step, which began when the one before was closed."""
        self.step.name = name

    def close(self) -> Account:
        """The account of the step that ends. The next begins at once, with what is open carried into it: what
        is submitted between two steps belongs to the later one."""
        ended, self.step = self.step, Account("the next step", carried=len(self._open))
        return ended

    def submit(self, count: int) -> list[int]:
        """Open `count` tickets, one a rollout."""
        tickets = list(itertools.islice(self._tickets, count))
        self._open.update(tickets)
        for account in (self.step, self.total):
            account.submitted += count
        return tickets

    def settle(
        self, tickets: Iterable[int], fate: Fate, reason: str = "", effort: Effort = NO_EFFORT
    ) -> None:
        """Give these rollouts their fate; `effort` is that of each.

        Raises:
            AccountingError: a ticket is unknown or has its fate already.
        """
        for ticket in tickets:
            if ticket not in self._open:
                raise AccountingError(
                    f"rollout ticket {ticket} is settled twice, now as {fate.value} {reason}"
                )
            self._open.remove(ticket)
            for account in (self.step, self.total):
                account.add(fate, reason, effort)

    def check(self, in_flight: int) -> None:
        """Compare the books with what really is in flight.

        Args:
            in_flight: rollouts that the scheduler holds, counted there.

        Raises:
            AccountingError: the identity does not hold.
        """
        for account in (self.step, self.total):
            if account.in_flight != in_flight or len(self._open) != in_flight:
                raise AccountingError(
                    f"rollouts do not add up: {account.line()}, but {in_flight} are really in flight"
                )


def _brackets(reasons: dict[str, int]) -> str:
    named = ", ".join(f"{reason or 'unnamed'} {count}" for reason, count in reasons.items())
    return f" ({named})" if named else ""
