r"""Numbers, fractions and tuples of them as they stand in answers: ``1,000``, ``\frac{3}{4}``, ``(1, 2)``.

Invariant: what is read is exact (rationals of any size); what is not plainly such a literal is None, and left
to the computer algebra. Linear in the length of the text. Knows no variables, functions or units.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

DECIMALS = 6
"""Digits after the point that count where a number is written as a decimal, as in math-verify."""
_LAYOUT = re.compile(r"\s+|\\left|\\right|\\[!,;: ]|\$|~")
_INTEGER = r"\d{1,3}(?:,\d{3})+|\d+"
_NUMBER = re.compile(rf"(?P<sign>[-+]?)(?P<whole>{_INTEGER})?(?P<part>\.\d*)?")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)(?P<mixed>\d+)?(?:"
    r"\\frac(?:\{(?P<top>[-+]?\d+)\}|(?P<top1>\d))(?:\{(?P<bottom>[-+]?\d+)\}|(?P<bottom1>\d))"
    r"|(?<!\d)(?P<over>\d+)/(?P<under>\d+)"
    r"|(?<!\d)\{(?P<over2>[-+]?\d+)\}/\{(?P<under2>\d+)\})"
)
_BRACKETS = {"(": ")", "[": "]"}


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number and how it was written."""

    value: Fraction
    decimal: bool = False
    unreduced: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether an integer is written: ``4``, ``4.0``, not ``8/2``."""
        return self.value.denominator == 1 and not self.unreduced

    def equals(self, other: Number) -> bool:
        """Equal, to six decimals where one is a decimal; a fraction not in lowest terms equals none."""
        if self.unreduced or other.unreduced:
            return False
        if self.decimal or other.decimal:
            return round(self.value, DECIMALS) == round(other.value, DECIMALS)
        return self.value == other.value


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers between brackets, in order."""

    opening: str
    closing: str
    numbers: tuple[Number, ...]

    def equals(self, other: Row) -> bool:
        """The same brackets, and equal numbers one by one."""
        return (self.opening, self.closing, len(self.numbers)) == (
            other.opening,
            other.closing,
            len(other.numbers),
        ) and all(a.equals(b) for a, b in zip(self.numbers, other.numbers, strict=True))


def plain(text: str) -> str:
    r"""The text without white space, delimiters and layout commands; ``\dfrac`` as ``\frac``."""
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    return _LAYOUT.sub("", text)


def literal(text: str) -> Number | Row | None:
    """The number or row of numbers that a plain text (see `plain`) is, or None."""
    if text[:1] in _BRACKETS and text[-1:] in (")", "]") and len(text) > 2:
        numbers = [number(item, separators=False) for item in text[1:-1].split(",")]
        known = tuple(item for item in numbers if item is not None)
        return Row(text[0], text[-1], known) if len(known) == len(numbers) > 1 else None
    return number(text)


def number(text: str, *, separators: bool = True) -> Number | None:
    """The number that a plain text is, or None.

    Args:
        separators: allow ``1,000``.
    """
    match = _NUMBER.fullmatch(text)
    if match is not None and (match["whole"] or len(match["part"] or "") > 1):
        if not separators and "," in text:
            return None
        return Number(Fraction(text.replace(",", "").removesuffix(".")), decimal=_has_digits(match["part"]))
    match = _FRACTION.fullmatch(text)
    return None if match is None else _fraction(match)


def _has_digits(part: str | None) -> bool:
    return bool(part and part.strip(".0"))


def _fraction(match: re.Match[str]) -> Number | None:
    top, bottom = (
        int(next(match[name] for name in names if match[name] is not None))
        for names in (("top", "top1", "over", "over2"), ("bottom", "bottom1", "under", "under2"))
    )
    mixed, sign = int(match["mixed"] or 0), -1 if match["sign"] == "-" else 1
    if bottom == 0 or (match["mixed"] and (top < 0 or bottom < 0)):
        return None
    unreduced = abs(bottom) == 1 or math.gcd(top, bottom) != 1
    return Number(sign * (mixed + Fraction(top, bottom)), unreduced=unreduced)
