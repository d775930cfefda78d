"""Which data set the next prompt comes from, so that every share holds at every moment.

Invariant: after N draws the count of each set differs from N times its share by less than 1, whatever N is:
no drift. The order depends on the shares and the seed only. Knows nothing of data; all arithmetic is exact.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction


class Interleave:
    """A deterministic sequence over k sets with given weights.

    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): at step n, of
    the sets that are at least 1/(2k-2) behind n times their share, take the one that must come first. Then no
    count is ever further than 1 - 1/(2k-2) from n times its share: the least bound for all weights.

    Args:
        weights: positive, in any unit; floats are taken as the decimals that they print as.
        seed: decides between sets that are due at the same time.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        parts = [Fraction(str(weight)) for weight in weights]
        # Whole numbers over one denominator: comparisons without the gcd of each Fraction.
        scale = math.lcm(*(part.denominator for part in parts))
        self._weights = [int(part * scale) for part in parts]
        self._total = sum(self._weights)
        self._ranks = list(range(len(parts)))
        random.Random(seed).shuffle(self._ranks)
        self.counts = [0] * len(parts)

    def next(self) -> int:
        """Index of the set of the next draw."""
        chosen = self._due() if len(self.counts) > 1 else 0
        self.counts[chosen] += 1
        return chosen

    def _due(self) -> int:
        step, slots = sum(self.counts) + 1, 2 * len(self.counts) - 2
        behind = [
            step * weight - self._total * count
            for weight, count in zip(self._weights, self.counts, strict=True)
        ]
        due = [i for i, lag in enumerate(behind) if slots * lag >= self._total]
        return min(due, key=lambda i: (self._slack(i, behind[i], slots), self._ranks[i]))

    def _slack(self, index: int, lag: int, slots: int) -> Fraction:
        """Draws that the set can still wait, times the slots of the bound."""
        return Fraction((slots - 1) * self._total - slots * lag, self._weights[index])
