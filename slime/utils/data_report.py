"""What happened to the rows of a data set that cannot be used: counted by reason, with the first places.

Invariant: a bad row is counted once, whatever its reason. Knows nothing of files: readers add to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PLACES_KEPT = 3


@dataclass
class DatasetReport:
    """Counts of a data set's rows.

    Attributes:
        rows: rows looked at, good and bad.
        counts: bad rows by reason.
        places: first few places (``file:line``, with details) by reason.
    """

    path: str
    rows: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    @property
    def bad(self) -> int:
        """Rows that cannot be used."""
        return sum(self.counts.values())

    def add(self, reason: str, place: str, detail: str = "") -> None:
        """Count a bad row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES_KEPT:
            places.append(f"{place} ({detail})" if detail else place)

    def summary(self) -> str:
        """One line per reason; empty when every row is good."""
        if not self.counts:
            return ""
        lines = [f"{self.path}: {self.bad} of {self.rows} rows left out"]
        for reason, count in self.counts.items():
            more = ", ..." if count > len(self.places[reason]) else ""
            lines.append(f"  {count} x {reason}: {', '.join(self.places[reason])}{more}")
        return "\n".join(lines)
