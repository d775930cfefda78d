"""Closed intervals of whole numbers."""

Interval = tuple[int, int]


def merge(intervals: list[Interval]) -> list[Interval]:
    """The fewest intervals that cover the same points, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def covers(intervals: list[Interval], point: int) -> bool:
    """Whether any interval holds the point."""
    return any(start <= point <= end for start, end in intervals)
