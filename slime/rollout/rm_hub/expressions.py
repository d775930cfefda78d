r"""Equality of LaTeX expressions by the library math-verify, read and compared piece by piece.

Invariant: an answer that cannot be read, one that is too large to work out, and a wrong one are told apart.
Two real expressions that differ at a point are unequal without any algebra. Runs in a worker process, whose
pool holds the deadline; may hang without one.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from slime.errors import RewardError

MAX_CHARACTERS = 2000
MAX_DEPTH = 40
MAX_DIGITS = 5000.0
MAX_FACTORIAL = 2000
MAX_TERMS = 2000
_SAMPLE_POINTS = ((3, 7), (11, 5))
_GAP = 1e-4


def too_complex(what: str) -> RewardError:
    """The error for an answer that no check should spend its time on."""
    return RewardError(f"cannot judge the answer: {what}", reason="too_complex")


def check_size(text: str) -> None:
    """Refuse a text that is too long or nested too deeply to parse.

    Raises:
        RewardError: with the reason ``too_complex``.
    """
    if len(text) > MAX_CHARACTERS:
        raise too_complex(f"it has {len(text)} characters, more than {MAX_CHARACTERS}")
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise too_complex(f"its brackets are {deepest} deep, more than {MAX_DEPTH}")


@functools.lru_cache(maxsize=1024)
def normalised(text: str) -> str:
    """The expression without units, text wrappers and other layout, as the library sees it."""
    from math_verify.parser import LatexExtractionConfig, normalize_latex

    result: str = normalize_latex(text, config=LatexExtractionConfig().normalization_config)
    return result


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Any:
    """The sympy expression of a normalised text, or None where it is none.

    Raises:
        RewardError: it is too large, or reading it takes too much stack or memory.
    """
    from math_verify.parser import parse_latex_cached

    try:
        expression = parse_latex_cached(text)
    except (RecursionError, MemoryError) as error:
        raise too_complex(f"reading it raised {type(error).__name__}") from error
    except Exception:  # noqa: BLE001 - the parser raises plain Exception for text that is no LaTeX
        return None
    if expression is not None:
        _check_magnitude(expression)
    return expression


def equal(gold: Any, answer: Any) -> bool:
    """True if both expressions are equal.

    Raises:
        Exception: whatever sympy raises; it means that there is no verdict.
    """
    if _differ(gold, answer):
        return False
    return bool(_library().verify(gold, answer, timeout_seconds=None, raise_on_error=True))


def _differ(gold: Any, answer: Any) -> bool:
    """Whether two real-valued expressions in the same symbols clearly have other values at a point."""
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.free_symbols != answer.free_symbols:
        return False
    symbols = sorted(gold.free_symbols, key=str)
    if len(symbols) > 4 or not (_elementary(gold) and _elementary(answer)):
        return False
    for start, step in _SAMPLE_POINTS:
        point = {symbol: start + step * place for place, symbol in enumerate(symbols)}
        values = [complex(expression.subs(point).evalf(15)) for expression in (gold, answer)]
        if not all(math.isfinite(abs(value)) for value in values):
            return False
        if abs(values[0] - values[1]) > _GAP * max(1.0, *map(abs, values)):
            return True
    return False


def _elementary(expression: Any) -> bool:
    """Whether every part has one plain value at a point: no percentages, sums, sets or unknown functions."""
    from sympy import Add, Mul, Number, NumberSymbol, Pow, Symbol, exp, preorder_traversal

    kinds = (Add, Mul, Pow, Number, NumberSymbol, Symbol, exp)
    return all(
        isinstance(node, kinds) and node.is_finite is not False for node in preorder_traversal(expression)
    )


def _check_magnitude(expression: Any) -> None:
    """Refuse powers and factorials whose digits would fill the memory, and sums that take for ever."""
    from sympy import Pow, Product, Sum, factorial, preorder_traversal

    for node in preorder_traversal(expression):
        if isinstance(node, Pow) and _digits(node) > MAX_DIGITS:
            raise too_complex(f"it holds a power of more than {MAX_DIGITS:g} digits")
        if isinstance(node, factorial) and _size(node.args[0]) > MAX_FACTORIAL:
            raise too_complex(f"it holds a factorial of more than {MAX_FACTORIAL}")
        if isinstance(node, Sum | Product) and any(_terms(limit) > MAX_TERMS for limit in node.limits):
            raise too_complex(f"it holds a sum or product of more than {MAX_TERMS} terms")


def _terms(limit: Any) -> float:
    """Terms that an index runs over; 0 where its bounds are no plain numbers, or there is no end."""
    low, high = (_size(bound) for bound in limit[1:3]) if len(limit) == 3 else (0.0, 0.0)
    return abs(high - low) if math.isfinite(high - low) else 0.0


def _digits(power: Any) -> float:
    """Digits of a power of numbers; 0 where a symbol is in it."""
    base, exponent = (_size(part) for part in power.args)
    if math.isnan(base) or math.isnan(exponent) or base in (0.0, 1.0):
        return 0.0
    return exponent * abs(math.log10(base)) if math.isfinite(base) else exponent * MAX_DIGITS


def _size(part: Any) -> float:
    """Rough absolute value of a number without evaluating it exactly; nan where it is not a plain number."""
    from sympy import Add, Mul, Number, Pow, factorial

    if isinstance(part, Number):
        return _float(part)
    if isinstance(part, factorial):
        inner = _size(part.args[0])
        return math.inf if inner > 170 else math.gamma(inner + 1.0)
    if not isinstance(part, Pow | Mul | Add):
        return math.nan
    sizes = [_size(argument) for argument in part.args]
    if isinstance(part, Add):
        return math.fsum(sizes)
    return math.prod(sizes) if isinstance(part, Mul) else _power(sizes[0], sizes[1])


def _power(base: float, exponent: float) -> float:
    try:
        return float(base**exponent)
    except OverflowError:
        return math.inf


def _float(number: Any) -> float:
    try:
        return abs(float(number))
    except OverflowError:
        return math.inf


@functools.cache
def _library() -> Any:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its deadline is off
    return math_verify
